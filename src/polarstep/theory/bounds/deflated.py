"""Bounds on γ and ν of deflated maps, which keep the rest of their sketch. None of them is in the paper.

Notation as in :mod:`polarstep.maps.deflated`: Q is m×ℓ with orthonormal columns, B = QᵀM, Z the polar
factor of B, R = M − QB of rank at most N = d₀ − ℓ, δ > 0, X₀ = QZ + R/δ and T = p(s·X₀) for an odd
polynomial p(x) = x·q(x²), which acts on singular values. The inner map is exact. δ may be anything. A
small ν needs s·‖X₀‖_op ≤ 1, as p is made for [0, 1].

γ has a closed form where Q spans leading singular vectors. For any other Q the rows of Z and R overlap,
so that X₀ has other singular vectors than M. γ has a bound all the same.

Let bᵢ and vᵢ be the singular values and right singular vectors of B, rⱼ and dⱼ those of R, and
Y = X₀ᵀX₀. QᵀR = 0 gives Y = ZᵀZ + RᵀR/δ², QᵀX₀ = Z and RᵀX₀ = RᵀR/δ. With T = s·X₀·q(s²Y) and
BᵀZ = (BᵀB)^½ therefore

    ⟨M, T⟩ = ⟨QB, T⟩ + ⟨R, T⟩ = s·Σbᵢ·vᵢᵀq(s²Y)vᵢ + (s/δ)·Σrⱼ²·dⱼᵀq(s²Y)dⱼ.                        (1)

Let q̂ be convex with q̂ ≤ q on [0, s²‖X₀‖²_op]. By Jensen's inequality for the spectral measure of Y at a
unit vector v, vᵀq(s²Y)v ≥ q̂(s²·vᵀYv), and so

    ⟨M, T⟩ ≥ s·Σbᵢ·q̂(s²(1 + ωᵢ)) + (s/δ)·Σrⱼ²·q̂(s²(rⱼ²/δ² + ζⱼ))                                   (2)

with the overlaps ωᵢ = ‖Rvᵢ‖²/δ² and ζⱼ = ‖Zdⱼ‖². Both are zero where Q spans singular vectors of M.
:func:`expected_lifted_gamma` bounds the mean of (2) over Gaussian sketches, from the spectrum of M.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polarstep.maps import coefficients as polynomials_of
from polarstep.maps.coefficients import Polynomial
from polarstep.maps.deflated import (
    FACTOR,
    MARGIN_OF_SCALE,
    TOLERATED_VALUE,
    norm_floor,
    tolerant_scale,
)
from polarstep.numerics import SIGNS, norm_products
from polarstep.theory import checks as check
from polarstep.theory.bounds.polar_maps import sketched_rest_bound

__all__ = [
    "expected_lifted_gamma",
    "ideal_deflated_gamma",
    "lifted_nu",
    "longest_deflated_step",
]

Polynomials = Sequence[Polynomial]

GRID = 4001
# What errors say is expected of δ and of s.
DELTA = "δ > 0, of the size of R's singular values"
SCALE = "s > 0, with s·‖X₀‖_op ≤ 1 or little more; take scale=None for 1/‖X₀‖_op"
# κ, the largest √t − t/√(1 + t). It is at the t with t² = 1 − t.
KAPPA = ((math.sqrt(5) - 1) / 2) ** 2.5
# How many a are tried in p(x) ≥ x/√(b + ax²), from 0.01 to 10. Each is valid, and the best is taken.
SLOPES = 121


# γ


def ideal_deflated_gamma(
    singular_values: Tensor,
    ell: int,
    polynomials: Polynomials,
    delta: Tensor | float | None = None,
    *,
    scale: Tensor | float | None = None,
) -> Tensor:
    """γ, exactly, of a map whose Q spans the ℓ leading left singular vectors of M.

    Then X₀ has the singular vectors of M, and the singular values 1 (ℓ times) and σⱼ/δ, so that

        γ = 1 − (p(s)·Σ_{j≤ℓ}σⱼ + Σ_{j>ℓ}σⱼ·p(sσⱼ/δ))/Σσⱼ.

    ``delta`` is δ > 0, by default σ_{ℓ+1} = ‖R‖_op. ``scale`` is s, by default 1/‖X₀‖_op. s·‖X₀‖_op ≤ 1
    must hold, where ‖X₀‖_op = max(1, σ_{ℓ+1}/δ). Proposition 1 is the case ℓ = 0.

    >>> sigma = torch.tensor([10.0, 0.5, 0.4])
    >>> round(float(ideal_deflated_gamma(sigma, 1, [(1.5, -0.5)])), 4)
    0.0021
    """
    sigma = check.spectrum(singular_values)
    if not check.is_whole(ell) or not 0 <= ell < sigma.shape[-1]:
        raise ValueError(
            f"ell={ell}: expected a whole number 0 ≤ ℓ < {sigma.shape[-1]}, the width of the head; with "
            "ℓ = min(m, n) there is no rest"
        )
    head, tail = sigma[..., : int(ell)], sigma[..., int(ell) :]
    largest = tail[..., :1]
    divisor = largest
    if delta is not None:
        divisor = check.positive_each("delta", delta, sigma, DELTA)[..., None]
    x = torch.where(largest > 0, tail / torch.where(divisor > 0, divisor, 1), 0.0)
    norm = x[..., :1].clamp_min(1) if ell else x[..., :1]
    if scale is None:
        scale = 1 / torch.where(norm > 0, norm, 1)
    else:
        scale = check.positive_each("scale", scale, sigma, SCALE)[..., None]
    _check_within_one(scale * norm)
    kept = (tail * polynomials_of.evaluate(polynomials, scale * x)).sum(-1)
    at_head = polynomials_of.evaluate(polynomials, scale * torch.ones_like(largest))
    return 1 - (at_head[..., 0] * head.sum(-1) + kept) / sigma.sum(-1)


def expected_lifted_gamma(
    singular_values: Tensor,
    ell: int,
    polynomials: Polynomials,
    h: float = 0,
    *,
    factor: float = FACTOR,
    reach: tuple[float, float] | None = None,
) -> Tensor:
    """A bound on E γ over Gaussian sketches of ℓ columns, for T = p(s·X₀) and δ = factor·‖R‖_F/√N.

    Let a, b > 0 with p(x) ≥ x/√(b + ax²) for 0 < x ≤ t₁, and t₀ ≤ s‖X₀‖_op ≤ t₁. With β = b/t₀², f the
    factor, S_h and S_t the sums of the ℓ largest and of the other σᵢ, N = d₀ − ℓ, δ₀ = f·√(T_ℓ/N), the
    symbols ε, v, O and J for ``energy``, ``squared_norm``, ``weighted_overlap`` and ``shared_rows`` of
    :func:`sketched_rest_bound`, and κ = max_t(√t − t/√(1 + t)) = 0.3003,

        E⟨M, T⟩ ≥ S_h/√z + S_t/√a − (κ/a)·√(f²(Nβε + aJ) + N²βv)
        z = a + β + (βv + aO/S_h)/δ₀²

    and γ = 1 − ⟨M, T⟩/‖M‖_*. The first two terms would be ‖M‖_* for a p that is one everywhere; βv and O
    are what the head loses, and the root is what the rest loses at most, however its singular values are
    spread. The best a of a grid is taken, each with its least b.

    Proof. As QᵀR = 0, ‖X₀‖²_op ≤ u = 1 + r₁²/δ². So s·q(s²y) ≥ (b/s² + ay)^{−½} ≥ (βu + ay)^{−½}, a
    convex function of y, and Jensen's inequality as in (2) says

        ⟨M, T⟩ ≥ Σbᵢzᵢ^{−½} + Σ(rⱼ²/δ)(a·rⱼ²/δ² + Dⱼ)^{−½},   zᵢ = βu + a(1 + ωᵢ),   Dⱼ = βu + aζⱼ.

    *Head.* A tangent of z^{−½} is below it: Σbᵢzᵢ^{−½} ≥ (3/2)z^{−½}Σbᵢ − ½z^{−3/2}Σbᵢzᵢ for every z.
    With Σbᵢ ≤ S_h in the term with r₁ this is at least

        c‖B‖_* − ½z^{−3/2}(βS_h·r₁² + aΣbᵢ‖Rvᵢ‖²)/δ²,   c = (3/2)z^{−½} − ½z^{−3/2}(a + β).

    *Rest.* For x = rⱼ²/δ², √x − x/√(x + D/a) ≤ κ√(D/a). So the second sum is at least ‖R‖_*/√a −
    (κδ/a)Σ√Dⱼ, where (δΣ√Dⱼ)² ≤ δ²NΣDⱼ = f²‖R‖²_F(Nβ + aΣζⱼ) + N²βr₁².

    *Together.* 0 ≤ c ≤ (a + β)^{−½} ≤ a^{−½} for z ≥ a + β, ‖B‖_* ≥ ‖M‖_* − ‖R‖_*, and ‖R‖_* ≥ S_t as
    rⱼ ≥ σ_{j+ℓ}. Hence c‖B‖_* + ‖R‖_*/√a ≥ cS_h + S_t/√a. δ ≥ δ₀ by Eckart–Young, and the root is
    concave, so every mean may be replaced by its bound. With the z above, the terms with S_h add up to
    S_h·z^{−½}. ∎

    The bound of one also holds: p > 0 makes each term of (1) at least 0. Assumes an exact inner map,
    p > 0 on (0, t₁], 1 ≤ ℓ < rank(M), and a rest above the rounding floor of
    :func:`polarstep.maps.deflated.rest_size`.

    >>> spectrum, flat = 1 / torch.arange(1.0, 97.0), polynomials_of.resolve("flat", 1)
    >>> [round(float(expected_lifted_gamma(spectrum, 16, flat, h)), 2) for h in (0, 1, 2)]
    [0.68, 0.35, 0.31]

    Args:
        singular_values: all d₀ = min(m, n) of M, zeros included.
        ell: ℓ, the number of columns of the sketch.
        polynomials: the steps; p is their composition.
        h: power iterations.
        factor: δ in units of the root mean square of R's singular values.
        reach: (t₀, t₁), by default as in :class:`polarstep.Deflated`.
    """
    steps = polynomials_of.validated(polynomials)
    sigma = check.spectrum(singular_values)
    ell = check.sketch_width(ell, sigma)
    f = check.positive("factor", factor)
    if reach is None:
        tolerant = tolerant_scale(steps)
        reach = tolerant / MARGIN_OF_SCALE, tolerant * TOLERATED_VALUE
    low, high = reach
    if not 0 < low <= high:
        raise ValueError(
            f"reach={reach}: expected 0 < t₀ ≤ t₁ with t₀ ≤ s·‖X₀‖_op ≤ t₁; (1, 1) for s = 1/‖X₀‖_op"
        )
    a, b = (x.to(sigma.device) for x in _floors(steps, high))
    beta = b / low**2
    rest = sketched_rest_bound(sigma, ell, h)
    left = sigma.shape[-1] - ell
    head, tail = sigma[..., :ell].sum(-1)[..., None], sigma[..., ell:].sum(-1)[..., None]
    smallest = (f * f * sigma[..., ell:].square().sum(-1) / left)[..., None]  # δ₀²
    energy, norm, weighted, shared = (
        x[..., None]
        for x in (rest.energy, rest.squared_norm, rest.weighted_overlap, rest.shared_rows)
    )
    z = a + beta + (beta * norm + a * weighted / head) / smallest
    lost = (f * f * (left * beta * energy + a * shared) + left**2 * beta * norm).sqrt()
    kept = head / z.sqrt() + tail / a.sqrt() - KAPPA / a * lost
    return (1 - kept.amax(-1) / sigma.sum(-1)).clamp_max(1)


# ν


def lifted_nu(polynomials: Polynomials, reach: float = 1.0) -> float:
    """A bound on ν = ‖p(s·X₀)‖_op − 1 for any X₀ and s with s·‖X₀‖_op ≤ ``reach``.

    It is max |p(x)| − 1 over 0 ≤ x ≤ reach, whatever δ, M, Q and Z are. A deflated map measures s, and
    :mod:`polarstep.maps.deflated` derives reach ≤ 1.17 for it.

    >>> round(lifted_nu([(1.5, -0.5)], 1.17), 6), round(lifted_nu([(3.4445, -4.775, 2.0315)]), 3)
    (0.0, 0.202)
    """
    if not 0 < reach < math.inf:
        raise ValueError(
            f"reach={reach}: expected a bound on s·‖X₀‖_op, above 0; usually 1 to 1.17"
        )
    x = torch.linspace(0, reach, GRID, dtype=torch.float64, device="cpu")
    value = polynomials_of.evaluate(polynomials, x)
    # A peak between two points of the grid may exceed both by an eighth of a second difference.
    between = float(value.diff(n=2).abs().max()) / 8
    return max(float(value.abs().max()) + between - 1, 0.0)


def longest_deflated_step(
    m: int, n: int, polynomials: Polynomials, *, unseen: float = 0.01
) -> float:
    """A bound on ‖T‖_op of a deflated map of m×n matrices, for all leading directions but a share.

    ``polynomials`` are those of the steps on X₀. ``unseen`` is the share of directions for which the
    bound may be exceeded. It holds for any spectrum. The worst is a single direction above a flat rest:
    all other singular values of X₀ are some two thirds of the first.

    s comes from 16 random start vectors of length m (:mod:`polarstep.maps.deflated`). The bound
    depends on κ, the part of the leading direction that the best of them holds, for a direction that is
    independent of their entries. So κm is the largest of 16 squares of normal numbers, and κ ≥ q/m for
    all but a share P(χ²₁ ≤ q)¹⁶ of directions.

    >>> from polarstep.maps.coefficients import resolve
    >>> round(longest_deflated_step(768, 3072, resolve("flat", 1)), 1)
    2.4
    """
    for name, side in (("m", m), ("n", n)):
        check.whole(name, side, 1, "a whole number of rows or columns, 1 or more")
    check.share(
        "unseen",
        unseen,
        "a share of directions between 0 and 1, as 0.01; no bound holds for all directions",
    )
    short = min(m, n)
    root = torch.tensor(unseen ** (1 / SIGNS), dtype=torch.float64)
    best = 2 * float(torch.erfinv(root)) ** 2  # P(χ²₁ ≤ q) = erf(√(q/2))
    scale = tolerant_scale(tuple(polynomials)) / MARGIN_OF_SCALE
    reach = scale / norm_floor(min(1.0, best / short), norm_products(short))
    return 1 + lifted_nu(polynomials, reach)


# The polynomial: its slope q, and a simple bound below it


def _slope(steps: Polynomials, y: Tensor) -> Tensor:
    """q(y) = p(√y)/√y."""
    x = y.sqrt()
    at_zero = math.prod(polynomial[0] for polynomial in steps)
    value = polynomials_of.evaluate(steps, x)
    return torch.where(x > 0, value / torch.where(x > 0, x, 1), at_zero)


def _floors(steps: Polynomials, reach: float) -> tuple[Tensor, Tensor]:
    """Slopes a, and for each the least b with p(x) ≥ x/√(b + ax²) on [0, reach]."""
    y = _grid(reach)
    q = _slope(steps, y)
    if not bool((q > 0).all()):
        x = float(y[(q <= 0).nonzero()[0, 0]].sqrt())
        raise ValueError(
            f"p({x:.3g}) ≤ 0 for these polynomials: expected p > 0 up to s·‖X₀‖_op = {reach:g}; take a "
            "smaller reach, and a scale that keeps to it"
        )
    a = torch.logspace(-2, 1, SLOPES, dtype=torch.float64, device="cpu")
    needed = -_below(lambda at: -_slope(steps, at).square().reciprocal(), y)
    return a, (needed - a[:, None] * y).amax(-1)


def _grid(reach: float) -> Tensor:
    """y = x² for equally spaced x: p is steepest at zero."""
    return torch.linspace(0, reach, GRID, dtype=torch.float64, device="cpu").square()


def _below(function: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """Values at y, lowered so far that the lines between them are below the function.

    A smooth function is farthest from such a line near its middle; twice the distance there is taken.
    """
    value = function(y)
    line = (value[1:] + value[:-1]) / 2
    room = 2 * (line - function((y[1:] + y[:-1]) / 2)).clamp_min(0)
    none = room.new_zeros(1)
    return value - torch.maximum(torch.cat([room, none]), torch.cat([none, room]))


def _check_within_one(reach: Tensor) -> None:
    if bool((reach > 1 + 1e-9).any()):
        raise ValueError(
            f"s·‖X₀‖_op = {float(reach.max()):g}: expected at most 1, as the polynomials are made for "
            "[0, 1]; take scale=None for 1/‖X₀‖_op"
        )
