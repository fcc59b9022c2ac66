"""The polynomials of the iterations: coefficient sets by name, and the best polynomials of a degree.

A polynomial is a tuple ``(a, b, c, …)`` meaning φ(x) = a x + b x³ + c x⁵ + …. A set is a tuple of
polynomials, one per step; its last polynomial repeats when there are more steps than polynomials.
The composition p_q = φ_q ∘ … ∘ φ₁ acts on singular values: T(M) = U p_q(Σ/δ) Vᵀ (Proposition 1).

Only ``"cubic"`` and ``"quintic"`` keep [0, 1] within [0, 1], which the paper's propositions require
(ν = 0). All others overshoot 1 to converge faster.

**Optimal odd polynomials, and their optimal composition** (:func:`minimax`, :func:`polar_express`). The
polar factor replaces every singular value by 1, so a step of a polynomial iteration should be
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
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Literal

import torch
from torch import Tensor

from polarstep.checked_values import check_fraction, check_integer, check_number
from polarstep.context import constant
from polarstep.numerics import Polynomial

__all__ = [
    "Name",
    "Polynomial",
    "evaluate",
    "extremes",
    "minimax",
    "names",
    "polar_express",
    "resolve",
    "survives_16_bits",
    "validated",
]


Name = Literal[
    "cubic",
    "quintic",
    "quintic-2",
    "jordan",
    "flat",
    "polar-express",
    "polar-express-sketch",
    "polar-express-nanogpt",
    "polar-express-cifar10",
]

# The least l/u a quintic should be designed for, as given in the code listing of Amsel et al.
# (arXiv:2505.16932).
_CUSHION = 0.02407327424182761


def _nested(p: float, outer: Polynomial) -> Polynomial:
    """The coefficients of Σqₖ(y² + py)ᵏ in powers of y, for ``outer`` = (q₀, q₁, …)."""
    total, power = [0.0] * (2 * len(outer) - 1), [1.0]
    for q in outer:
        for i, c in enumerate(power):
            total[i] += q * c
        shifted = [0.0, *(p * c for c in power), 0.0]
        power = [a + b for a, b in zip(shifted, [0.0, 0.0, *power], strict=True)]
    return tuple(total)


_FIXED: dict[str, tuple[Polynomial, ...]] = {
    # Newton–Schulz of degree 3 (Proposition 1): φ(1) = 1, φ'(1) = 0.
    "cubic": ((1.5, -0.5),),
    # Newton–Schulz of degree 5 (Proposition 1): φ(1) = 1, φ'(1) = φ''(1) = 0.
    "quintic": ((1.875, -1.25, 0.375),),
    # What the authors' code runs under the name "theoretical". φ(1) = 1, φ'(1) = 0, but a slope of
    # 2 at zero in place of φ''(1) = 0: faster on small singular values, overshoots to 1.0018.
    "quintic-2": ((2.0, -1.5, 0.5),),
    # K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), the
    # paper's "quintic-empirical": slope at zero first. After a few steps singular values stay
    # within [0.68, 1.21] and never converge.
    "jordan": ((3.4445, -4.7750, 2.0315),),
}

_FIXED["flat"] = (
    # Ours, one step of degree 17 for singular values in [0.1, 1], as a deflated map has them: a slope
    # of 9.9 at zero, within 0.14 of one on [0.1, 1], 1.32 at 1.05 and 2.4 at 1.15. φ(x)/x is of degree
    # four in y² − 1.6y for y = x², so three products of m×m matrices are enough
    # (polarstep.numerics). Found by least squares of high powers of φ − 1; no better
    # polynomial of this form is known.
    _nested(-1.611386, (9.910977, 87.107036, 354.004664, 613.064953, 373.958898)),
    # Applied to its own results it would explode. Further steps are the paper's quintic.
    *_FIXED["quintic"],
)

_GENERATED: dict[str, Callable[[int], tuple[Polynomial, ...]]] = {
    # Ours: the optimal composition for exactly the number of steps asked for and singular values
    # in [1e-3, 1], with the cushion above and the safety factor 1.01 of the same listing.
    "polar-express": lambda steps: polar_express(1e-3, steps, cushion=_CUSHION),
    # Ours for the small matrix of a sketch, which has the leading directions only: singular values
    # in [0.03, 1]. Four steps have the gain of seven steps of the paper's quintic, 81 at zero, and
    # are within 5e-5 of one from 0.03 on.
    "polar-express-sketch": lambda steps: polar_express(0.03, steps),
    # The nine triples the paper prints for nanoGPT. The first four are modded-nanogpt's. The fifth
    # of modded-nanogpt differs: it is the last there, and the last triple takes no safety factor.
    "polar-express-nanogpt": lambda _: polar_express(1e-3, 9, cushion=0.02, safety=1.02),
    # The nine triples the paper prints for CIFAR-10: another cushion and no safety factor.
    "polar-express-cifar10": lambda _: polar_express(1e-3, 9, cushion=_CUSHION, safety=1.0),
}


def names() -> tuple[str, ...]:
    """The names that :func:`resolve` knows."""
    return (*_FIXED, *_GENERATED)


@constant
def resolve(coefficients: str | Sequence[Sequence[float]], steps: int) -> tuple[Polynomial, ...]:
    """Exactly ``steps`` polynomials, from a name or from a sequence of coefficient tuples.

    >>> resolve("cubic", 2)
    ((1.5, -0.5), (1.5, -0.5))
    >>> resolve([(2.0, -1.5, 0.5), (1.5, -0.5)], 3)
    ((2.0, -1.5, 0.5), (1.5, -0.5), (1.5, -0.5))
    """
    check_integer("steps", steps, 0, "5 to 9 are usual")
    if isinstance(coefficients, str):
        return _named(coefficients, steps)
    return _repeat_last(validated(coefficients), steps)


def evaluate(polynomials: Sequence[Polynomial], x: Tensor) -> Tensor:
    """The composition p_q(x) of ``polynomials``, the first applied first, entry by entry."""
    for polynomial in polynomials:
        y = x * x
        value: Tensor | float = polynomial[-1]
        for c in reversed(polynomial[:-1]):
            value = value * y + c
        x = x * value
    return x


@lru_cache(maxsize=64)
def extremes(polynomials: tuple[Polynomial, ...]) -> tuple[float, float]:
    """max p(x) and max x(1 − p(x)) over 0 ≤ x ≤ 1, on a grid uniform in log x.

    p is smooth in log x, however steep it is at zero; below the grid both are negligible.
    """
    x = torch.logspace(-8, 0, 80_001, dtype=torch.float64, device="cpu")
    p = evaluate(polynomials, x)
    return max(1.0, float(p.max())), float((x * (1 - p)).max().clamp_min(0)) * (1 + 1e-6) + 1e-8


# A dict, because torch.compile traces through functools.cache and warns about it.
_SURVIVES: dict[tuple[Polynomial, ...], bool] = {}


@constant
def survives_16_bits(polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether rounding each step by 2⁻⁸, as bfloat16 does, leaves singular values bounded.

    A minimax polynomial is steepest at the ends of its interval. If rounding lifts a singular value
    over the end, each step without a safety factor multiplies the excess by that slope, and once
    the excess is about one, the value explodes. The paper's triples for CIFAR-10 begin with slopes
    of 24, 12, 11 and 8; after these steps the largest value is 2.09, 3.49, 180 and 9.9e10.
    """
    if polynomials not in _SURVIVES:
        if len(_SURVIVES) >= 256:  # coefficients that change during training never end
            _SURVIVES.clear()
        largest = 1.0
        for polynomial in polynomials:
            x = torch.linspace(0, largest * (1 + 2**-8), 4001, dtype=torch.float64, device="cpu")
            largest = float(evaluate((polynomial,), x).abs().max())
            if not largest < 4:
                break
        _SURVIVES[polynomials] = largest < 4
    return _SURVIVES[polynomials]


