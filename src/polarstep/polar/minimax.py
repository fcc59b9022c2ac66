"""Optimal odd polynomials, and their optimal composition (PolarExpress).

The polar factor replaces every singular value by 1, so a step of a polynomial iteration should be
the odd polynomial p(x) = a x + b x³ + c x⁵ + … closest to 1 on the interval [l, u] where the
singular values lie. Its range [1 − E, 1 + E] is the next step's interval. Choosing every step in
this way is optimal for the whole composition. This is PolarExpress (N. Amsel, D. Persson, C. Musco
and R. Gower, "The Polar Express: Optimal Matrix Sign Methods and Their Application to the Muon
Algorithm", arXiv:2505.16932).

An odd polynomial of degree 2k − 1 is the minimax polynomial if and only if its error takes the
values E, −E, E, … at k + 1 points (Chebyshev). Its derivative is even and has at most k − 1
positive zeros. So the k + 1 points are l, u and all k − 1 critical points t₁ < … < t_{k−1} between
them, and

    p(x) = C ∫₀ˣ (t₁² − s²) ⋯ (t_{k−1}² − s²) ds.

We solve for the critical points directly, by Newton's method on "p rises and falls by equal
amounts", instead of exchanging reference points and re-solving for coefficients (Remez). In this
form nothing cancels: coefficients and E have full relative precision for every l/u, from 1e-6 and
below up to l = u, where p becomes the Newton–Schulz polynomial of its degree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polarstep.checked_values import check_fraction, check_integer, check_number
from polarstep.products.squarings import Polynomial

__all__ = ["minimax", "polar_express"]


def minimax(lower: float, upper: float, degree: int = 5) -> tuple[Polynomial, float]:
    """The odd polynomial of the given degree closest to 1 on [lower, upper], and its error E.

    >>> p, E = minimax(0.1, 1.0)
    >>> [round(c, 3) for c in p], round(E, 3)
    ([5.604, -13.884, 9.733], 0.453)
    """
    if not 0 < lower <= upper < math.inf:
        raise ValueError(
            f"lower={lower!r}, upper={upper!r}: expected 0 < lower ≤ upper; the interval holds the "
            "nonzero singular values after normalization, e.g. [1e-3, 1]"
        )
    if degree < 3 or degree % 2 == 0:
        raise ValueError(
            f"degree={degree}: expected an odd degree ≥ 3 (3: cubic, 5: quintic, 7, …)"
        )
    k = (degree + 1) // 2
    r, width = lower / upper, (upper - lower) / upper  # work on [r, 1], of length `width`
    nodes, weights = _gauss_legendre(k)  # exact for every integral below
    z = _critical_points(r, width, nodes, weights, k - 1)
    t = r + width * z

    # p(r)/C, and the common rise and fall 2E/C between neighbouring points of alternation.
    s = nodes * r
    bottom = float((weights * (t**2 - s[:, None] ** 2).prod(dim=1)).sum() * r)
    swing = float(_swings(z, r, width, nodes, weights).mean()) * width**k
    C = 1 / (bottom + swing / 2)

    # ∏(tⱼ² − y) by powers of y = s², then integrated term by term.
    series = [1.0]
    for root in (t**2).tolist():
        series = [root * a - b for a, b in zip([*series, 0.0], [0.0, *series], strict=True)]
    polynomial = tuple(C * a / (2 * i + 1) / upper ** (2 * i + 1) for i, a in enumerate(series))
    return polynomial, C * swing / 2


def polar_express(
    lower: float,
    steps: int,
    degree: int | Sequence[int] = 5,
    *,
    cushion: float = 0.0,
    safety: float = 1.01,
) -> tuple[Polynomial, ...]:
    """The optimal composition of ``steps`` odd polynomials for singular values in [lower, 1].

    With ``cushion=0`` and ``safety=1`` the composition maps [lower, 1] into [1 − E, 1 + E], with the
    smallest E that as many polynomials of this degree can reach. But optimal polynomials for a wide
    interval dip close to zero inside it, and are steep at its upper end. A singular value that rounding
    lifts above one then grows without bound: seven steps of degree nine for ``lower=1e-4`` turned a
    third of all float32 matrices of rank one into NaN. ``cushion`` and ``safety`` guard against
    that, as in the code listing of Amsel et al.

    Args:
        lower: lower bound of the normalized singular values, 0 < lower ≤ 1.
        steps: number of polynomials.
        degree: the degree of all polynomials, 3, 5, 7, …, or a sequence with the degree of each.
        cushion: design each polynomial for [max(l, cushion·u), u] instead of [l, u], then rescale
            it so that its range on [l, u] is centred at 1 again.
        safety: evaluate each polynomial at x/safety, which tolerates singular values that rounding
            pushed above u. The last polynomial is exempt, so that the result stays centred at 1. The
            default, 1.01, is safe in 16 bits too; 1 means no safety factor.
    """
    _check_composition(lower, steps, cushion, safety)
    degrees = [degree] * steps if isinstance(degree, int) else degree
    if len(degrees) != steps:
        raise ValueError(f"degree={degree!r}: expected one degree, or {steps}, one for each step")
    upper = 1.0
    polynomials = []
    for step, its_degree in enumerate(degrees):
        p, E = minimax(max(lower, cushion * upper), upper, its_degree)
        if cushion * upper > lower:  # p increases below the cushion, so its least value is p(lower)
            centre = (_at(p, lower) + 1 + E) / 2
            p = tuple(c / centre for c in p)
        if step < steps - 1:
            p = tuple(c / safety ** (2 * i + 1) for i, c in enumerate(p))
        polynomials.append(p)
        lower = min(_at(p, lower), 1.0)  # above 1 only by rounding
        upper = 2 - lower
    return tuple(polynomials)


def _at(p: Polynomial, x: float) -> float:
    return math.fsum(c * x ** (2 * i + 1) for i, c in enumerate(p))


def _gauss_legendre(k: int) -> tuple[Tensor, Tensor]:
    """Nodes and weights on [0, 1], exact up to degree 2k − 1 (Golub and Welsch)."""
    i = torch.arange(1, k, dtype=torch.float64, device="cpu")
    offdiagonal = torch.diag(i / (4 * i**2 - 1).sqrt(), 1)
    nodes, vectors = torch.linalg.eigh(offdiagonal + offdiagonal.T)
    return (nodes + 1) / 2, vectors[0] ** 2


def _factors(z: Tensor, r: float, width: float, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """(tⱼ² − s²)/width at the quadrature points s between neighbouring points of alternation.

    Points are held as t = r + width·z, z in [0, 1], so that differences keep their precision when
    the interval is short. Returns a (k intervals, k nodes, k − 1 factors) tensor and the intervals'
    lengths in z.
    """
    ends = torch.cat([z.new_zeros(1), z, z.new_ones(1)])
    lengths = ends.diff()
    points = (ends[:-1, None] + lengths[:, None] * nodes)[..., None]
    return (z - points) * (2 * r + width * (z + points)), lengths


def _swings(z: Tensor, r: float, width: float, nodes: Tensor, weights: Tensor) -> Tensor:
    """|p(next) − p(this)| between neighbouring points of alternation, over C·widthᵏ."""
    factors, lengths = _factors(z, r, width, nodes)
    return (factors.prod(dim=2) @ weights * lengths).abs()


def _critical_points(r: float, width: float, nodes: Tensor, weights: Tensor, count: int) -> Tensor:
    """The z for which all swings are equal: Newton's method on the logarithms of their ratios.

    Started at the Chebyshev points, it needs at most 7 steps for every r and all degrees up to 41.
    """
    i = torch.arange(count, 0, -1, dtype=torch.float64, device="cpu")
    z: Tensor = (1 + torch.cos(math.pi * i / (count + 1))) / 2  # the solution as l → u
    others = ~torch.eye(count, dtype=torch.bool, device="cpu")
    for _ in range(50):
        factors, lengths = _factors(z, r, width, nodes)
        swings = factors.prod(dim=2) @ weights * lengths
        # p' vanishes at every moving end of an interval, so only the integrand's derivative counts.
        without = torch.stack([factors[..., others[j]].prod(dim=2) for j in range(count)], dim=2)
        slopes = 2 * (r + width * z) * torch.einsum("ijk,j->ik", without, weights)
        jacobian = (slopes * (lengths / swings)[:, None]).diff(dim=0)
        step: Tensor = torch.linalg.solve(jacobian, swings.abs().log().diff())
        z = z - step
        if step.abs().max() < 1e-14:
            return z
    raise ArithmeticError(f"no equioscillation found on [{r}, 1] with {count} critical points")


def _check_composition(lower: float, steps: int, cushion: float, safety: float) -> None:
    check_number(
        "lower",
        lower,
        lambda x: 0 < x <= 1,
        "0 < lower ≤ 1, the least singular value to be mapped near 1 after division by δ ≥ ‖M‖_op",
        "1e-3 is usual",
    )
    check_integer("steps", steps, 0, "5 to 9 are usual")
    check_fraction("cushion", cushion, "0 means none, 0.02 is usual")
    check_number(
        "safety", safety, lambda x: 1 <= x < 2, "1 ≤ safety < 2", "1 means none, 1.01 is usual"
    )
