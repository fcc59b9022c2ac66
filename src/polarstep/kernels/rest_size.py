"""1/δ from ‖M‖²_F and ‖B‖²_F: the size of the rest of a sketch, for polynomial steps.

Two launches for a whole batch, and a third where ‖M‖²_F is not known. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from polarstep.kernels.normalize import sum_of_parts, sums_of_squares
from polarstep.numerics import MOST_ENERGY

__all__ = ["inverse_rest_size"]


@triton.jit
def _inverse_size_kernel(
    of_M, of_B, inverse, left, parts_M, parts_B,
    FACTOR: tl.constexpr, FLOOR: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    whole = sum_of_parts(of_M + batch * parts_M, parts_M, BLOCK)
    head = sum_of_parts(of_B + batch * parts_B, parts_B, BLOCK)
    size = FACTOR * tl.sqrt(tl.maximum(whole - head, FLOOR * whole) / left)
    # A zero matrix has no rest, nor has one whose basis is too long; 1/δ must be a number of float32.
    has_rest = (size > 0) & (head <= MOST * whole)
    value = tl.where(has_rest, 1 / tl.where(size > 0, size, 1.0), 0.0)
    tl.store(inverse + batch, tl.minimum(value, 1e38).to(tl.float32))


def inverse_rest_size(
    M: Tensor,
    B: Tensor,
    left: int,
    factor: float,
    floor: float,
    squares: Tensor | None = None,
) -> Tensor:
    """1/δ of each matrix, as :func:`polarstep.maps.deflated.rest_size` defines δ, in float32.

    ``squares`` (batch, parts) adds up to ‖M‖²_F in float64, where the momentum kernel has computed it.
    """
    of_M, of_B = sums_of_squares(M) if squares is None else squares, sums_of_squares(B)
    inverse = torch.empty(len(M), dtype=torch.float32, device=M.device)
    _inverse_size_kernel[(len(M),)](
        of_M, of_B, inverse, left, of_M.shape[1], of_B.shape[1],
        FACTOR=factor, FLOOR=floor, MOST=MOST_ENERGY, BLOCK=512,
    )  # fmt: skip
    return inverse
