"""Bounds on γ and ν of maps that keep the rest of their sketch. None of them is in the paper.

Notation as in :mod:`polarstep.polar.deflated`: Q is m×ℓ with orthonormal columns, B = QᵀM, Z the polar
factor of B, R = M − QB, δ > 0, and X₀ = QZ + R/δ. Without steps T = X₀, and with steps T = p(s·X₀) for
an odd polynomial p, which acts on singular values. Three facts carry everything. QᵀR = 0. Hence

    ⟨M, X₀⟩ = ⟨B, Z⟩ + ⟨R, R/δ⟩ = ‖B‖_* + ‖R‖²_F/δ                                                 (1)
    ‖M‖_* ≤ ‖B‖_* + ‖R‖_*,   so that   ‖M‖_* − ⟨M, X₀⟩ ≤ Σσᵢ(R)(1 − σᵢ(R)/δ)                      (2)
    ‖R‖²_F = ‖M‖²_F − ‖B‖²_F,   rank R ≤ N = d₀ − ℓ                                                (3)

(1), (2) and (3) hold for every δ. Without steps a small ν needs δ ≥ ‖R‖_op, as ‖T‖_op = ‖X₀‖_op. With
steps it needs s·‖X₀‖_op ≤ 1 alone, as p is made for [0, 1].

After steps, γ has a closed form where Q spans leading singular vectors. For any other Q the rows of Z
and R overlap, and X₀ has other singular vectors than M; :mod:`polarstep.theory.bounds.lifted` then
bounds γ. It also bounds ν after steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from polarstep.polar import coefficients as polynomials_of
from polarstep.polar.coefficients import Polynomial
from polarstep.theory import checks as check
from polarstep.theory.bounds.sketched_rest import sketched_rest_bound

__all__ = [
    "certified_deflated_gamma",
    "deflated_nu",
    "expected_deflated_gamma",
    "expected_deflated_nu",
    "ideal_deflated_gamma",
]

Polynomials = Sequence[Polynomial]

GRID = 4001
# What errors say is expected of δ and of s.
DELTA = "δ > 0, of the size of R's singular values"
SCALE = "s > 0, with s·‖X₀‖_op ≤ 1 or little more; take scale=None for 1/‖X₀‖_op"


def ideal_deflated_gamma(
    singular_values: Tensor,
    ell: int,
    delta: Tensor | float | None = None,
    polynomials: Polynomials = (),
    *,
    scale: Tensor | float | None = None,
) -> Tensor:
    """γ, exactly, of a map whose Q spans the ℓ leading left singular vectors of M.

    Then X₀ has the singular vectors of M, and the singular values 1 (ℓ times) and σⱼ/δ, so that

        γ = 1 − (p(s)·Σ_{j≤ℓ}σⱼ + Σ_{j>ℓ}σⱼ·p(sσⱼ/δ))/Σσⱼ.

    Without polynomials p(x) = x: the rest is only scaled. ``delta`` is δ > 0, by default σ_{ℓ+1} =
    ‖R‖_op. ``scale`` is s, by default 1/‖X₀‖_op, or 1 without polynomials. s·‖X₀‖_op ≤ 1 must hold,
    where ‖X₀‖_op = max(1, σ_{ℓ+1}/δ). Proposition 1 is the case ℓ = 0.

    >>> sigma = torch.tensor([10.0, 0.5, 0.4])
    >>> [round(float(ideal_deflated_gamma(sigma, 1, None, steps)), 4) for steps in ((), [(1.5, -0.5)])]
    [0.0073, 0.0021]
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
        scale = 1 / torch.where(norm > 0, norm, 1) if polynomials else 1.0
    else:
        scale = check.positive_each("scale", scale, sigma, SCALE)[..., None]
    _check_within_one(scale * norm)
    kept = (tail * _value(polynomials, scale * x)).sum(-1)
    at_head = _value(polynomials, scale * torch.ones_like(largest))
    return 1 - (at_head[..., 0] * head.sum(-1) + kept) / sigma.sum(-1)


