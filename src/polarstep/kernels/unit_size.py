"""Bring M to unit size, where squares of its entries would leave the range of float32.

A polar map squares M: in Gram matrices, in norms, in the trace of :mod:`polarstep.kernels.trace`.
Entries of 1e-30 or 1e30 have no squares in float32, and T would be zero. T(cM) = T(M), so such an M is
multiplied by a power of two, which is exact, and its largest entry is then between one and two.

The momentum kernel writes the largest entry of every block of M beside M. Only when all blocks are
written is the largest entry of a matrix known, so the scaling is a launch of its own. As a rule this
launch finds every M in range, reads nothing but these numbers and ends. It has no atomic operations and
nothing to reset, so that a CUDA graph can replay it, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["to_unit_size"]

# Largest entries that need no scaling. The norm of a sketch MΩ, whose square must be a number of
# float32, may be 1e8 times the largest entry of a large M, or a hundredth of it.
LEAST = 2.0**-40
MOST = 2.0**30

_BLOCK = 2048
# Programs of all matrices together. Each program reads the numbers of all blocks of its matrix. With
# four programs for each multiprocessor of a large GPU that took 16 µs on an 8B layer. Where matrices are
# scaled, which is rare, more programs would be faster.
_PROGRAMS = 64
# Numbers of blocks that a program reads at a time.
_MOST_PARTS = 8192


@triton.jit
def _to_unit_size_kernel(
    M, largest, squares, size, parts,
    LEAST: tl.constexpr, MOST: tl.constexpr, SQUARES: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(1).to(tl.int64)
    found = tl.zeros((PARTS,), dtype=tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        there = tl.load(largest + matrix * parts + part, mask=part < parts, other=0.0)
        found = tl.maximum(found, there)
    most = tl.max(found, axis=0)
    # A zero matrix stays zero. A matrix with an infinite entry has no scale.
    if ((most > 0) & (most < LEAST)) | ((most > MOST) & (most < float("inf"))):
        # The exponent e of most = 2ᵉ·(1…2); the bounds keep 2⁻ᵉ among the normal numbers.
        exponent = (most.to(tl.int32, bitcast=True) >> 23) - 127
        exponent = tl.minimum(tl.maximum(exponent, -126), 126)
        scale = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            at = first + tl.arange(0, BLOCK)
            m = tl.load(M + matrix * size + at, mask=at < size, other=0.0).to(tl.float32)
            tl.store(M + matrix * size + at, (m * scale).to(M.dtype.element_ty), mask=at < size)
        if SQUARES and tl.program_id(0) == 0:
            exact = scale.to(tl.float64)
            for start in range(0, parts, PARTS):
                part = start + tl.arange(0, PARTS)
                there = squares + matrix * parts + part
                before = tl.load(there, mask=part < parts, other=0.0)
                tl.store(there, before * (exact * exact), mask=part < parts)


def to_unit_size(M: Tensor, largest: Tensor, squares: Tensor | None = None) -> None:
    """Multiply each matrix of ``M`` (batch, m, n) by a power of two, in place, if it is out of range.

    ``largest`` (batch, parts) has max |M_ij| of each part of a matrix, and ``squares``, of the same
    shape, ΣM²_ij, which is multiplied by the square of that power. Entries that are 1e38 times
    smaller than the largest entry become zero.
    """
    batch, size = M.shape[0], M.shape[1] * M.shape[2]
    parts = largest.shape[1]
    programs = min(triton.cdiv(size, _BLOCK), triton.cdiv(_PROGRAMS, batch))
    _to_unit_size_kernel[(programs, batch)](
        M, largest, largest if squares is None else squares, size, parts,
        LEAST=LEAST, MOST=MOST, SQUARES=squares is not None,
        PARTS=min(triton.next_power_of_2(parts), _MOST_PARTS), BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
