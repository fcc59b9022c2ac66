"""Sketches: a random matrix Ω with ℓ columns, and the product MΩ. Gaussian (Algorithm 1), Kaczmarz (2).

A whole batch of equally shaped matrices shares one Ω. The paper's guarantees are about each matrix
by itself, so sharing does not weaken them. It saves random numbers, and makes
``sketch(batch)[i] = sketch(batch[i])``: the sketch of a parameter does not depend on which other
parameters happen to have its shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep import flops, rng
from polarstep.checked_values import check_bool
from polarstep.numerics import fitting, frexp, unit_scaled, widest

__all__ = ["Gaussian", "Kaczmarz", "Sketch", "default_generator"]


class Sketch(ABC):
    """How the ℓ test vectors are chosen. Subclasses are frozen dataclasses.

    Drawing random numbers and using them are separate: :meth:`draw` needs a generator;
    :meth:`omega` and :meth:`times` are functions of the numbers it returned.
    """

    @property
    def is_dense(self) -> bool:
        """Whether Ω is a dense matrix that a batch shares.

        A map then multiplies by Ω itself, in the precision and memory layout of its choice, and
        does not call :meth:`times`.
        """
        return False

    @abstractmethod
    def draw(
        self,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The random numbers of a sketch with ℓ = ``width`` columns, on the generator's device.

        They are written to ``out`` if it is given, over the numbers of an earlier call.
        """

    @abstractmethod
    def omega(self, M: Tensor, numbers: Tensor) -> Tensor:
        """Ω itself, of shape ``(n, ℓ)`` or ``(..., n, ℓ)``, for ``M`` of shape ``(..., m, n)``."""

    @abstractmethod
    def times(self, M: Tensor, numbers: Tensor) -> Tensor:
        """MΩ, of shape ``(..., m, ℓ)``, computed in the cheapest way."""

    @abstractmethod
    def flops(self, m: int, n: int, width: int) -> int:
        """Cost of :meth:`times` on one m×n matrix in the paper's convention."""

    def matrix(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw Ω for ``M``."""
        return self.omega(M, self._numbers(M, width, generator))

    def __call__(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw Ω and return MΩ."""
        return self.times(M, self._numbers(M, width, generator))

    def _numbers(self, M: Tensor, width: int, generator: torch.Generator | None) -> Tensor:
        generator = default_generator(generator, M.device)
        dtype = torch.promote_types(M.dtype, torch.float32)
        return fitting(self.draw(M.shape[-1], width, generator, dtype), M.device)


def default_generator(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """The given generator or, if it is ``None``, a new generator with a fixed seed.

    The global generator is never used. Without a generator two calls give the same sketch.
    """
    if generator is None:
        return rng.generator("polarstep", device=device)
    if not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator={generator!r}: expected a torch.Generator, as torch.Generator().manual_seed(0)"
        )
    return generator


@dataclass(frozen=True)
class Gaussian(Sketch):
    """``Ω ~ N(0, 1)^{n×ℓ}``, independent entries (Algorithm 1, step 1).

    Rotations do not change the distribution of Ω, so the quality of the sketch depends on the
    singular values of M alone. Proposition 2 uses this.
    """

    @property
    def is_dense(self) -> bool:
        """True: Ω is dense."""
        return True

    def draw(
        self,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """Ω, of shape (n, ℓ), shared by a batch.

        Each column is contiguous, like the columns of the factor Zᵀ that a warm start adds to Ω.
        """
        if out is None:
            out = torch.empty(width, n, device=generator.device, dtype=dtype).mT
        out.mT.normal_(generator=generator)
        return out

    def omega(self, M: Tensor, numbers: Tensor) -> Tensor:
        """Ω is the drawn numbers themselves."""
        return numbers.to(M.dtype)

    def times(self, M: Tensor, numbers: Tensor) -> Tensor:
        """``MΩ``, one product of size m·n·ℓ."""
        return M @ numbers.to(M.dtype)

    def flops(self, m: int, n: int, width: int) -> int:
        """Two FLOPs per multiply-add; drawing Ω is not counted."""
        return flops.gaussian_sketch(m, n, width)


@dataclass(frozen=True)
class Kaczmarz(Sketch):
    """ℓ columns drawn with replacement, column j with probability ``π_j = ‖M_:,j‖²/‖M‖²_F``.

    ``Ω_:,k = e_{i_k}/√(ℓ π_{i_k})`` (Algorithm 2, steps 1–3), so that E[ΩΩᵀ] = I. ``MΩ`` is a
    gather and a rescaling. For a zero matrix Ω = 0, where the formula says 0/0.

    Columns repeat, more often the more their lengths differ. The default is the paper's sketch: a column
    that was drawn c times is taken once, with √c times its scale, and its other draws become zero
    columns at the end. This changes neither ΩΩᵀ nor the range of ``MΩ``, and T depends on nothing else.
    With c equal columns an orthonormalization would instead make a basis of their rounding errors. That
    is what the authors' code does, whose basis so has ℓ columns, some of them noise. It also samples the
    columns of tall matrices, where :class:`polarstep.LowRank` transposes them first.

    Args:
        fill: put the longest columns that were not drawn in the place of repeated draws. The basis then
            has ℓ directions of M, as a Gaussian sketch has, and captures as much. E[ΩΩᵀ] is no longer I.
    """

    fill: bool = False

    def __post_init__(self) -> None:
        check_bool("fill", self.fill, "False is the paper's sketch")

    def draw(
        self,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """ℓ uniform variates, shared by a batch.

        Always float64, whatever ``dtype``: with thousands of columns, float32 would misplace columns
        of small probability. A device without float64 takes float32 all the same.
        """
        if out is None:
            out = torch.empty(width, device=generator.device, dtype=widest(generator.device))
        return out.uniform_(generator=generator)

    def columns(self, M: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Indices ``i_k`` and scales, √c/√(ℓ π_{i_k}) or zero, both of shape (..., ℓ).

        Each matrix of a batch maps the same uniform variates to columns by its own distribution.
        """
        weight = _weights(M)
        cumulative = weight.cumsum(dim=-1)
        total = cumulative[..., -1:]
        levels = numbers.sort().values * total  # sorted, so that repeated columns are neighbours
        indices = torch.searchsorted(cumulative, levels, right=True)
        indices = indices.clamp_max(M.shape[-1] - 1)
        first = torch.searchsorted(indices, indices)
        count = torch.searchsorted(indices, indices, right=True) - first
        repeats = first != torch.arange(len(numbers), device=M.device)
        picked = weight.gather(-1, indices)
        drawn = ~repeats & (picked > 0)
        scales = torch.where(drawn, count * total / (len(numbers) * picked), 0.0).sqrt()
        order = torch.argsort(repeats, dim=-1, stable=True)
        indices, scales = indices.gather(-1, order), scales.gather(-1, order)
        if self.fill:
            indices, scales = self._filled(weight, indices, scales)
        return indices, scales.to(M.dtype)

    def _filled(self, weight: Tensor, indices: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The columns that were drawn, then the longest others, each with the scale 1/√(ℓπ)."""
        width = indices.shape[-1]
        drawn = torch.zeros_like(weight).scatter_reduce_(-1, indices, scales, "amax") > 0
        order = (weight + 2 * drawn).topk(min(width, weight.shape[-1])).indices  # weights are ≤ 1
        picked = weight.gather(-1, order)
        scale = torch.where(picked > 0, weight.sum(-1, keepdim=True) / (width * picked), 0.0)
        missing = (0, width - order.shape[-1])
        pad = torch.nn.functional.pad
        return pad(order, missing), pad(scale.sqrt(), missing)

    def omega(self, M: Tensor, numbers: Tensor) -> Tensor:
        """Ω written out, of shape (..., n, ℓ)."""
        indices, scales = self.columns(M, numbers)
        Omega = M.new_zeros(*M.shape[:-2], M.shape[-1], len(numbers))
        return Omega.scatter_(-2, indices.unsqueeze(-2), scales.unsqueeze(-2))

    def times(self, M: Tensor, numbers: Tensor) -> Tensor:
        """``MΩ`` as a gather of columns."""
        indices, scales = self.columns(M, numbers)
        rows = indices.unsqueeze(-2).expand(*M.shape[:-1], len(numbers))
        return M.gather(-1, rows) * scales.unsqueeze(-2)

    def flops(self, m: int, n: int, width: int) -> int:
        """Squared column norms (2mn) and the rescaling (mℓ); a gather costs no FLOPs."""
        return flops.kaczmarz_sketch(m, n, width)


def _weights(M: Tensor) -> Tensor:
    """Squared norms of the columns of ``M`` relative to the largest, rounded to 40 bits.

    The last bits of a norm depend on the order of its additions, which depends on the memory layout of
    M. After rounding, equal columns have equal weights in every layout, so that the same columns are
    drawn. Relative to the largest, no square leaves the range of float64.
    """
    norm = torch.linalg.vector_norm(_in_range_of_squares(M), dim=-2, dtype=widest(M.device))
    largest = norm.amax(-1, keepdim=True)
    weight = (norm / torch.where(largest > 0, largest, 1)).square()
    mantissa, exponent = frexp(weight)
    return torch.ldexp((mantissa * 2**40).round() / 2**40, exponent)


def _in_range_of_squares(M: Tensor) -> Tensor:
    """``M`` itself, or scaled by a power of two where squares in the widest precision may overflow."""
    return unit_scaled(M)[0] if M.dtype == widest(M.device) else M
