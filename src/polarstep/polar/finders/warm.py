"""A start from the last step's factor in place of fresh random columns.

``Ω = Z₋ᵀ + ε·N`` with Z₋ the factor of the last step's T₋ = Q₋Z₋. Momentum moves slowly, so that Z₋ᵀ
already spans most of what is to be found: one product does the work of a power iteration, which came for
nothing with the last step.

**Without Z, on a GPU.** Where the inner map is one step on B and the others on a Gram matrix, Z = WX
with X that first step and W of size ℓ×ℓ. Z itself is ℓ×n and would cost a product to make, and a
pass to make a start of. So it is not made: what was X₂ and W₂ at the last step starts this one, as
Ωᵀ = V·S with S = X₂ + ε·N and V = W₂². For wide M, with ℓ rows all of Y, Q, B and X::

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

import math
from dataclasses import dataclass, field, replace
from numbers import Real

import torch
from torch import Tensor

from polarstep import products
from polarstep.polar import gram
from polarstep.polar.base import Carry, Draw, Lift, PolarMap
from polarstep.polar.finders.base import Basis, Finder
from polarstep.polar.finders.fresh import Fresh
from polarstep.polar.orthonormal import Method, orthonormalize, whitened_polynomials
from polarstep.polar.small import GRAM_FROM
from polarstep.sketch import Gaussian

__all__ = ["Warm"]

# With twice as much, Δγ on recorded momentum went from 0.014 to 0.020 (emulated).
MOST_NOISE = 0.1


@dataclass(frozen=True)
class Warm(Finder):
    """``Ω = Z₋ᵀ + noise·N(0, 1)^{n×ℓ}/√n`` with Z₋ the factor of the last step's T₋ = Q₋Z₋.

    The noise is there so that no direction is missed for ever: a matrix that was zero, as
    zero-initialized projections are at step one, starts from noise alone. Its numbers are the same at
    every step.

    The optimizer keeps Ωᵀ (ℓ×n per matrix) in its state and its checkpoints; on a GPU it may keep two
    factors of it. Without one, at the first step or in a plain call of the map, Ω is Gaussian and the
    map's power iterations run.

    Args:
        noise: size of the random part; the spectral norm of Z₋ is at most one.
    """

    noise: float = 0.1
    power: float = field(default=1, repr=False)  # of the cold start; LowRank's

    def __post_init__(self) -> None:
        if not isinstance(self.noise, Real):
            raise TypeError(f"noise={self.noise!r}: expected a number > 0, as 0.1")
        if not 0 < self.noise < math.inf:
            raise ValueError(
                f"noise={self.noise}: expected a number > 0, as 0.1; without noise a direction "
                "that was missed once is missed for ever"
            )

    def with_options(self, power: float, orth: Method, keep: int) -> Warm:
        """With LowRank's power for the cold start; there is nothing to keep."""
        if power != int(power):
            raise ValueError(
                f"power={power!r} with Warm(): expected a whole number, 0, 1, 2, …; its start "
                "lies on the long side of the matrix, where half powers do not begin"
            )
        if keep > 1:
            raise ValueError(
                f"keep={keep} with Warm(): expected 1; a warm sketch goes on from the last step's "
                "factor at every step. Keep the basis of a Gaussian() one"
            )
        return replace(self, power=power, orth=orth)

    @property
    def carries(self) -> tuple[str, ...]:
        """S and V with Ωᵀ = V·S, or S alone where it is Ωᵀ itself."""
        return ("basis", "whitening")

    def resumes(self, carry: Carry, m: int, n: int, width: int) -> bool:
        """From an Ωᵀ of this width; of another one, somebody has changed the rank since."""
        return "basis" in carry and carry["basis"].shape[1:] == (width, n)

    def numbers_at(self, step: int, *, resumed: bool) -> tuple[int, ...] | None:
        """The same at every step.

        They are there so that no direction is left out, which any numbers in general position see to,
        and drawing them once leaves a step without a launch outside its graph.
        """
        return ()

    def basis(self, A: Tensor, width: int, carry: Carry, draw: Draw) -> Basis:
        """Of M Ω with the last step's Ω; a fresh one at the first step."""
        if not self.resumes(carry, A.shape[-2], A.shape[-1], width):
            return self._cold.basis(A, width, carry, draw)
        ops, padded = products.of(A.device), self.padded(width, A.dtype, A.device)
        carry = carry.to(A.dtype)
        if self._can_whiten(A.dtype, A.device) and _has_whitening(carry, padded):
            Y = carry["whitening"] @ ops.times(A, carry["basis"].mT, padded).mT
            Q, halves = ops.whitened_basis(Y, whitened_polynomials())
            return Basis(Q.mT, halves)
        Y = ops.times(A, _omega_transposed(carry).mT, padded)
        return Basis(orthonormalize(ops.workable(Y), self.orth).to(A.dtype))

    def lift(
        self, inner: PolarMap, B: Tensor, basis: Basis, width: int, carry: Carry, draw: Draw
    ) -> tuple[Lift, Carry]:
        """The inner map of B, and the start of the next step: Z + ε·N, or two factors of it."""
        assert draw.numbers is not None
        scale = self.noise / math.sqrt(len(draw.numbers))
        m, n = basis.Q.shape[-2], B.shape[-1]
        if self.leaves_factors(inner, m, n, width, B.dtype, B.device):
            polynomials = inner.polynomials_to_fuse
            assert polynomials is not None
            start = _room(carry, B, width, draw)
            S, V = start["basis"], start["whitening"]
            W, X = products.of(B.device).lift_and_leave(
                B, polynomials, draw.numbers, scale, S, V, draw.finite
            )
            Qt = basis.Q.mT.to(W.dtype) if basis.halves is None else basis.halves
            return Lift(X, W, (W @ Qt).mT), start
        lift = inner.lift(B)
        Z = lift.X if lift.W is None else torch.bmm(lift.W, lift.X)
        noise = draw.numbers.mT.to(Z.dtype)
        return Lift(Z), Carry(basis=torch.add(Z[:, :width], noise, alpha=scale))

    def leaves_factors(
        self,
        inner: PolarMap,
        m: int,
        n: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> bool:
        """Whether Z need not be made for m×n matrices whose products are in ``dtype``."""
        polynomials = inner.polynomials_to_fuse
        if polynomials is None or not self._can_whiten(dtype, device):
            return False
        first, rest = polynomials[:1], polynomials[1:]
        padded = self.padded(width, dtype, device)
        return (
            len(rest) > 0
            and len(first[0]) <= 3
            and gram.fits_float16(polynomials)
            and not gram.restarts(rest, gram.rounding(torch.float16))
            and padded < products.of(device).symmetric_from
            and GRAM_FROM * padded <= min(m, n)
        )

    def _can_whiten(self, dtype: torch.dtype, device: torch.device) -> bool:
        by_products = self.orth in ("auto", "products")
        return self.noise <= MOST_NOISE and by_products and products.of(device).whitens(dtype)

    @property
    def _cold(self) -> Fresh:
        """The first step."""
        return Fresh(Gaussian(), self.power, orth=self.orth)

    def draw(
        self,
        m: int,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        """Gaussian numbers, of shape (n, ℓ)."""
        return self._cold.draw(m, n, width, generator, dtype, out)

    def flops(self, m: int, n: int, width: int) -> int:
        """One product and one basis; the power iterations of the first step are not counted."""
        return replace(self._cold, power=0).flops(m, n, width)

    def describe(self, m: int, n: int, inner: PolarMap, width: int, device: torch.device) -> str:
        """Whether Z is made."""
        dtype = products.of(device).dtype(torch.float32)
        without_Z = self.leaves_factors(inner, m, n, width, dtype, device)
        return f"h={self.power:g}, Warm" + (", whitened" if without_Z else "")


def _has_whitening(carry: Carry, padded: int) -> bool:
    return "whitening" in carry and carry["whitening"].shape[1:] == (padded, padded)


def _omega_transposed(carry: Carry) -> Tensor:
    """Ωᵀ = V·S (batch, ℓ, n), or S itself where there is no V."""
    S = carry["basis"]
    if "whitening" not in carry:
        return S
    width = S.shape[-2]
    return carry["whitening"][..., :width, :width] @ S


def _room(carry: Carry, B: Tensor, width: int, draw: Draw) -> Carry:
    """Where the next start goes: in place of the last one, or to new memory.

    New memory begins as what a matrix that is skipped at this step shall start from.
    """
    batch, padded, n = B.shape
    S, V = carry.get("basis"), carry.get("whitening")
    if S is not None and (S.dtype != B.dtype or S.shape != (batch, width, n)):
        S = None
    if S is not None and _has_whitening(carry, padded) and V is not None and V.dtype == B.dtype:
        return Carry(basis=S, whitening=V)
    assert draw.numbers is not None
    if draw.finite is None:
        S = B.new_empty(batch, width, n)
        return Carry(basis=S, whitening=B.new_empty(batch, padded, padded))
    if carry:
        S = _omega_transposed(carry.to(B.dtype)).clone()
    else:
        S = draw.numbers.mT.to(B.dtype).repeat(batch, 1, 1)
    V = torch.eye(padded, dtype=B.dtype, device=B.device).repeat(batch, 1, 1)
    return Carry(basis=S, whitening=V)
