"""A step of a warm low-rank map on a GPU, in products alone and without Z.

Where the inner map is one step on B and the others on a Gram matrix, Z = WX with X that first step
and W of size ℓ×ℓ (:func:`polarstep.polar.small.factored`). Z itself is ℓ×n and would cost a product
to make, and a pass to make a start of. So it is not made: what was X₂ and W₂ at the last step starts
this one, as Ωᵀ = V·S with S = X₂ + ε·N and V = W₂². For wide M, with ℓ rows all of Y, Q, B and X:

    Y = V·(S·Mᵀ)
    Q = W₁X₁                           the polar map of Y by four polynomials
    B = Q·M
    Z = W₂X₂                           the inner map of B
    T = QᵀZ = (W₂·Q)ᵀ·X₂
    S ← X₂ + ε·N,  V ← W₂²

V is what makes four polynomials enough where a sketch of unknown condition takes six. If M stands
still, S·Mᵀ = X₂MᵀQᵀQ = X₂BᵀQ, in the range of Q, has the singular values φ₁(σ)σ for those σ of B,
and W₂² divides them by about φ₁(σ)²: what is left of their spread is that of σ/φ₁(σ), the first
step's alone. The noise is lifted in the same measure, which is why more than a tenth of it would
not do (:data:`MOST_NOISE`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.polar import gram, small
from polarstep.polar.base import Factors
from polarstep.polar.newton_schulz import NewtonSchulz
from polarstep.polar.orthonormal import whitened_polynomials
from polarstep.sketch import Warm
from polarstep.sketch.warm import Start

if TYPE_CHECKING:
    from polarstep.polar.low_rank import LowRank

__all__ = ["WarmStep", "applies", "basis", "inner", "sketch", "start_from", "warm_step"]

# With twice as much, Δγ on recorded momentum went from 0.014 to 0.020 (emulated).
MOST_NOISE = 0.1


@dataclass(frozen=True)
class WarmStep:
    """``T = leftᵀ·X`` for wide M, and what it was made of."""

    Q: Tensor  # (batch, ℓ, m)
    B: Tensor  # (batch, ℓ, n)
    W: Tensor  # (batch, ℓ, ℓ)
    X: Tensor  # (batch, ℓ, n)
    left: Tensor  # (batch, ℓ, m), WQ
    start: Start  # for the next step
    width: int  # ℓ, without the zero rows that the others may have

    @property
    def basis(self) -> Tensor:
        """Q as a basis is everywhere else, with columns."""
        return self.Q.mT[..., : self.width]

    @property
    def two_factors(self) -> tuple[Tensor, Tensor]:
        """L and R with T = LR."""
        return self.left.mT, self.X

    @property
    def factors(self) -> Factors:
        """Q, B and Z, which is made here."""
        Z = gram.applied(self.W, self.X, self.Q.dtype)
        B, Z = self.B[:, : self.width], Z[:, : self.width]
        return Factors(self.basis, B, Z, orthonormal=False, start=self.start)


def applies(polar: LowRank, m: int, n: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``polar`` can go this way on m×n matrices whose products are in ``dtype``."""
    if not isinstance(polar.sketch, Warm) or polar.sketch.noise > MOST_NOISE:
        return False
    if not kernels.available(device) or polar.orth not in ("auto", "products"):
        return False
    if dtype != (torch.float32 if kernels.interpreted() else torch.bfloat16):
        return False
    inner, width = polar.inner, polar.aligned_width(dtype)
    if not isinstance(inner, NewtonSchulz) or not inner.is_usual:
        return False
    first, rest = inner.polynomials[:1], inner.polynomials[1:]
    return (
        len(rest) > 0
        and len(first[0]) <= 3
        and gram.fits_float16(inner.polynomials)
        and not gram.restarts(rest, gram.rounding(torch.float16))
        and width < small.FEWER_ROWS_THAN
        and small.GRAM_FROM * width <= min(m, n)
    )


def start_from(
    polar: LowRank, numbers: Tensor, known: Start | None, *, like: Tensor, whitened: bool
) -> Start:
    """Ωᵀ of ``known``, or a Gaussian one, for the matrices ``like``; with V = I if ``whitened``."""
    if known is None:
        S = numbers.mT.to(like.dtype).repeat(len(like), 1, 1)
    else:
        S = known.omega_transposed(like.dtype).clone()
    if not whitened:
        return Start(S)
    width = polar.aligned_width(like.dtype)
    V = torch.eye(width, dtype=like.dtype, device=like.device)
    return Start(S, V.repeat(len(like), 1, 1))


def warm_step(
    polar: LowRank,
    A: Tensor,
    numbers: Tensor,
    start: Start | None,
    into: Start | None = None,
    finite: Tensor | None = None,
) -> WarmStep:
    """A step for wide ``A`` from ``start``, if there is one; the next start goes to ``into``, if given.

    Where ``finite`` is zero, that stays as it was. ``start`` and ``into`` may be the same.
    """
    if into is None:
        width = polar.aligned_width(A.dtype)
        S = A.new_empty(len(A), polar.width, A.shape[-1])
        into = Start(S, A.new_empty(len(A), width, width))
    if start is None or start.V is None:
        Q = polar.basis(A, numbers, start).mT.contiguous()
        Q_in_halves = Q.to(small.in_halves(Q.dtype))
    else:
        Q, Q_in_halves = basis(sketch(polar, A, start))
    B = Q @ A
    W, X = inner(polar, B, numbers, into, finite)
    return WarmStep(Q, B, W, X, W @ Q_in_halves, into, polar.width)


def sketch(polar: LowRank, A: Tensor, start: Start) -> Tensor:
    """``Y = V·(S·Mᵀ)`` for wide ``A`` = M."""
    assert start.V is not None
    return start.V @ polar.aligned_product(start.S, A.mT)


def basis(Y: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal rows Q of a whitened ``Y``, in its precision and in that of W₂.

    W₂Q as (W₂W₁)X₁ would be a launch less, but W₂W₁ is large where both are, up to hundreds, and a
    float16 of that size rounds by tenths: ν was 0.06 on recorded momentum.
    """
    from polarstep.kernels.blend import product_and_blend

    W, X = small.factored(Y, whitened_polynomials())
    Q = torch.empty_like(Y)
    return Q, product_and_blend(W, X, Q, X.dtype)


def inner(
    polar: LowRank, B: Tensor, numbers: Tensor, into: Start, finite: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """W and X with Z = WX, and the start of the next step from them."""
    from polarstep.kernels.blend import product_and_blend
    from polarstep.kernels.product import product

    assert isinstance(polar.sketch, Warm)
    assert isinstance(polar.inner, NewtonSchulz)
    assert into.V is not None
    times = partial(
        product_and_blend,
        start=into.S,
        out_dtype=small.in_halves(B.dtype),
        numbers=numbers,
        scale=polar.sketch.scale(len(numbers)),
        finite=finite,
    )
    W, X = small.factored(B, polar.inner.polynomials, times)
    if finite is None:
        product(W, W, symmetric=True, out=into.V)
    else:
        V = product(W, W, symmetric=True, out_dtype=into.V.dtype)
        into.V.copy_(torch.where(finite[:, None, None] != 0, V, into.V))
    return W, X
