"""A CPU: float32, half of a symmetric product, and values that can be read without waiting.

Most CPUs emulate bfloat16 products, hundreds of times slower than float32. On CPUs that have
bfloat16 arithmetic only sketches use it: elsewhere float32 is fast enough to keep its digits.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from polarstep.products.base import Products, plain_product
from polarstep.torch_compile import constant

__all__ = ["Cpu", "has_tiles"]

# With narrower strips the matrix routine loses more speed than the saved half is worth.
STRIP = 192
# For smaller matrices bfloat16 tiles gain nothing, as casting to bfloat16 takes time too.
TILES_FROM = 512
# On ARM, oneDNN prepares a transposed right factor for longer than a small product takes: ABᵀ of two
# 40×40 matrices takes 190 µs, and 54 µs with a copy of Bᵀ, with the same result bit for bit. Beyond this
# many entries the copy takes longer.
LARGEST_COPIED = 128 * 128


class Cpu(Products):
    """The operations of a CPU."""

    looks_for_free = True
    orthonormalization = "cholesky"

    def sketch_dtype(self, m: int, n: int, dtype: torch.dtype) -> torch.dtype:
        """bfloat16 for float32 where a CPU has matrix tiles (AMX), which are several times as fast.

        Rounding Y leaves its basis as good, as long as the basis is then made orthonormal in
        float32.
        """
        fast = dtype == torch.float32 and min(m, n) >= TILES_FROM
        return torch.bfloat16 if fast and has_tiles() else dtype

    def times(self, factor: Tensor, S: Tensor, width: int | None = None) -> Tensor:
        """``factor·S``; in bfloat16 not by transposed factors, which torch would copy first."""
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
        """Computed in strips on and below the diagonal; the entries above are copied."""
        m = A.shape[-2]
        if m < self.symmetric_from:
            if _copies_transposed() and B.shape[-2] * B.shape[-1] <= LARGEST_COPIED:
                B = B.mT.contiguous().mT
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
    """Whether this CPU has tiles for bfloat16 products, and oneDNN, which uses them, is on."""
    # torch has no public function that tells whether the CPU has tiles.
    supported = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    mkldnn = torch.backends.mkldnn
    available = mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and mkldnn.enabled and supported())


@constant
def _copies_transposed() -> bool:
    """Whether a product with a small transposed factor is faster with a copy of the factor."""
    return platform.machine() in ("aarch64", "arm64")
