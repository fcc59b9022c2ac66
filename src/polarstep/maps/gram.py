"""An odd matrix polynomial evaluated on the small Gram matrix.

For odd polynomials φ_t(x) = x·P_t(x²) and wide ``X`` (m ≤ n), with ``G₀ = X Xᵀ`` (m×m):

    φ_q∘…∘φ₁(X) = W_q X,   W_t = P_t(G_{t−1}) W_{t−1},   G_t = P_t(G_{t−1}) G_{t−1} P_t(G_{t−1}).

Only two products have size m·m·n, one to form G₀ and one to apply W_q; the plain iteration has two
at every step. All other products are m×m, so the Gram form pays when n is well above m.

The price is in the small singular values. A rounding error ε in G₀ is an error in σ², so a σ near
√ε is unknown, and the error grows by P_t(0)² = a_t² a step. Before it grows too large, the
iteration restarts: X is replaced by W X and its Gram matrix is formed afresh.

There is a second price. W is large where σ is small, up to ∏a_t, so its rounding errors reach the
other singular values as ε∏a_t: 6e-5 after nine quintic steps in float32, on the wrong side of
‖T‖_op ≤ 1. A last step with φ(1) = 1 and φ'(1) = 0, as the paper's two polynomials have, squares
this error, if the step works on the Gram matrix of the X that has the error. So the iteration
restarts before such a step.

On a GPU everything runs in float16, m×m products too. The rounding errors of m² entries form a
random matrix, whose norm is smaller by √m than the sum of the errors: relative to ‖G‖ it was 2⁻⁵ of
the precision or less on every spectrum tried. With this figure the restart rule agrees with
measurements. PolarExpress in runs of 1 + 2 + 2 steps, and five of the paper's steps in one run, are
as accurate as steps on X. Longer runs are not: once rounding hides an eigenvalue, the next
polynomials may blow it up to infinity. bfloat16, with eight times the rounding, would gain little.

**Matrices of few rows on a GPU** (:func:`small_polar`): the sketches of a low-rank map, and small
layers. Their products take a few microseconds each, so a pass over memory counts as much as a step. Two
passes are saved. ‖Y‖_F² is the trace of YYᵀ, which the first step forms anyway, so Y itself is never
normalized (:meth:`polarstep.ops.Products.first_step`). And where n is well above m, the other steps run
on the Gram matrix in float16, as singular values are near one by then. The last product of the first
step rounds its result to float16. The very last product rounds its result to bfloat16 again, the
precision of a low-rank map's other factor."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from polarstep.context import constant
from polarstep.maps.coefficients import Polynomial, evaluate
from polarstep.numerics import product_like, unit_scaled
from polarstep.ops import ops_of

__all__ = [
    "GRAM_FROM",
    "apply_polynomials",
    "apply_to_normalized",
    "fits_float16",
    "overshoot",
    "restarts",
    "rounding",
    "scaled_gram",
    "small_polar",
    "suits_small",
    "weight",
]


# Largest error in an eigenvalue of G_t before a restart, where ‖G_t‖ ≤ 1. A negative eigenvalue of
# this size changes P(λ) by less than a tenth for every coefficient set we ship.
TOLERATED_ERROR = 2e-2
# The same after the last step, which no later step corrects, unless the last step itself settles.
TOLERATED_AT_THE_END = 4e-3

# Largest ε∏a_t for which the last step needs no restart before it to settle the error.
TOLERATED_OVERSHOOT = 4e-6


def scaled_gram(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """X, XXᵀ and its trace ‖X‖_F², of shape (batch, 1, 1), for ``X`` on a CPU.

    Where the trace is near the limits of float32, X is scaled first. Reading the trace is free on a
    CPU.
    """
    G, trace = _gram_and_trace(X)
    if not bool(((trace > 1e-24) & (trace < 1e24)).all()):
        X, _ = unit_scaled(X)
        G, trace = _gram_and_trace(X)
    return X, G, trace


def _gram_and_trace(X: Tensor) -> tuple[Tensor, Tensor]:
    G = ops_of(X.device).gram(X)
    return G, G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]


def rounding(dtype: torch.dtype) -> float:
    """The error in the Gram matrix of an ``X`` of this precision, relative to its norm."""
    if dtype == torch.float16:
        return torch.finfo(dtype).eps / 2**5
    return max(
        torch.finfo(torch.promote_types(dtype, torch.float32)).eps, torch.finfo(dtype).eps / 2**8
    )


def restarts(
    polynomials: tuple[Polynomial, ...], epsilon: float, *, settling: bool = True
) -> list[int]:
    """The steps before which to form the Gram matrix afresh.

    With ``settling`` the last step is one of them where it can correct the rounding errors of W.
    """
    starts, error, overshoot = [], epsilon, epsilon
    for t, polynomial in enumerate(polynomials):
        growth = polynomial[0]
        last, settles = t == len(polynomials) - 1, _settles(polynomial)
        tolerated = TOLERATED_AT_THE_END if last and not settles else TOLERATED_ERROR
        drowned = error * growth**2 > tolerated
        unsettled = settling and last and _is_to_settle(polynomial, overshoot * growth, epsilon)
        if t > 0 and (drowned or unsettled):
            starts.append(t)
            error = overshoot = epsilon
        error *= growth**2
        overshoot *= growth
    return starts


def _is_to_settle(last: Polynomial, overshoot: float, epsilon: float) -> bool:
    """Whether the last step can correct an error of ``overshoot``, and the error is worth it.

    In 16 bits the error is not worth it: the rounding errors of products are larger there.
    """
    return _settles(last) and epsilon < TOLERATED_OVERSHOOT < overshoot


def _settles(polynomial: Polynomial) -> bool:
    """Whether φ(1) = 1 and φ'(1) = 0, so that φ(1 + e) = 1 + O(e²)."""
    slope = sum((2 * k + 1) * c for k, c in enumerate(polynomial))
    return abs(sum(polynomial) - 1) < 1e-12 and abs(slope) < 1e-12


