"""The Kaczmarz-style sketch of Algorithm 2: sampled columns instead of a product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep import flops
from polarstep.float64 import widest
from polarstep.products.sizes import frexp, unit_scaled
from polarstep.sketch.base import Sketch

__all__ = ["Kaczmarz"]


@dataclass(frozen=True)
class Kaczmarz(Sketch):
    """ℓ columns drawn with replacement, column j with probability ``π_j = ‖M_:,j‖²/‖M‖²_F``.

    ``Ω_:,k = e_{i_k}/√(ℓ π_{i_k})`` (Algorithm 2, steps 1–3), so that E[ΩΩᵀ] = I. ``MΩ`` is a
    gather and a rescaling.

    Columns repeat. A column that was drawn c times is taken once, with √c times its scale; its
    other draws become zero columns at the end. This changes neither ΩΩᵀ nor the range of ``MΩ``,
    and T depends on nothing else. With c equal columns an orthonormalization would instead make a
    basis of their rounding errors. For a zero matrix Ω = 0, where the formula says 0/0.
    """

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
        return indices.gather(-1, order), scales.to(M.dtype).gather(-1, order)

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
