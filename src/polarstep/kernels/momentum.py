"""``C ← βC + G`` and M, for a whole bucket in one pass over memory.

The kernel reads G and C once and writes C in place. It writes M, rounded to bfloat16, as one
contiguous batch for the polar map, and the largest entry of every block of M, from which
:func:`to_unit_size` finds matrices that must be scaled. For maps that need ‖M‖_F it also
writes the sum of squares of every block.

**Unit size** (:func:`to_unit_size`). A polar map squares M: in Gram matrices, in norms, in traces.
Entries of 1e-30 or 1e30 have no squares in float32, and T would be zero. T(cM) = T(M), so such an M is
multiplied by a power of two, which is exact, and its largest entry is then between one and two.

The momentum kernel writes the largest entry of every block of M beside M. Only when all blocks are
written is the largest entry of a matrix known, so the scaling is a launch of its own. As a rule this
launch finds every M in range, reads nothing but these numbers and ends. It has no atomic operations and
nothing to reset, so that a CUDA graph can replay it, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "BLOCK",
    "ELEMENTS",
    "LEAST",
    "MOST",
    "momentum",
    "parts_of",
    "to_unit_size",
]

# Triton's names for the element types that kernels read through addresses.
ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
BLOCK = 1024


@triton.jit
def _momentum_kernel(
    gradients,
    buffers,
    betas,
    finite,
    strides,
    out,
    largest,
    squares,
    size,
    columns,
    ELEMENT: tl.constexpr,
    NESTEROV: tl.constexpr,
    SKIP: tl.constexpr,
    STRIDED: tl.constexpr,
    LARGEST: tl.constexpr,
    SQUARES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    matrix = tl.program_id(1).to(tl.int64)
    # Put the hint on the pointer: Triton drops a hint on the integer, and 16-byte accesses with it.
    G = tl.multiple_of(tl.load(gradients + matrix).to(tl.pointer_type(ELEMENT)), 16)
    C = tl.multiple_of(tl.load(buffers + matrix).to(tl.pointer_type(ELEMENT)), 16)
    beta = tl.load(betas + matrix)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    here = at
    if STRIDED:
        here = (at // columns) * tl.load(strides + matrix) + at % columns
    g = tl.load(G + here, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(C + here, mask=inside, other=0.0).to(tl.float32)
    new = beta * c + g
    if SKIP:
        ok = tl.load(finite + matrix) != 0
        new = tl.where(ok, new, c)
    stored = new.to(ELEMENT)
    tl.store(C + here, stored, mask=inside)
    m = stored.to(tl.float32)
    if NESTEROV:
        m = beta * m + g
    if SKIP:
        m = tl.where(ok, m, 0.0)
    if LARGEST > 0:  # the largest number of M's precision; zero if that is float32
        m = tl.where(tl.abs(m) < float("inf"), tl.clamp(m, -LARGEST, LARGEST), m)
    rounded = m.to(out.dtype.element_ty)
    tl.store(out + matrix * size + at, rounded, mask=inside)
    block = matrix * tl.num_programs(0) + tl.program_id(0)
    tl.store(largest + block, tl.max(tl.abs(m), axis=0))
    if SQUARES:  # entries outside are zero; squares of 1e-30 or 1e30 leave float32's range
        exact = rounded.to(tl.float64)
        tl.store(squares + block, tl.sum(exact * exact, axis=0))


def parts_of(m: int, n: int) -> int:
    """The number of blocks of an m×n matrix."""
    return triton.cdiv(m * n, BLOCK)


def momentum(
    gradients: Tensor,
    buffers: Tensor,
    betas: Tensor,
    out: Tensor,
    *,
    element: torch.dtype,
    nesterov: bool,
    finite: Tensor | None = None,
    strides: Tensor | None = None,
    squares: Tensor | None = None,
) -> Tensor:
    """Update the buffers at ``buffers`` from the gradients at ``gradients``; M goes to ``out``.

    Returns max |M_ij| of each block of BLOCK entries, in float32, of shape (B, blocks). The blocks'
    ΣM²_ij go to ``squares``, if given: float64 numbers of the same shape.

    ``out`` is (B, m, n). ``gradients`` and ``buffers`` are tables with the address of each m×n
    matrix, a multiple of 16 bytes; ``betas`` has one β per matrix. Where ``finite`` is zero,
    C stays and M is zero. ``strides`` has the distance between rows of each matrix, where some matrices
    are parts of wider ones; without it rows lie one after the other. A finite M stays finite: float32
    reaches half a percent further than bfloat16, and entries beyond bfloat16's largest number become
    that number.
    """
    size = out.shape[1] * out.shape[2]
    grid = (parts_of(out.shape[1], out.shape[2]), out.shape[0])
    largest = torch.empty(grid[::-1], dtype=torch.float32, device=out.device)
    _momentum_kernel[grid](
        gradients,
        buffers,
        betas,
        betas if finite is None else finite,
        gradients if strides is None else strides,
        out,
        largest,
        largest if squares is None else squares,
        size,
        out.shape[2],
        ELEMENT=ELEMENTS[element],
        NESTEROV=nesterov,
        SKIP=finite is not None,
        STRIDED=strides is not None,
        LARGEST=torch.finfo(out.dtype).max if out.dtype.itemsize < 4 else 0.0,
        SQUARES=squares is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return largest


# Largest entries that need no scaling. The norm of a sketch MΩ, whose square must be a number of
# float32, may be 1e8 times the largest entry of a large M, or a hundredth of it.
LEAST = 2.0**-40
MOST = 2.0**30

_UNIT_BLOCK = 2048
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
    programs = min(triton.cdiv(size, _UNIT_BLOCK), triton.cdiv(_PROGRAMS, batch))
    _to_unit_size_kernel[(programs, batch)](
        M, largest, largest if squares is None else squares, size, parts,
        LEAST=LEAST, MOST=MOST, SQUARES=squares is not None,
        PARTS=min(triton.next_power_of_2(parts), _MOST_PARTS), BLOCK=_UNIT_BLOCK, num_warps=8,
    )  # fmt: skip