def expected_deflated_gamma(
    singular_values: Tensor,
    s: int,
    p: int,
    h: float = 0,
    delta: Tensor | float | None = None,
    *,
    d0: int | None = None,
) -> Tensor:
    """A bound on E γ over Gaussian sketches of ℓ = s + p columns, for a rest that is only scaled.

        E γ ≤ (Nδ/‖M‖_*)·ĝ(ε/(Nδ²)),   ε = (1 + s/(p−1)·ϱ_s^{4h})·T_s,   N = d₀ − ℓ

    with T_s and ϱ_s of :mod:`polarstep.theory.bounds.polar`, and ĝ(y) = √y − y up to y = ¼ and ¼ from
    there on, the least nondecreasing function above √y − y. So the bound is (√(Nε) − ε/δ)/‖M‖_* as long
    as ε ≤ Nδ²/4.

    Proof. Let yᵢ = σᵢ(R)²/δ². Given Q, (2) and (3) say ‖M‖_* − ⟨M, T⟩ ≤ δΣ(√yᵢ − yᵢ) ≤
    Nδ·ĝ(‖R‖²_F/(Nδ²)) by Jensen's inequality. ĝ is concave and nondecreasing, so the mean over Q may be
    taken inside and replaced by an upper bound, and the captured-energy lemma says E‖R‖²_F = ‖M‖²_F −
    E‖B‖²_F ≤ H_s + T_s − A_{s,h} = ε. ∎

    Assumes an exact inner map, 1 ≤ s < rank(M), p ≥ 2 and ℓ < d₀. Each term of (2) grows with δ, so the
    bound also holds where δ depends on Q and is at most ``delta`` (``None``: ‖M‖_op).
    """
    sigma = check.spectrum(singular_values)
    s = check.target_rank(s, sigma)
    d0 = check.short_side(d0, sigma) or sigma.shape[-1]
    p = check.oversampling(p, s, d0)
    h = check.power_iterations(h)
    squares = sigma.square()
    decay = sigma[..., s] / sigma[..., s - 1]
    tail = squares[..., s:].sum(-1)
    energy = torch.minimum((1 + s / (p - 1) * decay ** (4 * h)) * tail, squares.sum(-1))
    top = sigma[..., 0] if delta is None else check.positive_each("delta", delta, sigma, DELTA)
    left = d0 - s - p
    if left == 0:
        return torch.zeros_like(tail)
    y = (energy / (left * top.square())).clamp_max(0.25)
    return (left * top * (y.sqrt() - y) / sigma.sum(-1)).clamp_max(1)


def certified_deflated_gamma(
    norm: Tensor,
    norm_B: Tensor,
    head_alignment: Tensor,
    head_loss: Tensor | float,
    left: int,
    *,
    delta: Tensor | None = None,
    alignment: Tensor | None = None,
) -> Tensor:
    """A bound on the γ of one step from numbers that the step has computed anyway.

    With E = ‖R‖²_F from (3), ‖R‖_* ≤ √(NE), and

        γ ≤ 1 − ⟨M, T⟩/(‖B‖_* + √(NE)).

    This holds for any T. ``alignment`` is the measured ⟨M, T⟩. For a rest that is only scaled, ⟨M, T⟩ =
    ⟨B, Z⟩ + E/δ by (1), so ``delta`` can be given in place of the measurement. Give exactly one of the
    two.

    All arguments are in the precision of the step. The bound does not allow for the rounding of
    ‖M‖²_F − ‖B‖²_F; the caller must.

    Args:
        norm: ‖M‖_F.
        norm_B: ‖B‖_F.
        head_alignment: ⟨B, Z⟩.
        head_loss: an upper bound on ‖B‖_* − ⟨B, Z⟩; 0 for an exact inner map.
        left: N = min(m, n) − ℓ.
        delta: δ of a rest that is only scaled; ∞ where the rest is left out.
        alignment: ⟨M, T⟩, where it was measured.
    """
    if (delta is None) == (alignment is None):
        given = "neither" if delta is None else "both"
        raise ValueError(
            f"{given} of delta and alignment: expected delta for a rest that is only scaled, or the "
            "measured alignment ⟨M, T⟩ for any T"
        )
    norm, norm_B, head = (
        torch.as_tensor(each, dtype=torch.float64) for each in (norm, norm_B, head_alignment)
    )
    loss = torch.as_tensor(head_loss, dtype=torch.float64)
    energy = (norm.square() - norm_B.square()).clamp_min(0)
    if delta is None:
        known = torch.as_tensor(alignment, dtype=torch.float64)
    else:
        divisor = torch.as_tensor(delta, dtype=torch.float64)
        known = head + torch.where(divisor > 0, energy / torch.where(divisor > 0, divisor, 1), 0.0)
    nuclear = head + loss + (left * energy).sqrt()
    return _over(nuclear - known, nuclear)


