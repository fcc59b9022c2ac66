"""What the owner of a small matrix computes from its sum over the ranks.

:mod:`polarstep.distributed.sharded` calls these functions. Symmetric and triangular ℓ×ℓ matrices are
sent as their lower triangles, half of the bytes; such a matrix is called packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep import products
from polarstep.polar import LowRank, NewtonSchulz, gram
from polarstep.polar.newton_schulz import SQUARINGS, schatten_norm
from polarstep.polar.orthonormal import orthonormalize

__all__ = [
    "basis_of",
    "inverse_root_of",
    "lifted_by",
    "packed_triangle",
    "shape_of",
    "unpacked",
    "weight_of",
]


@dataclass(frozen=True)
class _Longer:
    """A function of packed matrices that appends a number to each of its results."""

    call: Callable[[Tensor], Tensor]

    def __call__(self, X: Tensor) -> Tensor:
        return self.call(X)


def shape_of(f: Callable[[Tensor], Tensor], X: Tensor) -> tuple[int, ...]:
    """The shape of what ``f`` returns for one matrix of ``X``, known before ``f`` is called."""
    return (*X.shape[1:-1], X.shape[-1] + isinstance(f, _Longer))


def basis_of(polar: LowRank, *, rough: bool) -> Callable[[Tensor], Tensor]:
    """A basis of summed columns, as one process makes it."""
    return lambda Y: orthonormalize(
        products.of(Y.device).workable(Y), polar.finder.orth, rough=rough
    )


def lifted_by(inner: NewtonSchulz) -> Callable[[Tensor], Tensor]:
    """Z = inner(B) of summed matrices B."""

    def lifted(B: Tensor) -> Tensor:
        lift = inner.lift(products.of(B.device).workable(B))
        return lift.X if lift.W is None else torch.bmm(lift.W, lift.X.to(lift.W.dtype))

    return lifted


def weight_of(
    inner: NewtonSchulz, first: int, end: int, ell: int, *, by_norm: bool
) -> Callable[[Tensor], Tensor]:
    """W, packed, with inner(B) = WB for steps ``first`` to ``end``, from the packed BBᵀ.

    ``by_norm`` appends ‖WB‖²_F to each W.
    """
    polynomials = inner.polynomials
    is_last = end == len(polynomials)

    def weight(lower: Tensor) -> Tensor:
        G = unpacked(lower, ell, symmetric=True)
        scale = torch.ones_like(G[:, :1, :1])
        if first == 0:
            trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]
            known = trace > 0
            trace = torch.where(known, trace, 1)
            G, scale = G / trace, torch.where(known, trace.rsqrt(), 0)
            if inner.delta in SQUARINGS:
                norm = schatten_norm(G, SQUARINGS[inner.delta])
                norm = torch.where(known, norm * (1 + 4 * torch.finfo(G.dtype).eps), 1)
                G, scale = G / norm.square(), scale / norm
        if first == end:  # no steps at all
            W = torch.eye(ell, dtype=G.dtype, device=G.device).expand_as(G)
        else:
            W = products.of(G.device).accumulated(G, polynomials[first:end])
            W = W * (1 - (gram.overshoot(polynomials[first:end], G.dtype) if is_last else 0.0))
        found = packed_triangle(scale * W)
        if not by_norm:
            return found
        squared = torch.where(scale > 0, (W @ G) * W, 0).sum((-2, -1))
        return torch.cat([found, squared[:, None]], dim=1)

    return _Longer(weight) if by_norm else weight


def inverse_root_of(ell: int, is_first: bool) -> Callable[[Tensor], Tensor]:
    """L⁻¹, packed, with G = LLᵀ for the packed G, and a flag: 1: another pass is needed; 2: no L."""

    def inverse(lower: Tensor) -> Tensor:
        G = unpacked(lower, ell, symmetric=True)
        identity = torch.eye(ell, dtype=G.dtype, device=G.device)
        trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)
        diagonal = G.diagonal(dim1=-2, dim2=-1)
        diagonal.add_(diagonal == 0)  # zero columns stay zero
        far = torch.linalg.matrix_norm(G - identity) > 0.5
        if is_first:
            diagonal.add_((10 * torch.finfo(G.dtype).eps * trace)[:, None])
        L, info = torch.linalg.cholesky_ex(G)
        failed = info > 0
        L = torch.where(failed[:, None, None], identity, L)
        inverse = torch.linalg.solve_triangular(L, identity.expand_as(L), upper=False)
        flag = torch.where(failed, 2, far.to(G.dtype))
        return torch.cat([packed_triangle(inverse), flag[:, None].to(G.dtype)], dim=1)

    return _Longer(inverse)


def packed_triangle(X: Tensor) -> Tensor:
    """The lower triangle of (batch, ℓ, ℓ) matrices as (batch, ℓ(ℓ + 1)/2)."""
    rows, cols = torch.tril_indices(X.shape[-1], X.shape[-1], device=X.device)
    return X[:, rows, cols]


def unpacked(lower: Tensor, ell: int, *, symmetric: bool = False) -> Tensor:
    """The inverse of :func:`packed_triangle`; zero or symmetric above the diagonal."""
    rows, cols = torch.tril_indices(ell, ell, device=lower.device)
    X = lower.new_zeros(len(lower), ell, ell)
    X[:, rows, cols] = lower
    if symmetric:
        X[:, cols, rows] = lower
    return X
