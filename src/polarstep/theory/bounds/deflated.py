"""How inexact a map is that keeps the rest of its sketch. None of these bounds is in the paper.

Notation as in :mod:`polarstep.polar.deflation`: Q is m×ℓ with orthonormal columns, B = QᵀM, Z the polar
factor of B, R = M − QB, δ ≥ ‖R‖_op, and p an odd polynomial (p(x) = x for a rest that is scaled only):

    scaled, apart    T = QZ + P,  P = p(R/δ)            jointly    T = p(QZ + R/δ)

Three facts carry everything. QᵀR = 0, and P = W·R with a polynomial W of RRᵀ, so QᵀP = 0 as well. Hence

    ⟨M, T⟩ = ⟨B, Z⟩ + ⟨R, P⟩ = ‖B‖_* + Σσᵢ(R)·p(σᵢ(R)/δ)                                          (1)
    ‖M‖_* ≤ ‖B‖_* + ‖R‖_*,   so that   ‖M‖_* − ⟨M, T⟩ ≤ Σσᵢ(R)(1 − p(σᵢ(R)/δ))                    (2)
    ‖R‖²_F = ‖M‖²_F − ‖B‖²_F,   rank R ≤ N = d₀ − ℓ                                                (3)

(1) and (2) are for forms that keep the rest apart. By (3) the sum in (2) is one over N numbers yᵢ =
σᵢ²/δ² of known mean, and Jensen's inequality bounds it by the concave hull of y ↦ √y(1 − p(√y)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from polarstep.polar import coefficients as polynomials_of
from polarstep.polar.coefficients import Polynomial
from polarstep.theory import checks as check

__all__ = [
    "certified_deflated_gamma",
    "deflated_nu",
    "expected_deflated_gamma",
    "ideal_deflated_gamma",
    "subspace_norm_floor",
]

Polynomials = Sequence[Polynomial]
Form = Literal["apart", "jointly"]

GRID = 4001


def ideal_deflated_gamma(
    singular_values: Tensor,
    ell: int,
    delta: Tensor | float | None = None,
    polynomials: Polynomials = (),
    *,
    scale: float = 1.0,
    form: Form = "apart",
) -> Tensor:
    """γ, exactly, of a map whose Q spans the ℓ leading left singular vectors of M.

    Then head and rest have the singular vectors of M, T has them too, and

        γ = 1 − (p₀·Σ_{j≤ℓ}σⱼ + Σ_{j>ℓ}σⱼ·p(sσⱼ/δ))/Σσⱼ,   p₀ = 1 apart and p(s) jointly.

    ``scale`` is s, as :func:`polarstep.polar.deflation.apart_scale` and ``joint_scale`` choose it.
    Without polynomials p(x) = x. δ = σ_{ℓ+1} = ‖R‖_op unless given. Proposition 1 is the case ℓ = 0.

    >>> sigma = torch.tensor([10.0, 0.5, 0.4])
    >>> [round(float(ideal_deflated_gamma(sigma, 1, None, steps)), 4) for steps in ((), [(1.5, -0.5)])]
    [0.0073, 0.0021]
    """
    sigma = check.spectrum(singular_values)
    if isinstance(ell, bool) or ell != int(ell) or not 0 <= ell < sigma.shape[-1]:
        raise ValueError(
            f"ell={ell}: expected a whole number 0 ≤ ℓ < {sigma.shape[-1]}, the width of the head; with "
            "ℓ = min(m, n) there is no rest"
        )
    head, tail = sigma[..., : int(ell)], sigma[..., int(ell) :]
    largest = tail[..., :1]
    divisor = largest if delta is None else torch.as_tensor(delta, dtype=sigma.dtype)[..., None]
    _check_covers(divisor, largest)
    x = torch.where(largest > 0, tail / torch.where(divisor > 0, divisor, 1), 0.0)
    kept = (tail * _value(polynomials, scale * x)).sum(-1)
    at_head = _value(polynomials, x.new_tensor(scale)) if form == "jointly" else 1.0
    return 1 - (at_head * head.sum(-1) + kept) / sigma.sum(-1)


def expected_deflated_gamma(
    singular_values: Tensor,
    s: int,
    p: int,
    h: float = 0,
    delta: Tensor | float | None = None,
    polynomials: Polynomials = (),
    *,
    scale: float = 1.0,
    d0: int | None = None,
) -> Tensor:
    """A bound on E γ over Gaussian sketches of ℓ = s + p columns, for a rest that is scaled or apart.

        E γ ≤ (Nδ/‖M‖_*)·ĝ(ε/(Nδ²)),   ε = (1 + s/(p−1)·ϱ_s^{4h})·T_s,   N = d₀ − ℓ

    with T_s and ϱ_s of :mod:`polarstep.theory.bounds.polar`, φ(x) the value of ``polynomials`` at
    scale·x (s and p are the sketch's here), and ĝ the least concave, nondecreasing function above
    g(y) = √y(1 − φ(√y)). Without polynomials the bound is (√(Nε) − ε/δ)/‖M‖_* as long as ε ≤ Nδ²/4.

    Proof. Given Q, (2) and (3) say ‖M‖_* − ⟨M, T⟩ ≤ δΣg(yᵢ) ≤ Nδ·ĝ(‖R‖²_F/(Nδ²)) by Jensen's
    inequality. ĝ is concave and nondecreasing, so the mean over Q may be taken inside and replaced by
    an upper bound, and the captured-energy lemma says E‖R‖²_F = ‖M‖²_F − E‖B‖²_F ≤ H_s + T_s −
    A_{s,h} = ε. ∎

    Assumes an exact inner map, 1 ≤ s < rank(M), p ≥ 2, ℓ < d₀, and a δ that is at least ‖R‖_op for
    every Q (``None``: ‖M‖_op, which always is). If φ increases, as the paper's two polynomials do on
    [0, 1], each term of (2) grows with δ, and the bound also holds for any δ_Q with ‖R‖_op ≤ δ_Q ≤ δ.
    """
    sigma = check.spectrum(singular_values)
    s = check.target_rank(s, sigma)
    d0 = sigma.shape[-1] if d0 is None else d0
    p = check.oversampling(p, s, d0)
    h = check.power_iterations(h)
    squares = sigma.square()
    decay = sigma[..., s] / sigma[..., s - 1]
    tail = squares[..., s:].sum(-1)
    energy = torch.minimum((1 + s / (p - 1) * decay ** (4 * h)) * tail, squares.sum(-1))
    top = sigma[..., 0] if delta is None else torch.as_tensor(delta, dtype=sigma.dtype)
    left = d0 - s - p
    if left == 0:
        return torch.zeros_like(tail)
    y = energy / (left * top.square())
    loss = left * top * _Hull(polynomials, scale, 1.0).rising_loss_at(y)
    return (loss / sigma.sum(-1)).clamp_max(1)


def certified_deflated_gamma(
    norm: Tensor,
    norm_B: Tensor,
    head_alignment: Tensor,
    head_loss: Tensor | float,
    delta: Tensor,
    left: int,
    polynomials: Polynomials = (),
    *,
    scale: float = 1.0,
    too_small: float = 0.3,
    alignment: Tensor | None = None,
) -> Tensor:
    """A bound on the γ of one step from numbers that the step has: no product and no pass over M.

    With E = ‖R‖²_F from (3) and y = E/(Nδ²), (1) and (2) and Jensen's inequality give

        A = ⟨B, Z⟩ + Nδ·ǎ(y) ≤ ⟨M, T⟩
        L = (‖B‖_* − ⟨B, Z⟩) + Nδ·ĝ(y) ≥ ‖M‖_* − ⟨M, T⟩,   so that   γ ≤ L/(A + L),

    where ǎ is the largest convex function below √y·p(s√y), and ĝ the least concave one above
    √y(1 − p(s√y)). For p(x) = x, Nδ·ǎ(y) = E/δ = ⟨R, R/δ⟩ is exact, and Nδ·ĝ(y) = √(NE) − E/δ.

    Where ``alignment`` is given, the measured ⟨M, T⟩, it takes the place of A, and
    γ ≤ 1 − ⟨M, T⟩/(‖B‖_* + √(NE)). This holds for any T, so also for steps taken jointly.

    All arguments are in the precision of the step; rounding of ‖M‖²_F − ‖B‖²_F is the caller's to
    allow for (:func:`polarstep.polar.deflation.rest_frobenius` does).

    Args:
        norm: ‖M‖_F.
        norm_B: ‖B‖_F.
        head_alignment: ⟨B, Z⟩.
        head_loss: an upper bound on ‖B‖_* − ⟨B, Z⟩; 0 for an exact inner map.
        delta: δ; ∞ where the rest is left out.
        left: N = min(m, n) − ℓ.
        polynomials: p, of the rest; none for p(x) = x.
        scale: s, the factor in front of R/δ.
        too_small: the bound holds if δ ≥ (1 − too_small)·‖R‖_op.
        alignment: ⟨M, T⟩, where it was measured.
    """
    norm, norm_B, head, delta = (
        torch.as_tensor(each, dtype=torch.float64) for each in (norm, norm_B, head_alignment, delta)
    )
    loss = torch.as_tensor(head_loss, dtype=torch.float64)
    energy = (norm.square() - norm_B.square()).clamp_min(0)
    outside = (left * energy).sqrt()
    if alignment is not None:
        known = torch.as_tensor(alignment, dtype=torch.float64)
        return _over(head + loss + outside - known, head + loss + outside)
    kept = torch.isfinite(delta) & (delta > 0) & (left > 0)
    divisor = torch.where(kept, delta, 1.0)
    hull = _Hull(polynomials, scale, 1 / (1 - too_small))
    y = energy / (max(left, 1) * divisor.square())
    gained = torch.where(kept, left * divisor * hull.gain_at(y), 0.0)
    lost = torch.where(kept, left * divisor * hull.loss_at(y), outside)
    total = (loss + lost).clamp_min(0)
    return _over(total, head + gained + total)


def deflated_nu(
    polynomials: Polynomials = (),
    *,
    scale: float = 1.0,
    form: Form = "apart",
    overlap: float | None = None,
    too_small: float = 0.0,
) -> float:
    """A bound on ν = ‖T‖_op − 1, for any M, any Q with orthonormal columns and any ‖Z‖_op ≤ 1.

    Let a = ‖Z‖, b = ‖P‖ and c = ‖ZPᵀ‖ ≤ ab. QᵀP = 0, so ‖T‖ = ‖QZ + P‖ is the norm of Z on top of P, and

        ‖T‖²_op = ‖( ZZᵀ  ZPᵀ )‖  ≤ ‖( a²  c )‖  = (a² + b²)/2 + √((a² − b²)²/4 + c²) ≤ max(a², b²) + c.
                  ‖( PZᵀ  PPᵀ )‖    ‖( c  b² )‖

    c is the overlap of the row spaces of head and rest. It is 0 where Q spans singular vectors of M, and
    with c ≤ ab the bound is √(a² + b²).

    * apart: a = 1 and b = max |p(sx)| over x ≤ ‖R‖/δ ≤ 1/(1 − too_small).
    * jointly: with P = R/δ the inequality bounds X₀ = QZ + R/δ, and ‖T‖_op ≤ max |p(sx)| over x ≤ ‖X₀‖.

    ``overlap`` is c: ‖Z·p(R/δ)ᵀ‖_op apart, ‖ZRᵀ‖_op/δ jointly; ``None`` is the largest possible.
    ``too_small`` is the part by which δ may be below ‖R‖_op.

    >>> bounds = deflated_nu(), deflated_nu(overlap=0.0), deflated_nu([(1.5, -0.5)], form="jointly")
    >>> [round(nu, 4) for nu in bounds]
    [0.4142, 0.0, 0.0]
    """
    if not 0 <= too_small < 1:
        raise ValueError(f"too_small={too_small}: expected the part of ‖R‖_op that δ lacks, 0 to 1")
    longest = 1 / (1 - too_small)
    if form == "apart":
        top = _stacked(_highest(polynomials, scale, longest), overlap)
    else:
        top = _highest(polynomials, scale, _stacked(longest, overlap))
    return max(top - 1, 0.0)


def subspace_norm_floor(mass: Tensor | float) -> Tensor:
    """The least ‖Rᵀ·orth(RV)‖_op/‖R‖_op for vectors V that hold a part ``mass`` of R's leading vector.

    √(2√κ/(1 + √κ)) with κ = ‖P_V r‖² for the leading right singular vector r. It is the worst case
    over all spectra, reached where all but σ₁ are σ₁·√(√κ/(1 + √κ)); the proof is in
    :func:`polarstep.polar.deflation.rest_norm`. A margin of 1/floor makes up for it.

    >>> [round(float(subspace_norm_floor(kappa)), 3) for kappa in (1.0, 0.5, 0.065)]
    [1.0, 0.91, 0.637]
    """
    kappa = torch.as_tensor(mass, dtype=torch.float64)
    if bool(((kappa < 0) | (kappa > 1)).any()):
        raise ValueError(f"mass={mass}: expected ‖P_V r‖² of a unit vector r, 0 ≤ κ ≤ 1")
    root = kappa.sqrt()
    return (2 * root / (1 + root)).sqrt()


class _Hull:
    """ĝ and ǎ on [0, reach²], as piecewise linear functions of y = σ²/δ²."""

    def __init__(self, polynomials: Polynomials, scale: float, reach: float) -> None:
        # Squares of a uniform grid: √y bends most at zero, and is followed equally well everywhere.
        t = torch.linspace(0, 1, GRID, dtype=torch.float64, device="cpu")
        x = reach * t.square()
        value = _value(polynomials, scale * x)
        lost, gained = x * (1 - value), x * value
        self.y = x.square()
        self.loss = _concave(self.y, lost)
        self.gain = -_concave(self.y, -gained)
        # Between two points of the grid a function leaves its chord by less than a second difference.
        self.room = float(torch.cat([lost.diff(n=2), gained.diff(n=2)]).abs().max())

    def loss_at(self, y: Tensor) -> Tensor:
        """ĝ(y), concave, and not below g between the points of the grid."""
        return _interpolated(self.y, self.loss, y) + self.room

    def rising_loss_at(self, y: Tensor) -> Tensor:
        """The same, and nondecreasing."""
        return _interpolated(self.y, self.loss.cummax(0).values, y) + self.room

    def gain_at(self, y: Tensor) -> Tensor:
        """ǎ(y), convex, and not above √y·p(s√y) between the points of the grid."""
        return _interpolated(self.y, self.gain, y) - self.room


def _concave(x: Tensor, f: Tensor) -> Tensor:
    """The least concave function above the points (x, f), at x: Andrew's monotone chain."""
    xs, fs = x.tolist(), f.tolist()
    corners: list[int] = []
    for i in range(len(xs)):
        while len(corners) >= 2:
            a, b = corners[-2], corners[-1]
            if (fs[b] - fs[a]) * (xs[i] - xs[a]) > (fs[i] - fs[a]) * (xs[b] - xs[a]):
                break
            corners.pop()
        corners.append(i)
    return _interpolated(x[corners], f[corners], x)


def _interpolated(x: Tensor, f: Tensor, at: Tensor) -> Tensor:
    """The piecewise linear function through (x, f), constant outside."""
    device = at.device
    at = at.to(x).clamp(float(x[0]), float(x[-1]))
    right = torch.searchsorted(x, at.contiguous()).clamp(1, len(x) - 1)
    left = right - 1
    part = (at - x[left]) / (x[right] - x[left])
    return (f[left] + part * (f[right] - f[left])).to(device)


def _value(polynomials: Polynomials, x: Tensor) -> Tensor:
    return polynomials_of.evaluate(polynomials, x) if polynomials else x


def _highest(polynomials: Polynomials, scale: float, longest: float) -> float:
    """max |p(sx)| over 0 ≤ x ≤ longest."""
    x = torch.linspace(0, scale * longest, GRID, dtype=torch.float64, device="cpu")
    value = _value(polynomials, x)
    between = float(value.diff(n=2).abs().max()) if polynomials else 0.0
    # A peak between two points of the grid is above both of them by an eighth of a second difference.
    return float(value.abs().max()) + between / 8


def _stacked(b: float, overlap: float | None) -> float:
    """The bound on ‖T‖_op with a = 1."""
    c = b if overlap is None else min(overlap, b)
    return math.sqrt((1 + b * b) / 2 + math.hypot((1 - b * b) / 2, c))


def _over(lost: Tensor, whole: Tensor) -> Tensor:
    """lost/whole, and 0 for a zero matrix, which has nothing to lose."""
    return torch.where(whole > 0, lost / torch.where(whole > 0, whole, 1.0), 0.0).clamp_max(1)


def _check_covers(delta: Tensor, largest: Tensor) -> None:
    if bool((delta < largest * (1 - 1e-12)).any()):
        raise ValueError(
            f"delta={float(delta.min()):g} is below ‖R‖_op = σ_(ℓ+1) = {float(largest.max()):g}: the "
            "formula holds for singular values of R/δ in [0, 1]; take delta=None for σ_(ℓ+1) itself"
        )
