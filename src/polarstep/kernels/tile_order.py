"""In which order the tiles of a product are computed."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["in_bands"]


@triton.jit
def in_bands(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """First row and first column of tile number ``tile`` of an M×N result.

    Tiles come in bands of GROUP rows, so that tiles computed together share operands in cache.
    """
    rows, cols = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (GROUP * cols) * GROUP
    height = tl.minimum(rows - first, GROUP)
    row = first + (tile % (GROUP * cols)) % height
    return row * BM, (tile % (GROUP * cols)) // height * BN
