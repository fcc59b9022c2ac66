"""A certificate cheap enough for every step: upper bounds on γ and ν without an SVD of M.

**γ.** Only the nuclear norm in γ = 1 − ⟨M, T⟩/‖M‖_* is expensive, and an upper bound on the nuclear
norm bounds γ from above. For any Q with ℓ orthonormal columns and B = QᵀM, as from a sketch,

    ‖M‖_* ≤ ‖B‖_* + √(d₀ − ℓ)·‖M − QB‖_F,     ‖M − QB‖²_F = ‖M‖²_F − ‖B‖²_F,

because the residual has rank at most d₀ − ℓ. In 16 bits the columns of Q are orthonormal to two digits
only, and a leading σ that Q makes longer by a percent would hide all small ones. Then, with E = QᵀQ − I,

    ‖M‖_* ≤ ‖Q‖_op·‖B‖_* + √d₀·‖M − QB‖_F,     ‖M − QB‖²_F = ‖M‖²_F − ‖B‖²_F + ⟨B, EB⟩.

The smaller of two bounds on ‖B‖_* is taken:

* Σᵢ‖eᵢᵀB‖₂, the sum of the row norms. It is at most √ℓ‖B‖_F, and near ‖B‖_* itself when the rows
  are sorted by strength, which is what a basis from Gram–Schmidt on a power iteration gives.
* ⟨B, Z⟩ + ℓδ·max_{0≤x≤1} x(1 − p_q(x)) for Z = p_q(B/δ), as no singular value σ loses more than
  σ(1 − p_q(σ/δ)) of its alignment. It holds for any basis, and is tightest with many steps.

A sketched map has B already (:class:`polarstep.maps.base.Factors`), so the cost is a few norms. So
has a deflated map (:class:`polarstep.maps.base.Captured`), whose T is more than QZ. For a
full-space map the second bound applies with B = M, and the first with a small sketch of its own.

**ν.** Singular values of M/δ lie in [0, 1], so ‖T‖_op ≤ max_{0≤x≤1} p_q(x): 1 for the paper's
polynomials, and a little more for the others. This bound depends on the map alone; for a sketch in 16
bits it is multiplied by ‖Q‖_op. A deflated map, a map of your own and a T that was transformed have no
such bound. Then ‖T‖_op is bounded from 15 products of T with 16 random columns, to about 5% for d₀ = 768
(:mod:`polarstep.certificate.norm_bound`). That bound holds with a probability of at least 1 − 1.5e-12
over the columns. All other bounds on γ and ν are certain.

Rounding is allowed for: the bounds hold for the T that was computed, not only for exact arithmetic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from polarstep.certificate.exact import Certificate, check_step
from polarstep.certificate.norm_bound import norm_bound
from polarstep.context import numeric_context
from polarstep.maps import LowRank, PolarMap
from polarstep.maps.base import Captured, Factors, one_step
from polarstep.maps.full_space import NewtonSchulz, schatten_norm
from polarstep.maps.subspace import orthonormalize
from polarstep.numerics import frobenius_norm, unit_scaled, widest
from polarstep.ops import ops_of

__all__ = ["certified", "cheap_certificate"]

# So many squarings make the sixteenth power of a symmetric matrix H, and ‖H¹⁶‖_F^(1/16) ≥ ‖H‖_op. With
# d rows it is at most d^(1/32) times as large.
SQUARINGS = 4
# An ε above this number is that of a 16-bit format: 2⁻⁷ or 2⁻¹⁰.
SIXTEEN_BITS = 1e-5


@torch.no_grad()
def certified(
    polar: PolarMap, M: Tensor, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Certificate]:
    """T(M), bit for bit equal to ``polar(M)``, and its cheap certificate.

    >>> import polarstep as ps
    >>> M = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    >>> T, bound = certified(ps.LowRank(rank=24, oversample=8), M)
    >>> exact = ps.certify(M, T)
    >>> bool(bound.gamma >= exact.gamma), bool(bound.nu >= exact.nu)
    (True, True)
    """
    step = one_step(polar, M, generator)
    if step is None:
        return M.clone(), cheap_certificate(M, M, polar)
    polar = polar.on(M.shape[-2], M.shape[-1], M.device)
    with numeric_context(M.device):
        T = step.dense.to(M.dtype).reshape(M.shape)
    # On a GPU step.M, and with it B, is a multiple of M; the bounds are the same for both.
    return T, cheap_certificate(step.M.reshape(M.shape), T, polar, step.factors, step.captured)


@torch.no_grad()
def cheap_certificate(
    M: Tensor,
    T: Tensor,
    polar: PolarMap | None = None,
    factors: Factors | None = None,
    captured: Captured | None = None,
) -> Certificate:
    """Upper bounds on the γ and ν of :func:`polarstep.certify`; NaN for a matrix that is not finite.

    Args:
        M: matrices of shape ``(..., m, n)``.
        T: what ``polar`` made of them, in their precision.
        polar: the map that made T, where it is known; its polynomial sharpens both bounds. The
            polynomial of a low-rank map acts on B = QᵀM, so it helps only together with ``factors``.
        factors: the factors of T from the same step, or ``None``.
        captured: the head of a deflated step, whose T is more than the head, or ``None``.
    """
    check_step(M, T, "cheap_certificate")
    if M.numel() == 0:
        nothing = torch.zeros(M.shape[:-2], dtype=widest(M.device), device=M.device)
        return Certificate(nothing, nothing.clone())
    shape = M.shape[:-2]
    M, T = (X.reshape(-1, *X.shape[-2:]) for X in (M, T))
    M, T = _wide_enough(M), _wide_enough(T)
    if M.dtype != T.dtype:
        raise TypeError(
            f"M is {M.dtype} and T {T.dtype}: expected one precision, whose rounding errors the bounds "
            "allow for, as in cheap_certificate(M, polar(M)); polarstep.certify takes any two"
        )
    with numeric_context(M.device):
        gamma, nu = _bounds(M, T, polar, factors, captured)
    gamma, nu = (X.reshape(shape).to(widest(X.device)) for X in (gamma, nu))
    return Certificate(gamma, nu)


def _bounds(
    M: Tensor,
    T: Tensor,
    polar: PolarMap | None,
    factors: Factors | None,
    captured: Captured | None,
) -> tuple[Tensor, Tensor]:
    """The bounds of :func:`cheap_certificate` for matrices (batch, m, n) in float32 or wider."""
    inner = polar if factors is None else _inner(polar)
    B = None if factors is None else _wide_enough(factors.B)
    norm = _norm(M)
    if bool(((norm < 1e-15) | (norm > 1e15)).any()):  # squares would leave float32's range
        M, s = unit_scaled(M)
        norm = _norm(M)
        B = None if B is None else B * s
        inner = inner if inner is None or inner.traits.ignores_scale else None
    d0, in_full_space = min(M.shape[-2:]), factors is None and captured is None
    precision = _precision(M, polar if in_full_space else None)
    basis = None if factors is None else _basis(factors, precision)
    if factors is None or B is None:
        alignment = _inner_product(M, T)
        nuclear = None if captured is None else _by_captured(captured, norm, precision)
        if nuclear is None:
            nuclear = _by_own_sketch(M if M.shape[-2] == d0 else M.mT, norm)
        if inner is not None and (known := inner.bounds(d0, norm)) is not None:
            nuclear = torch.minimum(nuclear, alignment + known[1])
    else:
        alignment = _inner_product(B, factors.Z.to(B.dtype))
        nuclear = _by_factors(factors, basis, B, alignment, inner, d0, norm, precision)
    largest = _largest_value(inner, T, norm)
    if basis is not None:
        largest = largest * basis.norm
    largest = largest + _rounding_of_norm(precision, max(M.shape[-2:]))
    # Rounding errors of the sum ⟨M, T⟩, and of the products that made B and T.
    slack = (16 * torch.finfo(M.dtype).eps * math.sqrt(d0) * largest + precision) * norm
    bound = 1 - (alignment - slack) / (nuclear + slack)
    # A zero M has 0 for both. The norm of an M that is not finite is infinite or NaN, and so are both.
    gamma, nu = (torch.where(norm == 0, 0.0, X) for X in (bound, largest - 1))
    gamma, nu = (torch.where(norm.isfinite(), X, torch.nan) for X in (gamma, nu))
    return gamma, nu


def _precision(M: Tensor, polar: PolarMap | None) -> float:
    """ε of the products with M, and of those of a ``polar`` that works on the whole of M."""
    (m, n), device = M.shape[-2:], M.device
    usual = torch.finfo(ops_of(device).dtype(M.dtype)).eps
    if polar is None:
        return usual
    its = polar.on(m, n, device)
    if not isinstance(its, NewtonSchulz):
        return usual
    return max(usual, torch.finfo(its.product_dtype(m, n, M.dtype, device)).eps)


def _wide_enough(X: Tensor) -> Tensor:
    """X in float32, or in its own precision if that is wider."""
    return X.float() if X.dtype.itemsize < 4 else X


def _inner(polar: PolarMap | None) -> PolarMap | None:
    """The map with Z = inner(B) inside the ``polar`` that returned B and Z, if it is known."""
    return polar.inner if isinstance(polar, LowRank) else None


def _by_captured(captured: Captured, norm: Tensor, precision: float) -> Tensor | None:
    """A bound on ‖M‖_* from B and Z of the step; ``None`` where the step's M is too small or large."""
    A, B = _wide_enough(captured.M), _wide_enough(captured.factors.B)
    size = _norm(A)
    if bool((((size < 1e-15) & (size > 0)) | (size > 1e15)).any()):
        return None
    alignment, d0 = _inner_product(B, captured.factors.Z.to(B.dtype)), min(A.shape[-2:])
    factors, basis = captured.factors, _basis(captured.factors, precision)
    inner = _inner(captured.polar)
    of_A = _by_factors(factors, basis, B, alignment, inner, d0, size, precision)
    return of_A * (norm / torch.where(size > 0, size, 1))


