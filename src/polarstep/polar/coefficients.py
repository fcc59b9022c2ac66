"""Coefficient sets for the polynomial iterations, by name.

A polynomial is a tuple ``(a, b, c, …)`` meaning φ(x) = a x + b x³ + c x⁵ + …. A set is a tuple of
polynomials, one per step; its last polynomial repeats when there are more steps than polynomials.
The composition p_q = φ_q ∘ … ∘ φ₁ acts on singular values: T(M) = U p_q(Σ/δ) Vᵀ (Proposition 1).

Only ``"cubic"`` and ``"quintic"`` keep [0, 1] within [0, 1], which the paper's propositions require
(ν = 0). All others overshoot 1 to converge faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Literal

import torch
from torch import Tensor

from polarstep.checked_values import check_integer
from polarstep.polar.minimax import minimax, polar_express
from polarstep.products.squarings import Polynomial
from polarstep.torch_compile import constant

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
    # (polarstep.products.squarings). Found by least squares of high powers of φ − 1; no better
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
