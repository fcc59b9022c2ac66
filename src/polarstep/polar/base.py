"""The contract of a polar map.

A polar map T takes matrices ``M`` of shape ``(..., m, n)`` and returns an approximation of the
polar factor ``U Vᵀ`` of each, with the same shape, dtype and device. Every map keeps these promises:

* the input is not changed, and nothing global (no random generator either) is read or advanced;
* ``T(0) = 0``, also for a zero matrix beside nonzero ones in a batch;
* ``T(cM) = T(M)`` for ``c > 0``, from 1e-30 to 1e30;
* ``T(Mᵀ) = T(M)ᵀ``;
* ``T(batch)[i] = T(batch[i])``, for the random maps with the same generator state.

A solver is a frozen dataclass: comparable, hashable, printable, picklable, valid in a param group.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from polarstep.matrix import product_like, unit_scaled, workable
from polarstep.sharded import is_sharded
from polarstep.sketch.warm import Start

__all__ = ["Factors", "Kept", "PolarMap", "Sketched", "Weighted", "lifted", "oriented"]


@dataclass(frozen=True)
class Kept:
    """The basis of an earlier step, for this one to work in as it is."""

    Qt: Tensor  # (batch, ℓ, m) for wide M: Qᵀ, so that a basis vector lies in one piece

    def split(self, counts: list[int]) -> list[Kept]:
        """The bases of ``counts`` matrices each."""
        return [Kept(part) for part in torch.split(self.Qt, counts)]


@dataclass(frozen=True)
class Factors:
    """T = QZ: what a sketched polar map knows of wide matrices M (tall ones are transposed first).

    B = QᵀM says how much of M the basis captured, at no cost beyond the map's own.
    """

    Q: Tensor  # (batch, m, ℓ), ‖Q‖_op ≤ 1, in the precision of Z
    B: Tensor  # (batch, ℓ, n), QᵀM on M's own scale
    Z: Tensor  # (batch, ℓ, n), the polar factor of B, in the precision the inner map ended in
    orthonormal: bool  # whether QᵀQ = I up to rounding; a null direction may be missing otherwise
    start: Start | None = None  # a warm sketch's, for the next step

    @property
    def basis(self) -> Tensor:
        """Q."""
        return self.Q

    @property
    def two_factors(self) -> tuple[Tensor, Tensor]:
        """L and R with T = LR."""
        return self.Q, self.Z

    @property
    def factors(self) -> Factors:
        """These; other ways to make T have others inside, and make these when they are asked for."""
        return self


@dataclass(frozen=True)
class Weighted:
    """T = (QW)S, where the polar factor of B is Z = WS and S is B times a power of two.

    Z is not made for it: QW has the short side of M, where Z has the long one.
    """

    basis: Tensor  # (batch, m, ℓ), the Q of Factors
    B: Tensor  # (batch, ℓ, n)
    W: Tensor  # (batch, ℓ, ℓ)
    S: Tensor  # (batch, ℓ, n), B itself but for extreme scales
    orthonormal: bool
    start: None = None

    @cached_property
    def two_factors(self) -> tuple[Tensor, Tensor]:
        """L and R with T = LR."""
        return torch.bmm(self.basis, self.W), self.S

    @cached_property
    def factors(self) -> Factors:
        """Q, B and Z, which is made here."""
        return Factors(self.basis, self.B, torch.bmm(self.W, self.S), self.orthonormal)


class Sketched(Protocol):
    """T of wide matrices before it is multiplied out, and what it was made of."""

    @property
    def start(self) -> Start | None:
        """What the next step starts from, of a warm sketch."""

    @property
    def basis(self) -> Tensor:
        """Q, of shape (batch, m, ℓ)."""

    @property
    def two_factors(self) -> tuple[Tensor, Tensor]:
        """L and R with T = LR."""

    @property
    def factors(self) -> Factors:
        """Q, B and Z."""


def oriented(step: Sketched, m: int, n: int) -> tuple[Tensor, Tensor]:
    """L and R with T = LR for the m×n matrices that ``step`` was made of, tall ones too."""
    L, R = step.two_factors
    return (L, R) if m <= n else (R.mT, L.mT)


def lifted(step: Sketched, M: Tensor) -> Tensor:
    """T of the matrices ``M`` that ``step`` was made of, in their shape, precision and memory layout."""
    m, n = M.shape[-2:]
    T = product_like(M.reshape(-1, m, n), *oriented(step, m, n))
    return T.to(M.dtype).reshape(M.shape)


class PolarMap(ABC):
    """An approximation of the polar factor; see the module's docstring for the contract.

    A subclass implements :meth:`_polar` for a batch of wide matrices and :meth:`flops`.
    """

    @property
    def is_random(self) -> bool:
        """Whether the map draws from the generator it is given."""
        return False

    def __call__(self, M: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return T(M) for ``M`` of shape ``(..., m, n)``."""
        _check(M)
        X = unit_scaled(M)[0] if M.is_cuda and M.numel() > 0 and self.ignores_scale else M
        return self.as_computed(X, generator=generator).to(M.dtype)

    def as_computed(self, M: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """T(M) in the precision the map ended in; to round what is read once would be a pass more.

        On a GPU small matrices come out as zero where their entries are beyond 1e-18 or 1e18.
        """
        _check(M)
        if M.numel() == 0:
            return M.clone()
        m, n = M.shape[-2:]
        X = workable(M.reshape(-1, m, n))
        T = self._polar(X, generator) if m <= n else self._polar(X.mT, generator).mT
        return T.reshape(M.shape)

    @property
    def rounds_input(self) -> bool:
        """Whether M is rounded to the device's product precision anyway, so that a step may do it."""
        return False

    @property
    def ignores_scale(self) -> bool:
        """Whether T(cM) = T(M), as it is but for a δ that somebody fixed."""
        return True

    @property
    def is_warm(self) -> bool:
        """Whether a step can start from the last one's factor."""
        return False

    @property
    def keeps_basis(self) -> bool:
        """Whether a step can work in an earlier one's basis."""
        return False

    def factored(
        self,
        M: Tensor,
        *,
        generator: torch.Generator | None = None,
        start: Start | Kept | None = None,
        numbers: Tensor | None = None,
    ) -> tuple[Tensor, Factors | None]:
        """T(M), and the factors it was made of where the map works in a subspace.

        ``start`` is what the last step's factors have as theirs, of a :class:`~polarstep.Warm` sketch,
        or a basis that is kept. ``numbers`` are those that a random map would draw, where somebody has
        drawn them before.
        """
        return self(M, generator=generator), None

    def sketched(
        self,
        M: Tensor,
        *,
        generator: torch.Generator | None = None,
        start: Start | Kept | None = None,
        numbers: Tensor | None = None,
    ) -> Sketched | None:
        """The same before T is multiplied out; ``None`` where the map works in full space."""
        return None

    @abstractmethod
    def _polar(self, X: Tensor, generator: torch.Generator | None) -> Tensor:
        """T of ``X``: shape ``(batch, m, n)`` with ``m ≤ n``, not empty.

        float32, float64, or bfloat16 on a device that multiplies in it.
        """

    @abstractmethod
    def flops(self, m: int, n: int) -> int:
        """Cost of one call on an m×n matrix in the paper's convention (:mod:`polarstep.flops`)."""

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """How an m×n matrix on ``device`` will be treated, in a few words, for the routing table."""
        return repr(self)


def _check(M: Tensor) -> None:
    if not isinstance(M, Tensor):
        raise TypeError(f"expected a tensor of shape (..., m, n), got {type(M).__name__}")
    if M.ndim < 2:
        raise ValueError(
            f"expected a tensor of shape (..., m, n), got shape {tuple(M.shape)}; "
            "a vector has no polar factor: view it as a 1×n matrix with M[None]"
        )
    if not M.is_floating_point():
        raise TypeError(f"expected a real floating-point tensor, got {M.dtype}; cast it first")
    if M.layout != torch.strided:
        raise TypeError(f"expected a dense tensor, got layout {M.layout}; call M.to_dense() first")
    if is_sharded(M):
        raise TypeError(
            "expected a whole matrix, got a DTensor; call M.full_tensor() first "
            "(polarstep.Muon does so by itself)"
        )
