"""An orthonormal basis of the range of a tall matrix, three ways.

``householder`` is the reference. It cannot fail, but a GPU runs it at a thousandth of its speed and
a CPU at a third. ``cholesky`` factors the Gram matrix, checks the result and falls back to
Householder for matrices where the factorization failed; the check waits for the device, which costs
a CPU nothing. ``products`` cannot fail and needs no check: Y(YᵀY)^{-½} *is* an orthonormal basis of
range(Y), so a polar map of high gain is an orthonormalization.

Numerically zero directions of Y become some orthonormal completion (``householder``, ``cholesky``)
or columns of norm below one (``products``). Zero columns of Y stay zero, except with
``householder``. All three keep ‖Q‖_op ≤ 1 up to rounding, which is all that ‖T‖_op ≤ 1 needs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from polarstep import products
from polarstep.polar.coefficients import Polynomial, evaluate, resolve
from polarstep.polar.gram import apply_polynomials, scaled_gram
from polarstep.polar.minimax import polar_express
from polarstep.polar.small import small_polar, suits_small
from polarstep.torch_compile import constant

__all__ = ["Method", "orthonormalize", "resolved", "whitened_polynomials"]

Method = Literal["auto", "householder", "cholesky", "products"]


def orthonormalize(Y: Tensor, method: Method = "auto", *, rough: bool = False) -> Tensor:
    """A basis Q of range(Y), of the shape of ``Y``: (batch, m, ℓ) with m ≥ ℓ.

    ``"auto"`` is ``cholesky`` in float32 on a CPU, ``products`` on other devices, and
    ``householder`` in float64. With ``rough`` the columns are only well conditioned, which is
    enough between two power iterations.
    """
    chosen = resolved(method, Y.dtype, Y.device)
    if chosen == "householder":
        return _householder(Y)
    if chosen == "cholesky":
        return _cholesky(Y, rough=rough)
    return _products(Y, rough=rough)


def resolved(method: Method, dtype: torch.dtype, device: torch.device) -> str:
    """``method``, or the method that ``"auto"`` stands for with this dtype and device."""
    if method != "auto":
        return method
    return "householder" if dtype == torch.float64 else products.of(device).orthonormalization


def _householder(Y: Tensor) -> Tensor:
    """The Q of Y = QR with R's diagonal positive, so that Q is the same as from Cholesky-QR."""
    Q, R = torch.linalg.qr(Y)
    negative = R.diagonal(dim1=-2, dim2=-1) < 0
    return torch.where(negative[..., None, :], -Q, Q)


def _cholesky(Y: Tensor, *, rough: bool) -> Tensor:
    """Shifted Cholesky-QR, repeated until QᵀQ = I; Householder for matrices that do not get there.

    A pass squares the condition number. So the first pass adds a shift to stay positive definite,
    and leaves Q well conditioned but not orthonormal; later passes finish. A pass that starts with
    ‖QᵀQ − I‖ ≤ ½ ends with QᵀQ = I up to rounding and is the last. A zero column stays zero,
    because its entry on the diagonal of QᵀQ is set to one.
    """
    Qt, G, trace = scaled_gram(Y.mT)
    _mark_zero_columns(G).add_(10 * torch.finfo(Y.dtype).eps * trace[..., 0])
    Q, broken = _divided(Qt.mT, G)
    if not rough:
        Q, broken = _finished(Q, broken)
    if bool(broken.any()):
        Q[broken] = _householder(Y[broken])
    return Q


def _finished(Q: Tensor, broken: Tensor) -> tuple[Tensor, Tensor]:
    """Q after at most three more passes, and which matrices did not reach QᵀQ = I."""
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    unfinished = broken
    for _ in range(3):
        G = products.of(Q.device).gram(Q.mT)
        _mark_zero_columns(G)
        far = torch.linalg.matrix_norm(G - identity) > 0.5
        Q, failed = _divided(Q, G)
        broken = broken | failed
        unfinished = far & ~broken
        if not bool(unfinished.any()):
            break
    return Q, broken | unfinished


def _mark_zero_columns(G: Tensor) -> Tensor:
    """Set the diagonal of G = QᵀQ to one at zero columns of Q; return the diagonal as a view."""
    diagonal = G.diagonal(dim1=-2, dim2=-1)
    return diagonal.add_(diagonal == 0)


def _divided(Q: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """``QL⁻ᵀ`` with G = LLᵀ, and which matrices have no such L; their Q is returned unchanged."""
    L, info = torch.linalg.cholesky_ex(G)
    failed = info > 0
    if bool(failed.any()):
        identity = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
        L = torch.where(failed[:, None, None], identity, L)
    return torch.linalg.solve_triangular(L.mT, Q, upper=True, left=False), failed


def _products(Y: Tensor, *, rough: bool) -> Tensor:
    """The polar factor of Y by polynomials alone.

    PolarExpress lifts singular values down to 1e-4 of the norm close to one. The paper's quintic,
    which never exceeds one, brings them to one. Between power iterations four steps are enough,
    which lift singular values down to 1e-3; three would lose 0.02 of γ on real momentum.
    """
    ops = products.of(Y.device)
    dtype = ops.dtype(Y.dtype)
    lift = resolve("polar-express", 4 if rough else 6)
    if dtype == torch.bfloat16 and not rough:
        # bfloat16 rounds a singular value of one by up to 2⁻⁸; shrinking by 2⁻⁸ keeps ‖Q‖_op ≤ 1.
        *first, last = lift
        lift = (*first, tuple((1 - 2**-8) * c for c in last))
    if suits_small(Y.mT, lift):
        return small_polar(Y.mT, lift, by_gram=False).mT
    X = ops.normalized(Y, dtype).mT
    if rough or dtype == torch.bfloat16:
        return ops.iterate(X, lift).mT
    return apply_polynomials(X, (*lift, *resolve("quintic", 2))).mT


# A list, because torch.compile traces through functools.cache and warns about it.
_WHITENED: list[tuple[Polynomial, ...]] = []


@constant
def whitened_polynomials() -> tuple[Polynomial, ...]:
    """Four polynomials that lift singular values of Y down to 0.01·‖Y‖_F close to one.

    On the Gram matrix degree seven costs one small product more than degree five, and these four
    steps are worth 4½ of degree five. They are scaled to end under one, as in :func:`_products`.
    """
    if not _WHITENED:
        *first, last = polar_express(0.01, 4, (5, 7, 7, 5))
        x = torch.linspace(0.01, 1, 4001, dtype=torch.float64, device="cpu")
        scale = (1 - 2**-10) / float(evaluate((*first, last), x).max())
        _WHITENED.append((*first, tuple(scale * c for c in last)))
    return _WHITENED[0]