@cache
def _named(name: str, steps: int) -> tuple[Polynomial, ...]:
    if name in _FIXED:
        return _repeat_last(_FIXED[name], steps)
    if name in _GENERATED:
        return _repeat_last(_GENERATED[name](steps), steps)
    known = ", ".join(map(repr, names()))
    raise ValueError(
        f"coefficients={name!r}: expected one of {known}, or a sequence of tuples (a, b, c, …), "
        "one per step, each meaning a·x + b·x³ + c·x⁵ + …"
    )


def _repeat_last(polynomials: tuple[Polynomial, ...], steps: int) -> tuple[Polynomial, ...]:
    return polynomials[:steps] + polynomials[-1:] * (steps - len(polynomials))


def validated(rows: Sequence[Sequence[float]]) -> tuple[Polynomial, ...]:
    """``rows`` as tuples of floats; raises a ``ValueError`` if they are not coefficients."""
    form = "expected a sequence of tuples (a, b, c, …), one per step, e.g. ((1.5, -0.5),)"
    try:
        polynomials = tuple(tuple(float(c) for c in row) for row in rows)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"coefficients={rows!r}: {form}; wrap a single polynomial in another pair of brackets"
        ) from error
    if not polynomials:
        raise ValueError(f"coefficients={rows!r}: {form}")
    for polynomial in polynomials:
        if len(polynomial) < 2 or not all(map(math.isfinite, polynomial)):
            raise ValueError(
                f"coefficients={rows!r}: {form}; {polynomial!r} is not at least two finite numbers"
            )
    return polynomials


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
