"""A sketch that starts from the last step's factor instead of fresh random columns.

``Ω = Z₋ᵀ + ε·N`` with Z₋ the factor of the last step's T₋ = Q₋Z₋. Momentum moves slowly, so Z₋ᵀ
already spans most of the directions sought. One product then does the work of a power iteration,
because the last step has done the other product.

**Without Z, on a GPU.** Where the inner map runs its first step on B and all others on a Gram
matrix, Z = WX with X the result of the first step and W of size ℓ×ℓ. Forming Z, which is ℓ×n, would
cost a product, and adding noise to it a pass over memory. So Z is never formed. This step starts
from X₂ and W₂ of the last step, as Ωᵀ = V·S with S = X₂ + ε·N and V = W₂². For wide M, where Y, Q,
B and X have ℓ rows::

    Y = V·(S·Mᵀ)
    Q = W₁X₁                           the polar map of Y by four polynomials
    B = Q·M
    Z = W₂X₂                           the inner map of B
    T = QᵀZ = (W₂·Q)ᵀ·X₂
    S ← X₂ + ε·N,  V ← W₂²

Thanks to V four polynomials are enough, where a sketch of unknown condition takes six. If M stands
still, S·Mᵀ = X₂MᵀQᵀQ = X₂BᵀQ, in the range of Q, has the singular values φ₁(σ)σ for the singular
values σ of B. W₂² divides them by about φ₁(σ)². What is left spreads as σ/φ₁(σ), which depends on the
first step alone. V amplifies the noise by as much, so the noise must not exceed a tenth
(:data:`MOST_NOISE`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polarstep import products
from polarstep.checked_values import check_positive
from polarstep.polar import gram
from polarstep.polar.base import Carry, Draw, PolarMap
from polarstep.polar.finders.base import Basis, Finder
from polarstep.polar.finders.fresh import Fresh
from polarstep.polar.orthonormal import Method, orthonormalize, whitened_polynomials
from polarstep.polar.result import Lift
from polarstep.polar.small import GRAM_FROM
from polarstep.sketch import Gaussian

__all__ = ["Warm"]

# With twice this noise, Δγ on recorded momentum rose from 0.014 to 0.020 (emulated).
MOST_NOISE = 0.1


@dataclass(frozen=True)
class Warm(Finder):
    """``Ω = Z₋ᵀ + noise·N(0, 1)^{n×ℓ}/√n`` with Z₋ the factor of the last step's T₋ = Q₋Z₋.

    The noise ensures that no direction is missed for ever: a matrix that was zero, as
    zero-initialized projections are at step one, starts from noise alone. Its numbers are the same
    at every step.

    The optimizer keeps Ωᵀ (ℓ×n per matrix), or on a GPU two factors of it, in its state and its
    checkpoints. At the first step and in a plain call of the map, Ω is Gaussian and the map's power
    iterations run.

    Args:
        noise: size of the random part; the spectral norm of Z₋ is at most one.
    """

    noise: float = 0.1
    power: float = field(default=1, repr=False)  # in a LowRank its power replaces this

    def __post_init__(self) -> None:
        check_positive(
            "noise",
            self.noise,
            "0.1 is the default, and without noise a direction that was missed once is missed for ever",
        )

    def with_options(self, power: float, orth: Method) -> Warm:
        """This finder with LowRank's power and orth for the first step."""
        if power != int(power):
            raise ValueError(
                f"power={power!r} with Warm(): expected a whole number, 0, 1, 2, …; its start "
                "lies on the long side of the matrix, where half powers do not begin"
            )
        self._refuse_own(power=power, orth=orth)
        return replace(self, power=power, orth=orth)

    @property
    def carries(self) -> tuple[str, ...]:
        """The names of S and V with Ωᵀ = V·S; without V, S is Ωᵀ itself."""
        return ("basis", "whitening")

    def resumes(self, carry: Carry, m: int, n: int, width: int) -> bool:
        """Whether ``carry`` has an Ωᵀ of this width, which differs if the rank was changed."""
        return "basis" in carry and carry["basis"].shape[1:] == (width, n)

    def numbers_at(self, step: int, *, resumed: bool) -> tuple[int, ...] | None:
        """Nothing: the numbers are the same at every step.

        Any numbers in general position ensure that no direction is missed. Drawing them once saves
        every later step a launch outside its graph.
        """
        return ()

    def basis(self, A: Tensor, width: int, carry: Carry, draw: Draw) -> Basis:
        """A basis of MΩ with the last step's Ω; a fresh basis at the first step."""
        if not self.resumes(carry, A.shape[-2], A.shape[-1], width):
            return self.fresh_sketch.basis(A, width, carry, draw)
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
        """The inner map of B, and the next step's start: Z + ε·N, or two factors of its Ωᵀ."""
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
            return Lift(X, W, lambda: (W @ Qt).mT), start
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
        """Whether the start is stored as two factors, so that Z is never formed."""
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
            and padded <= products.of(device).most_factored
            and GRAM_FROM * padded <= min(m, n)
        )

    def _can_whiten(self, dtype: torch.dtype, device: torch.device) -> bool:
        by_products = self.orth in ("auto", "products")
        return self.noise <= MOST_NOISE and by_products and products.of(device).whitens(dtype)

    @property
    def fresh_sketch(self) -> Fresh:
        """The finder of the first step."""
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
        return self.fresh_sketch.draw(m, n, width, generator, dtype, out)

    def flops(self, m: int, n: int, width: int) -> int:
        """One product and one basis; the power iterations of the first step are not counted."""
        return replace(self.fresh_sketch, power=0).flops(m, n, width)

    def describe(self, m: int, n: int, inner: PolarMap, width: int, device: torch.device) -> str:
        """The power and, where Z is never formed, "whitened"."""
        dtype = products.of(device).dtype(torch.float32)
        without_Z = self.leaves_factors(inner, m, n, width, dtype, device)
        return f"h={self.power:g}, Warm" + (", whitened" if without_Z else "")


def _has_whitening(carry: Carry, padded: int) -> bool:
    return "whitening" in carry and carry["whitening"].shape[1:] == (padded, padded)


def _omega_transposed(carry: Carry) -> Tensor:
    """Ωᵀ = V·S (batch, ℓ, n), or S itself where the carry has no V."""
    S = carry["basis"]
    if "whitening" not in carry:
        return S
    width = S.shape[-2]
    return carry["whitening"][..., :width, :width] @ S


def _room(carry: Carry, B: Tensor, width: int, draw: Draw) -> Carry:
    """The tensors that the next start is written to: those of ``carry``, or new ones.

    New tensors are filled so that a matrix that is skipped at this step can start from them.
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
