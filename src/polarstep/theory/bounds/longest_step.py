"""How long a deflated step can be: a bound on ‖T‖_op for all but a share of leading directions.

δ and s of a deflated map come from 16 vectors with random entries (:mod:`polarstep.polar.rest_norm` and
:mod:`polarstep.polar.flat_step_scale`). The bound on ‖T‖_op depends on κ, the part of the leading
direction that these vectors hold, and holds for every spectrum. Here κ is that of a direction r that is
independent of the random entries.

**With steps** κ is that of the best of 16 independent vectors of length m, so that κm is the largest of
16 squares of normal numbers, and κ ≥ q/m for all but a share P(χ²₁ ≤ q)¹⁶ of directions.

**Without steps** V = W + fF has b columns of length n, the longer side. W, with ‖W‖²_F = b, is carried
from the last step, F are the first vectors, with columns of length one, and f is FRESH. In the worst
case Wᵀr = 0: nothing like r was in the rest of any earlier step. Then κ = ‖P_V r‖² is stochastically at
least y/(1 + y) with y = χ²_b·f²/((1 + f²)n). So it is about f²/(1 + f²), a fifth, of b/n, the κ of a
direction that is independent of W too.

Proof, for normal entries of variance 1/n in F. Let a = Vᵀr = fFᵀr and S = VᵀV − aaᵀ. By the
Sherman–Morrison formula κ = aᵀ(S + aaᵀ)⁻¹a = y/(1 + y) with y = aᵀS⁻¹a. S has only the parts of F's
columns that are orthogonal to r, and these are independent of Fᵀr. So y = (f²/n)·Σzᵢ²/sᵢ, with b
independent normal numbers zᵢ and the eigenvalues sᵢ of S. Such a sum is stochastically at least
χ²_b/(s₁⋯s_b)^{1/b} (Okamoto 1960), and (s₁⋯s_b)^{1/b} ≤ tr S/b ≤ 1 + f², but for 2f⟨W, F⟩/b, which is
below a percent on average. ∎
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polarstep.polar.coefficients import Polynomial
from polarstep.polar.flat_step_scale import MARGIN_OF_SCALE, norm_floor, tolerant_scale
from polarstep.polar.rest_norm import FRESH, MARGIN
from polarstep.products.start_vectors import SIGNS, norm_products
from polarstep.theory import checks as check
from polarstep.theory.bounds.deflated import deflated_nu
from polarstep.theory.bounds.lifted import lifted_nu

__all__ = ["longest_deflated_step", "subspace_norm_floor"]


def longest_deflated_step(
    m: int, n: int, polynomials: Sequence[Polynomial] = (), *, unseen: float = 0.01
) -> float:
    """A bound on ‖T‖_op of a deflated map of m×n matrices, for all leading directions but a share.

    ``polynomials`` are those of the steps on the rest, and none for a rest that is only scaled.
    ``unseen`` is the share of directions for which the bound may be exceeded. It holds for any spectrum.
    The worst is a single direction above a flat rest: with steps all other singular values of X₀ are
    some two thirds of the first, and without steps those of R are a tenth to a fifth of the first.

    >>> from polarstep.polar.coefficients import resolve
    >>> [round(longest_deflated_step(768, 3072, p), 1) for p in ((), resolve("flat", 1))]
    [4.8, 2.4]
    """
    for name, side in (("m", m), ("n", n)):
        check.whole(name, side, 1, "a whole number of rows or columns, 1 or more")
    check.share(
        "unseen",
        unseen,
        "a share of directions between 0 and 1, as 0.01; no bound holds for all directions",
    )
    short, long = sorted((m, n))
    if polynomials:
        best = _quantile(1, unseen ** (1 / SIGNS))
        scale = tolerant_scale(tuple(polynomials)) / MARGIN_OF_SCALE
        reach = scale / norm_floor(min(1.0, best / short), norm_products(short))
        return 1 + lifted_nu(polynomials, reach)
    part = FRESH**2 / (1 + FRESH**2)
    y = part * _quantile(min(SIGNS, short), unseen) / long
    least = MARGIN * float(subspace_norm_floor(y / (1 + y)))
    return 1 + deflated_nu(too_small=max(0.0, 1 - least))


def subspace_norm_floor(mass: Tensor | float) -> Tensor:
    """The least ‖Rᵀ·orth(RV)‖_op/‖R‖_op for vectors V that hold a part ``mass`` of R's leading vector.

    It is √(2√κ/(1 + √κ)) with κ = ‖P_V r‖² = ``mass`` for the leading right singular vector r, the worst
    case over all spectra. It is reached where all singular values but σ₁ are σ₁·√(√κ/(1 + √κ)); the
    proof is in :func:`polarstep.polar.rest_norm.rest_norm`. A margin of 1/floor on δ makes up for it.

    >>> [round(float(subspace_norm_floor(kappa)), 3) for kappa in (1.0, 0.5, 0.065)]
    [1.0, 0.91, 0.637]
    """
    kappa = torch.as_tensor(mass, dtype=torch.float64)
    if not bool(((kappa >= 0) & (kappa <= 1)).all()):
        raise ValueError(f"mass={mass}: expected ‖P_V r‖² of a unit vector r, 0 ≤ κ ≤ 1")
    root = kappa.sqrt()
    return (2 * root / (1 + root)).sqrt()


def _quantile(degrees: int, share: float) -> float:
    """The q with P(χ²_degrees ≤ q) = share, by bisection of log q."""
    low, high = -700.0, math.log(degrees) + 10
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    for _ in range(100):
        middle = (low + high) / 2
        below = torch.special.gammainc(half, half.new_tensor(math.exp(middle) / 2)) < share
        low, high = (middle, high) if below else (low, middle)
    return math.exp(low)