_FITS: dict[tuple[Polynomial, ...], bool] = {}


@constant
def fits_float16(polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether the polynomials keep singular values from [0, 1] far from float16's limit."""
    if polynomials not in _FITS:
        x, fits = torch.linspace(0, 1, 257, dtype=torch.float64, device="cpu"), True
        for polynomial in polynomials:
            x = evaluate((polynomial,), x)
            fits &= bool(x.abs().max() < 4) and max(map(abs, polynomial)) < 100
        _FITS[polynomials] = fits
    return _FITS[polynomials]


def apply_polynomials(
    X: Tensor, polynomials: tuple[Polynomial, ...], out_dtype: torch.dtype | None = None
) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of ``X``, of shape (batch, m, n) and ‖X‖_op ≤ 1.

    The result is in ``out_dtype``, or in the precision of ``X``.
    """
    out_dtype, ops = out_dtype or X.dtype, ops_of(X.device)
    in_halves = X.dtype == torch.float16 and ops.gram_in_halves
    starts = [0, *restarts(polynomials, rounding(X.dtype)), len(polynomials)]
    for first, end in pairwise(starts):
        if first < end:
            # m×m work is in float32 at least, except in float16 on a GPU.
            G = ops.symmetric(X, X) if in_halves else ops.gram(X)
            W = ops.accumulated(G, polynomials[first:end]).to(X.dtype)
            X = ops.apply(W, X, X.dtype if end < len(polynomials) else out_dtype)
    return X.to(out_dtype)


def apply_to_normalized(X: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of X/‖X‖_F, for ``X`` on a CPU.

    No pass over X is needed to divide it, as ‖X‖_F² is the trace of XXᵀ.
    """
    X, G, trace = scaled_gram(X)
    end = next(iter(restarts(polynomials, rounding(X.dtype))), len(polynomials))
    W = _accumulated_by_trace(G, trace, polynomials[:end])
    return apply_polynomials(product_like(X, W, X), polynomials[end:])


def weight(X: Tensor, polynomials: tuple[Polynomial, ...]) -> tuple[Tensor, Tensor, Tensor] | None:
    """W, S and SSᵀ with ``WS`` = φ_q∘…∘φ₁(X/‖X‖_F), for ``X`` on a CPU; ``None`` if a restart is needed.

    S is X itself, or X times a power of two where its entries are so small or so large that W, of size
    1/‖X‖_F, or the squares of X would leave the range of float32.

    W's rounding errors of ε∏a_t could lift ‖WX‖_op above one. Instead of a restart before the last
    step, W is shrunk by ε∏a_t (1e-5 after seven quintic steps), which needs no product with X.
    """
    if restarts(polynomials, rounding(X.dtype), settling=False):
        return None
    S, G, trace = scaled_gram(X)
    W = _accumulated_by_trace(G, trace, polynomials, 1 - overshoot(polynomials, X.dtype))
    return W, S, G


def overshoot(polynomials: tuple[Polynomial, ...], dtype: torch.dtype) -> float:
    """By how much to shrink W, whose rounding errors may lift ‖WX‖_op above one."""
    epsilon = rounding(dtype)
    size = epsilon * math.prod(polynomial[0] for polynomial in polynomials)
    return size if _is_to_settle(polynomials[-1], size, epsilon) else 0.0


def _accumulated_by_trace(
    G: Tensor, trace: Tensor, polynomials: tuple[Polynomial, ...], scale: float = 1.0
) -> Tensor:
    """``scale``·W/√trace, with W for the X of norm one whose Gram matrix is G/trace."""
    trace = torch.where(trace == 0, 1, trace)
    W = ops_of(G.device).accumulated(G / trace, polynomials)
    return W.mul_(scale * trace.rsqrt())


# The ratio n/m from which steps on the m×m Gram matrix are cheaper.
GRAM_FROM = 3


def suits_small(Y: Tensor, polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether :func:`small_polar` can take ``Y`` and is faster."""
    ops = ops_of(Y.device)
    return ops.fuses_first_step(Y.shape[-2], Y.dtype, polynomials[0])


def small_polar(Y: Tensor, polynomials: tuple[Polynomial, ...], *, by_gram: bool = True) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of Y/‖Y‖_F, for ``Y`` of shape (batch, m, n), m ≤ n.

    The result has the precision of ``Y``. The Gram form is used where it is cheaper, if ``by_gram``
    allows it. The result is zero where entries of Y are below 1e-18 or above 1e18, as their squares
    leave float32's range.
    """
    first, rest = polynomials[0], polynomials[1:]
    ops = ops_of(Y.device)
    by_gram &= len(rest) > 1 and Y.shape[-1] >= GRAM_FROM * Y.shape[-2]
    if by_gram and fits_float16(polynomials):
        X = ops.first_step(Y, first, torch.float16)
        return apply_polynomials(X, rest, out_dtype=Y.dtype)
    return ops.iterate(ops.first_step(Y, first, Y.dtype), rest)
