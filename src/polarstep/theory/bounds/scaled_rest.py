"""Bounds for X₀ = QZ + R/δ itself, whose rest is only scaled. Not in the paper.

Notation and the facts (1) to (3) are those of :mod:`polarstep.theory.bounds.deflated`. Here ‖T‖_op =
‖X₀‖_op, so that a small ν needs δ ≥ ‖R‖_op.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polarstep.theory import checks as check
from polarstep.theory.bounds.polar_maps import sketched_rest_bound

__all__ = [
    "deflated_nu",
    "expected_deflated_gamma",
    "expected_deflated_nu",
]

# What errors say is expected of δ.
DELTA = "δ > 0, of the size of R's singular values"


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

    with T_s and ϱ_s of :mod:`polarstep.theory.bounds.polar_maps`, and ĝ(y) = √y − y up to y = ¼ and ¼
    from there on, the least nondecreasing function above √y − y. So the bound is (√(Nε) − ε/δ)/‖M‖_* as
    long as ε ≤ Nδ²/4.

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


def quantile(degrees: int, share: float) -> float:
    """The q with P(χ²_degrees ≤ q) = share, by bisection of log q."""
    low, high = -700.0, math.log(degrees) + 10
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    for _ in range(100):
        middle = (low + high) / 2
        below = torch.special.gammainc(half, half.new_tensor(math.exp(middle) / 2)) < share
        low, high = (middle, high) if below else (low, middle)
    return math.exp(low)