def deflated_nu(
    *,
    overlap: float | None = None,
    too_small: float = 0.0,
    stretch: float = 1.0,
    leak: float | None = 0.0,
) -> float:
    """A bound on ν = ‖X₀‖_op − 1, for any M, any Q and any ‖Z‖_op ≤ 1.

    Let a = ‖QZ‖, P = R/δ, b = ‖P‖ and c = ‖ZPᵀ‖. Where Q has orthonormal columns QᵀP = 0, so ‖X₀‖ =
    ‖QZ + P‖ is the norm of Z on top of P, and

        ‖X₀‖²_op = ‖( ZZᵀ  ZPᵀ )‖  ≤ ‖( a²  c )‖  = (a² + b²)/2 + √((a² − b²)²/4 + c²) ≤ max(a², b²) + c.
                   ‖( PZᵀ  PPᵀ )‖    ‖( c  b² )‖

    c ≤ b is the overlap of the row spaces of head and rest. It is 0 where Q spans singular vectors of M,
    and with c = ab the bound is √(a² + b²).

    In 16 bits columns of Q are not quite orthonormal. Let q = ‖Q‖ and e = ‖QᵀP‖. For a unit vector v

        ‖X₀v‖² = ‖QZv‖² + ‖Pv‖² + 2⟨Zv, QᵀPv⟩,

    The first two terms are at most the bound above with a ≤ q and qc in place of c, and the last term is
    at most 2e. As e ≤ qb, ‖X₀‖ ≤ q + b in any case: a rest that consists of the head's rounding errors
    adds one to ν and no more.

    ``overlap`` is c, and ``None`` stands for the largest possible c. ``too_small`` is the fraction by
    which δ may be below ‖R‖_op, so that b ≤ 1/(1 − too_small). ``stretch`` is q. ``leak`` is e, and
    ``None`` stands for the largest possible e.

    >>> [round(nu, 4) for nu in (deflated_nu(), deflated_nu(overlap=0.0), deflated_nu(too_small=0.3))]
    [0.4142, 0.0, 0.7438]
    >>> round(deflated_nu(stretch=1.05, leak=0.02), 4), deflated_nu(leak=None)
    (0.4637, 1.0)
    """
    if not 0 <= too_small < 1:
        raise ValueError(f"too_small={too_small}: expected the part of ‖R‖_op that δ lacks, 0 to 1")
    if not 1 <= stretch < math.inf:
        raise ValueError(f"stretch={stretch}: expected ‖Q‖_op, 1 for orthonormal columns, or more")
    for name, given, words in (
        ("overlap", overlap, "‖ZRᵀ‖_op/δ, the overlap of the row spaces of head and rest"),
        ("leak", leak, "‖QᵀR‖_op/δ, 0 for orthonormal columns of Q"),
    ):
        if given is not None and not given >= 0:
            raise ValueError(
                f"{name}={given}: expected {words}, 0 or more; None for the largest possible"
            )
    a, b = stretch, 1 / (1 - too_small)
    c = a * (b if overlap is None else min(overlap, b))
    square = (a * a + b * b) / 2 + math.hypot((a * a - b * b) / 2, c)
    square += 2 * min(math.inf if leak is None else leak, a * b)
    return max(min(math.sqrt(square), a + b) - 1, 0.0)


def expected_deflated_nu(
    singular_values: Tensor, ell: int, h: float = 0, *, too_small: float = 0.0
) -> Tensor:
    """A bound on E ν over Gaussian sketches of ℓ columns, for a rest that is only scaled.

        E ν ≤ √(b² + b·min(1, √ω/σ_{ℓ+1})) − 1,   b = 1/(1 − too_small),   ω ≥ E‖ZRᵀ‖²_F

    with the ω of :func:`polarstep.theory.bounds.sketched_rest_bound`, which is small where h or a gap in
    the spectrum brings Q near singular vectors of M, and zero for equal singular values. It is at
    most the bound of :func:`deflated_nu`, which holds for every Q.

    Proof. For every Q, ‖X₀‖²_op ≤ b² + c with c ≤ b, as in :func:`deflated_nu`. No Q of ℓ columns leaves
    less than σ_{ℓ+1}, so δ ≥ ‖R‖_op/b ≥ σ_{ℓ+1}/b, and c = ‖ZRᵀ‖_op/δ ≤ b‖ZRᵀ‖_F/σ_{ℓ+1}. The root is
    concave and nondecreasing in c, so the mean of c may be taken inside, and E‖ZRᵀ‖_F ≤ √ω. ∎

    >>> sigma = torch.tensor([100.0] * 3 + [1.0] * 9)
    >>> [round(float(expected_deflated_nu(sigma, 8, h)), 3) for h in (0, 1, 2)]
    [0.414, 0.013, 0.0]
    """
    sigma = check.spectrum(singular_values)
    shared = sketched_rest_bound(sigma, ell, h).overlap
    b = 1 + deflated_nu(overlap=0.0, too_small=too_small)
    least = sigma[..., check.sketch_width(ell, sigma)]
    c = b * (shared.sqrt() / least).clamp_max(1)
    return ((b * b + c).sqrt() - 1).clamp_max(deflated_nu(too_small=too_small))


def _value(polynomials: Polynomials, x: Tensor) -> Tensor:
    return polynomials_of.evaluate(polynomials, x) if polynomials else x


def _over(lost: Tensor, whole: Tensor) -> Tensor:
    """lost/whole, 0 for a zero matrix, which has nothing to lose, and NaN for one that is not finite."""
    return torch.where(whole == 0, 0.0, lost / torch.where(whole == 0, 1.0, whole)).clamp_max(1)


def _check_within_one(reach: Tensor) -> None:
    if bool((reach > 1 + 1e-9).any()):
        raise ValueError(
            f"s·‖X₀‖_op = {float(reach.max()):g}: expected at most 1, as the polynomials are made for "
            "[0, 1]; take scale=None for 1/‖X₀‖_op, or without polynomials delta=None for ‖R‖_op"
        )
