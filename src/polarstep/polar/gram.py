"""An odd matrix polynomial evaluated on the small Gram matrix.

For odd polynomials φ_t(x) = x·P_t(x²) and wide ``X`` (m ≤ n), with ``G₀ = X Xᵀ`` (m×m):

    φ_q∘…∘φ₁(X) = W_q X,   W_t = P_t(G_{t−1}) W_{t−1},   G_t = P_t(G_{t−1}) G_{t−1} P_t(G_{t−1}).

Only two products have size m·m·n, one to form G₀ and one to apply W_q, where the plain iteration
has two a step. All else is m×m, so it pays when n is well above m.

The price is in the small singular values. A rounding error ε in G₀ is an error in σ², so a σ near
√ε is unknown, and it grows by P_t(0)² = a_t² a step. Where that growth would make it matter, the
iteration restarts: X is replaced by W X and its Gram matrix is formed afresh.

There is a second price. W is large where σ is small, up to ∏a_t, so that its rounding errors reach
the other singular values as ε∏a_t: 6e-5 after nine quintic steps in float32, on the wrong side of
‖T‖_op ≤ 1. A last step with φ(1) = 1 and φ'(1) = 0, as the paper's two polynomials have, squares an
error of that kind away, if it works on the Gram matrix of the X that has it. So such a step comes
after a restart of its own.

On a GPU all of it runs in float16, m×m products too. Rounding m² entries one by one is a random matrix,
whose norm is by √m smaller than the sum of them all: relative to ‖G‖ it was 2⁻⁵ of the precision or
less on every spectrum tried, and with that figure the rule above finds by itself what measurements
found: PolarExpress as 1 + 2 + 2 steps, and five of the paper's in one go, are as accurate as steps on
X; longer runs are not, and once an eigenvalue has drowned the next polynomials may blow it up to
infinity. In bfloat16, with eight times the rounding, next to nothing would be gained.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.matrix import product_like, unit_scaled
from polarstep.polar.coefficients import Polynomial, evaluate
from polarstep.polar.symmetric import WORTH_FROM, symmetric_product
from polarstep.torch_compile import constant

__all__ = [
    "accumulated",
    "applied",
    "apply_polynomials",
    "apply_to_normalized",
    "fits_float16",
    "gram_matrix",
    "one_launch",
    "polynomial_of",
    "polynomial_times",
    "restarts",
    "rounding",
    "scaled_gram",
    "weight",
]

# Largest error in an eigenvalue of G_t that is left to grow, on the scale of ‖G_t‖ ≤ 1. A negative
# eigenvalue of this size changes P(λ) by under a tenth for every coefficient set we ship.
TOLERATED_ERROR = 2e-2
# After the last step, unless that one settles: nothing follows that would take it back.
TOLERATED_AT_THE_END = 4e-3

# Largest ε∏a_t that needs no settling by a last step after a restart.
TOLERATED_OVERSHOOT = 4e-6


def gram_matrix(X: Tensor) -> Tensor:
    """``X Xᵀ``, accumulated and returned in float32 when ``X`` is of lower precision."""
    if X.dtype.itemsize >= 4:
        return symmetric_product(X, X)
    if X.is_cuda:
        return torch.bmm(X, X.mT, out_dtype=torch.float32)
    X = X.float()
    return X @ X.mT


def scaled_gram(X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """X, XXᵀ and its trace ‖X‖_F², of shape (batch, 1, 1), for ``X`` on a CPU.

    Where that is near the limits of the precision, X is scaled first; to look costs a CPU nothing.
    """
    G, trace = _gram_and_trace(X)
    if not bool(((trace > 1e-24) & (trace < 1e24)).all()):
        X, _ = unit_scaled(X)
        G, trace = _gram_and_trace(X)
    return X, G, trace


def _gram_and_trace(X: Tensor) -> tuple[Tensor, Tensor]:
    G = gram_matrix(X)
    return G, G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]


def polynomial_of(G: Tensor, polynomial: Polynomial) -> Tensor:
    """``P(G) = aI + bG + cG² + …`` by Horner's rule, for the polynomial x·P(x²) = ax + bx³ + cx⁵ + …"""
    a, *rest = polynomial
    if len(rest) == 1:
        H = rest[0] * G
        if a:
            H.diagonal(dim1=-2, dim2=-1).add_(a)
        return H
    H, scale = _but_for_the_last_product(G, polynomial)
    return symmetric_product(H, G, plus=G, alpha=scale, beta=rest[0], identity=a)


