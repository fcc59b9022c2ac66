"""A GPU with torch's own operations: bfloat16 products accumulated in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep.ops.base import Products

__all__ = ["Cuda"]


# Tensor cores are fastest with bfloat16 rows whose length is a multiple of this.
ALIGNED = 16


class Cuda(Products):
    """The operations of a GPU without our kernels, and of every other device that is not a CPU."""

    sketched_from = 768

    def dtype(self, given: torch.dtype) -> torch.dtype:
        """bfloat16 from NVIDIA's Ampere generation on, float32 before."""
        if given == torch.float64:
            return torch.float64
        fast = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fast else torch.float32

    def padded(self, width: int, dtype: torch.dtype) -> int:
        """``width`` rounded up to a multiple of 16 in bfloat16, for tensor cores."""
        return width + -width % ALIGNED if dtype == torch.bfloat16 else width

    def sketched(self, factor: Tensor, Omega: Tensor, width: int) -> Tensor:
        """One product for the whole batch, where no zero columns are needed."""
        if width == Omega.shape[-1]:
            return factor @ Omega
        return super().sketched(factor, Omega, width)

    def gram(self, X: Tensor) -> Tensor:
        """``XXᵀ``; for a 16-bit ``X`` in float32, on NVIDIA GPUs without a float32 copy of ``X``."""
        if X.dtype.itemsize == 2 and X.is_cuda and torch.version.hip is None:  # AMD's refuse it
            return torch.bmm(X, X.mT, out_dtype=torch.float32)
        return super().gram(X)
