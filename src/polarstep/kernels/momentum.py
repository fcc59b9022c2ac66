"""``C ← βC + G`` and M, for a whole bucket in one pass over memory.

The kernel reads G and C once and writes C in place. It writes M, rounded to bfloat16, as one
contiguous batch for the polar map, and the largest entry of every block of M, from which
:mod:`polarstep.kernels.unit_size` finds matrices that must be scaled. For maps that need ‖M‖_F it also
writes the sum of squares of every block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels.elements import ELEMENTS

__all__ = ["BLOCK", "momentum", "parts_of"]

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
