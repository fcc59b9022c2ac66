"""A CPU: float32, half of a symmetric product, and values that one may look at.

Without bf16 arithmetic (most CPUs) a bf16 product is emulated, hundreds of times slower than float32.
With it, float32 is fast enough not to give up its digits, but for a sketch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from polarstep.products.base import Products, plain_product
from polarstep.torch_compile import constant

__all__ = ["Cpu", "has_tiles"]

# Narrower strips and smaller matrices lose in the matrix routine what they save in work.
STRIP = 192
# A CPU's tiles multiply smaller matrices no faster, with the casts.
TILES_FROM = 512


class Cpu(Products):
    """The operations of a CPU."""

    looks_for_free = True
    orthonormalization = "cholesky"

    def sketch_dtype(self, m: int, n: int, dtype: torch.dtype) -> torch.dtype:
        """bfloat16 for float32 where a CPU has matrix tiles (AMX), which are several times as fast.

        A basis of Y is as good a basis when Y has been rounded, if only the basis is made orthonormal to
        more digits than that.
        """
        fast = dtype == torch.float32 and min(m, n) >= TILES_FROM
        return torch.bfloat16 if fast and has_tiles() else dtype

    def times(self, factor: Tensor, S: Tensor, width: int | None = None) -> Tensor:
        """``factor·S``; in bfloat16 without a transposed factor, which torch would copy first."""
        if factor.dtype == torch.bfloat16 and factor.is_contiguous():
            return factor @ S.contiguous()
        return super().times(factor, S, width)

    def symmetric(
        self,
        A: Tensor,
        B: Tensor,
        *,
        plus: Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        identity: float = 0.0,
    ) -> Tensor:
        """Strips on and below the diagonal, wide enough for matrix routines; the rest is copied."""
        m = A.shape[-2]
        if m < self.symmetric_from:
            return super().symmetric(A, B, plus=plus, alpha=alpha, beta=beta, identity=identity)
        C = A.new_empty(A.shape[0], m, m)
        for first, end in _strips(m):
            below = None if plus is None else plus[:, first:, first:end]
            rows, columns = A[:, first:], B[:, first:end].mT
            C[:, first:, first:end] = plain_product(rows, columns, below, alpha, beta)
            C[:, first:end, end:] = C[:, end:, first:end].mT
        if identity:
            C.diagonal(dim1=-2, dim2=-1).add_(identity)
        return C

    def symmetric_flops(self, m: int, k: int, dtype: torch.dtype) -> int:
        """FLOPs of the strips."""
        if m < self.symmetric_from:
            return super().symmetric_flops(m, k, dtype)
        return sum(2 * (m - first) * (end - first) * k for first, end in _strips(m))


def _strips(m: int) -> Iterator[tuple[int, int]]:
    count = round(m / STRIP)
    return pairwise(m * i // count for i in range(count + 1))


@constant
def has_tiles() -> bool:
    """Whether this CPU has tiles for bfloat16 products, and torch's library that uses them is on."""
    # torch has no public name for the first question.
    supported = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    mkldnn = torch.backends.mkldnn
    available = mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and mkldnn.enabled and supported())