def _by_factors(
    factors: Factors,
    basis: _Basis | None,
    B: Tensor,
    alignment: Tensor,
    inner: PolarMap | None,
    d0: int,
    norm: Tensor,
    precision: float,
) -> Tensor:
    """A bound on ‖M‖_* from B = QᵀM and ⟨B, Z⟩ = ``alignment``, for ‖M‖_F = ``norm``.

    ``B`` is ``factors.B`` on the scale of ``norm``, in float32 or wider. ``inner`` is the map with
    Z = inner(B), if it is known.
    """
    norm_B, ell = _norm(B), B.shape[-2]
    bound = _row_norms(B)
    if inner is not None and (known := inner.bounds(ell, norm_B)) is not None:
        bound = torch.minimum(bound, alignment + known[1])
    if basis is not None:
        longer = _inner_product(B, basis.error @ B)
        return basis.norm * bound + _outside(norm_B, norm, d0, precision, longer)
    return bound + _outside(norm_B, norm, d0 - ell if factors.orthonormal else d0, precision)


def _by_own_sketch(X: Tensor, norm: Tensor) -> Tensor:
    """A bound on ‖M‖_* for a full-space map, from a sketch of d₀/48 rows of its own.

    Its basis spans MMᵀE, where E selects d₀/48 coordinates. So it costs two products of size
    m·n·d₀/48, where five Newton–Schulz steps have four to fifteen of size m·n·d₀.
    """
    d0 = X.shape[-2]
    width = max(8, d0 // 48)
    if width >= d0:
        return _row_norms(X)
    rows = X[:, torch.arange(width, device=X.device) * d0 // width]
    Y = X @ (rows / norm[:, None, None].clamp_min(torch.finfo(X.dtype).tiny)).mT
    B = orthonormalize(Y, "cholesky").mT @ X
    return _row_norms(B) + _outside(_norm(B), norm, d0 - width, torch.finfo(X.dtype).eps)


def _row_norms(B: Tensor) -> Tensor:
    """Σᵢ‖eᵢᵀB‖₂ ≥ ‖B‖_*: B is a sum of rank-one matrices eᵢ(eᵢᵀB)."""
    return torch.linalg.vector_norm(B, dim=-1).sum(-1)


def _outside(
    norm_B: Tensor, norm: Tensor, rank: int, precision: float, longer: Tensor | float = 0.0
) -> Tensor:
    """√rank·‖M − QB‖_F ≥ ‖M − QB‖_*, with room for the cancellation in ‖M‖² − ‖B‖².

    ``longer`` is ‖QB‖²_F − ‖B‖²_F, which is zero if the columns of Q are orthonormal.
    """
    # Entries are rounded at random, so a sum of many squares is off by far less than ε.
    room = 8 * precision if precision < SIXTEEN_BITS else precision / 64
    whole, held = (each.to(widest(each.device)).square() for each in (norm, norm_B))
    energy = whole * (1 + room) - held + longer
    return (math.sqrt(rank) * energy.clamp_min(0).sqrt()).to(norm.dtype)


def _largest_value(inner: PolarMap | None, T: Tensor, norm: Tensor) -> Tensor:
    """A bound on ‖T‖_op: the map's own bound if it has one, else from products with T."""
    known = None if inner is None else inner.bounds(min(T.shape[-2:]), norm)
    return norm_bound(T).clamp_min(1.0) if known is None else known[0]


class _Basis(NamedTuple):
    """How far a basis Q in 16 bits, which is orthonormal to two digits, is from orthonormal."""

    error: Tensor
    """E = QᵀQ − I. Products are made of E, not of QᵀQ, because a GPU may round factors to tf32."""
    norm: Tensor
    """A bound on ‖Q‖_op."""


def _basis(factors: Factors, precision: float) -> _Basis | None:
    """E and ‖Q‖_op of the stored Q, in float32; ``None`` where Q was made in more than 16 bits.

    An eigenvalue λ of QᵀQ is near one, or zero for a direction that M does not have. F = (I + E)E has
    the eigenvalues λ² − λ ≤ ‖F‖_op, so that ‖F‖_op, which is about |λ − 1|, bounds the largest λ.
    """
    if precision <= SIXTEEN_BITS:
        return None
    Q = factors.columns[..., : factors.width].float()
    E = Q.mT @ Q
    E.diagonal(dim1=-2, dim2=-1).sub_(1)
    norm = schatten_norm(E + E @ E, SQUARINGS).square()[:, 0, 0]
    largest = (1 + (1 + 4 * norm).sqrt()) / 2
    return _Basis(E, largest.sqrt())


def _rounding_of_norm(precision: float, longest: int) -> float:
    """How far rounding may push ‖T‖_op above the map's bound, for a long side of ``longest``.

    Measured at 1e-5 in float32 and 6e-3 in bfloat16 where rounding errors are random. Where all entries
    are equal, errors add up: to 2.5e-4 for ones of 768×3072 in float32.
    """
    if precision > SIXTEEN_BITS:
        return 2.0**-6
    return max(4e-5 if precision > 1e-10 else 1e-10, longest * precision)


def _inner_product(X: Tensor, Y: Tensor) -> Tensor:
    """⟨X, Y⟩ of every pair.

    If one of the two is a transposed view, an elementwise product would miss the cache at every
    entry. Products XᵀY of 16 columns at a time, of which the diagonal is used, do not.
    """
    if X.is_contiguous() == Y.is_contiguous():
        X, Y = (X, Y) if X.is_contiguous() else (X.mT, Y.mT)
        X, Y = X.flatten(1), Y.flatten(1)
        if X.device.type == "cpu":  # one BLAS call a pair is twice as fast as the batched kernel
            return torch.stack([torch.dot(x, y) for x, y in zip(X, Y, strict=True)])
        return torch.linalg.vecdot(X, Y)
    if not X.is_contiguous():
        X, Y = Y, X
    m, n = X.shape[-2:]
    if n % 16 or not Y.mT.is_contiguous():
        return (X * Y).sum((-2, -1))
    sums = [
        torch.bmm(x.view(m, n // 16, 16).permute(1, 2, 0), y.view(n // 16, 16, m).mT)
        .diagonal(dim1=-2, dim2=-1)
        .sum()
        for x, y in zip(X, Y.mT, strict=True)
    ]
    return torch.stack(sums)


def _norm(X: Tensor) -> Tensor:
    """‖X‖_F of every matrix.

    Squares are added up in float64. In float32 a CPU is off by 6e-4 for 4096×4096 entries, more than
    the rest may have that a sketch leaves out, and squares of entries below 1e-22 vanish.
    """
    return frobenius_norm(X).flatten().to(X.dtype)