def _but_for_the_last_product(G: Tensor, polynomial: Polynomial) -> tuple[Tensor, float]:
    """H and s with ``P(G) = s·HG + bG + aI``, for a polynomial of degree five or more."""
    _, _, *higher = polynomial
    H, scale = G, higher.pop()
    while higher:  # every partial result is symmetric
        H, scale = symmetric_product(H, G, plus=G, alpha=scale, beta=higher.pop()), 1.0
    return H, scale


def polynomial_times(
    G: Tensor,
    Y: Tensor,
    polynomial: Polynomial,
    *,
    by_trace: bool = False,
    P: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``P(G)Y`` in one launch, where :func:`one_launch` says so; P(G) goes to ``P``, if that is given.

    ``by_trace`` is for G = YYᵀ and a polynomial of degree five: P(G/‖Y‖_F²)Y/‖Y‖_F.
    """
    from polarstep.kernels.polynomial import product_times

    a, b, *_ = polynomial
    H, scale = _but_for_the_last_product(G, polynomial)
    return product_times(
        H, G, Y, alpha=scale, D=G, beta=b, identity=a, by_trace=by_trace, P=P, out_dtype=out_dtype
    )


def one_launch(Y: Tensor, polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether P(G)Y is one launch: for few rows on a GPU, in 16 bits, from degree five on."""
    if not kernels.available(Y.device):
        return False
    from polarstep.kernels.polynomial import suits

    return suits(Y) and all(len(polynomial) >= 3 for polynomial in polynomials)


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
    """The steps before which the Gram matrix must be formed afresh; with that for ``settling``."""
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
    """Whether the last step can take back an error of ``overshoot``, and there is need to.

    In products of lower precision there is nothing to gain: they round more coarsely than this.
    """
    return _settles(last) and epsilon < TOLERATED_OVERSHOOT < overshoot


def _settles(polynomial: Polynomial) -> bool:
    """Whether φ(1) = 1 and φ'(1) = 0, so that φ(1 + e) = 1 + O(e²)."""
    slope = sum((2 * k + 1) * c for k, c in enumerate(polynomial))
    return abs(sum(polynomial) - 1) < 1e-12 and abs(slope) < 1e-12


_FITS: dict[tuple[Polynomial, ...], bool] = {}


@constant
def fits_float16(polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether singular values from [0, 1] and all that is made of them stay far from float16's limit."""
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

    In ``out_dtype``, or in the precision of ``X``.
    """
    out_dtype = out_dtype or X.dtype
    in_halves = X.dtype == torch.float16 and kernels.available(X.device)
    starts = [0, *restarts(polynomials, rounding(X.dtype)), len(polynomials)]
    for first, end in pairwise(starts):
        if first < end:
            # But for float16 on a GPU, m×m work is never below float32.
            G = symmetric_product(X, X) if in_halves else gram_matrix(X)
            W = accumulated(G, polynomials[first:end]).to(X.dtype)
            X = applied(W, X, X.dtype if end < len(polynomials) else out_dtype)
    return X.to(out_dtype)


def apply_to_normalized(X: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of X/‖X‖_F, for ``X`` on a CPU, without a pass to divide it.

    ‖X‖_F² is the trace of XXᵀ.
    """
    X, G, trace = scaled_gram(X)
    end = next(iter(restarts(polynomials, rounding(X.dtype))), len(polynomials))
    W = _accumulated_by_trace(G, trace, polynomials[:end])
    return apply_polynomials(product_like(X, W, X), polynomials[end:])


def weight(X: Tensor, polynomials: tuple[Polynomial, ...]) -> tuple[Tensor, Tensor] | None:
    """W and S with ``WS`` = φ_q∘…∘φ₁ of X/‖X‖_F, for ``X`` on a CPU; ``None`` where a restart is needed.

    S is X itself, or X times a power of two where its entries are so small or so large that W, of size
    1/‖X‖_F, or the squares of X would leave the range of float32.

    A last step that would have one of its own, to take back W's rounding errors of ε∏a_t, shrinks W by
    as much instead, so that ‖WX‖_op ≤ 1 all the same: by 1e-5 after seven quintic steps, and nothing is
    left to do on the long side of X.
    """
    epsilon = rounding(X.dtype)
    if restarts(polynomials, epsilon, settling=False):
        return None
    overshoot = epsilon * math.prod(polynomial[0] for polynomial in polynomials)
    shrink = overshoot if _is_to_settle(polynomials[-1], overshoot, epsilon) else 0.0
    S, G, trace = scaled_gram(X)
    return _accumulated_by_trace(G, trace, polynomials, 1 - shrink), S


def _accumulated_by_trace(
    G: Tensor, trace: Tensor, polynomials: tuple[Polynomial, ...], scale: float = 1.0
) -> Tensor:
    """W times ``scale`` for the X of norm one that has the Gram matrix G/trace, over ‖X‖_F."""
    trace = torch.where(trace == 0, 1, trace)
    return accumulated(G / trace, polynomials).mul_(scale * trace.rsqrt())


def applied(W: Tensor, X: Tensor, dtype: torch.dtype) -> Tensor:
    """``WX`` in ``dtype``, rounded once where a kernel can do it."""
    if dtype == X.dtype or not kernels.available(X.device):
        return product_like(X, W, X).to(dtype)
    from polarstep.kernels.product import product

    return product(W, X, out_dtype=dtype)


def accumulated(G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """W_q for the Gram matrix ``G``."""
    if one_launch(G, polynomials):
        return _accumulated_in_few_launches(G, polynomials)
    if _are_few(G, polynomials):
        return _accumulated_side_by_side(G, polynomials)
    W: Tensor | None = None
    for t, polynomial in enumerate(polynomials):
        P = polynomial_of(G, polynomial)
        W = P if W is None else symmetric_product(P, W)
        if t + 1 < len(polynomials):
            G = symmetric_product(symmetric_product(P, G), P)
    assert W is not None
    return W


def _are_few(G: Tensor, polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether there are few matrices, and small ones, on a GPU and in 16 bits."""
    if not kernels.available(G.device) or G.dtype.itemsize != 2 or G.shape[-1] >= WORTH_FROM:
        return False
    from polarstep.kernels.polynomial import is_few

    return is_few(G) and all(len(polynomial) >= 3 for polynomial in polynomials)


def _accumulated_side_by_side(G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """The same with three launches a step: P = P(G), P·[W G] as one product, and G ← (PG)P.

    W lies in the middle of room for three. G lies beside it, so that both are one operand, and the next
    G goes to the other side, where the PG that it is made of is not.
    """
    from polarstep.kernels.product import product

    def polynomial_to(G: Tensor, polynomial: Polynomial, out: Tensor | None = None) -> Tensor:
        a, b, *_ = polynomial
        H, scale = _but_for_the_last_product(G, polynomial)
        return product(H, G, alpha=scale, D=G, beta=b, identity=a, symmetric=True, out=out)

    first, *rest = polynomials
    if not rest:
        return polynomial_to(G, first)
    batch, m, _ = G.shape
    at = [slice(0, m), slice(m, 2 * m), slice(2 * m, 3 * m)]
    both = {0: slice(0, 2 * m), 2: slice(m, 3 * m)}  # by the side on which G is
    room, side = G.new_empty(batch, m, 3 * m), 2
    W = polynomial_to(G, first, out=room[..., at[1]])
    torch.bmm(W @ G, W, out=room[..., at[side]])
    for polynomial in rest[:-1]:
        P, before = polynomial_to(room[..., at[side]], polynomial), room
        room = torch.empty_like(before)
        torch.bmm(P, before[..., both[side]], out=room[..., both[side]])
        torch.bmm(room[..., at[side]], P, out=room[..., at[2 - side]])
        side = 2 - side
    return polynomial_to(room[..., at[side]], rest[-1]) @ room[..., at[1]]


def _accumulated_in_few_launches(G: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """The same with two launches a step: W ← P(G)W, which leaves P as well, and G ← PGP."""
    from polarstep.kernels.polynomial import product_times

    W = P = polynomial_of(G, polynomials[0])
    for polynomial in polynomials[1:]:
        G = product_times(P, G, P)
        P = torch.empty_like(G)
        W = polynomial_times(G, W, polynomial, P=P)
    return W
