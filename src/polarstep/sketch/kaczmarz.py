"""The Kaczmarz-style sketch of Algorithm 2: sampled columns instead of a product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep import flops
from polarstep.sketch.base import Sketch, default_generator

__all__ = ["Kaczmarz"]


@dataclass(frozen=True)
class Kaczmarz(Sketch):
    """ℓ columns drawn with replacement, column j with probability ``π_j = ‖M_:,j‖²/‖M‖²_F``.

    ``Ω_:,k = e_{i_k}/√(ℓ π_{i_k})`` (Algorithm 2, steps 1–3), so that E[ΩΩᵀ] = I. ``MΩ`` is a
    gather and a rescaling. Columns repeat, so ``MΩ`` is often rank deficient; the
    orthonormalization behind it has to live with that, and does. Column j of a zero matrix, or of
    zeros, has Ω_:,k = 0 where the formula says 0/0.
    """

    def columns(
        self, M: Tensor, width: int, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Indices ``i_k`` and scales ``1/√(ℓ π_{i_k})``, both of shape (..., ℓ).

        The uniform variates are shared by the batch and turned into columns by each matrix's own
        distribution function.
        """
        generator = default_generator(generator, M.device)
        uniform = torch.rand(
            width, generator=generator, device=generator.device, dtype=torch.float64
        ).to(M.device)
        # float64: with thousands of columns a float32 sum would misplace the rare ones.
        weight = torch.linalg.vector_norm(M, dim=-2, dtype=torch.float64).square()
        cumulative = weight.cumsum(dim=-1)
        total = cumulative[..., -1:]
        levels = (uniform * total).contiguous()
        indices = torch.searchsorted(cumulative, levels, right=True)
        indices = indices.clamp_max(M.shape[-1] - 1)
        picked = weight.gather(-1, indices)
        scales = torch.where(picked > 0, total / (width * picked), 0.0).sqrt()
        return indices, scales.to(M.dtype)

    def matrix(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """Ω written out, of shape (..., n, ℓ)."""
        indices, scales = self.columns(M, width, generator)
        Omega = M.new_zeros(*M.shape[:-2], M.shape[-1], width)
        return Omega.scatter_(-2, indices.unsqueeze(-2), scales.unsqueeze(-2))

    def __call__(self, M: Tensor, width: int, generator: torch.Generator | None = None) -> Tensor:
        """``MΩ`` as a gather of columns."""
        indices, scales = self.columns(M, width, generator)
        rows = indices.unsqueeze(-2).expand(*M.shape[:-1], width)
        return M.gather(-1, rows) * scales.unsqueeze(-2)

    def flops(self, m: int, n: int, width: int) -> int:
        """Squared column norms (2mn) and the rescaling (mℓ); a gather costs no FLOPs."""
        return flops.kaczmarz_sketch(m, n, width)
