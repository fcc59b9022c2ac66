"""A warm sketch's next start, ``Ωᵀ ← Z + ε·Nᵀ``, for a batch of Z and one N, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["blend"]

_BLOCK = 2048


@triton.jit
def _blend_kernel(
    Z, numbers, start, finite, size, scale, SKIP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = size
    if SKIP:
        end = tl.where(tl.load(finite + batch) != 0, size, 0)  # nothing is stored
    inside = at < end
    z = tl.load(Z + batch * size + at, mask=inside, other=0.0).to(tl.float32)
    n = tl.load(numbers + at, mask=inside, other=0.0).to(tl.float32)
    value = (z + scale * n).to(start.dtype.element_ty)
    tl.store(start + batch * size + at, value, mask=inside)


def blend(
    Z: Tensor, numbers: Tensor, scale: float, start: Tensor, finite: Tensor | None = None
) -> None:
    """``start ← Z + scale·numbersᵀ``: Z and start are (batch, ℓ, n), ``numbers`` is (n, ℓ).

    Where ``finite`` is zero, the start stays as it was.
    """
    Z, numbers = Z.contiguous(), numbers.mT.contiguous()
    size = numbers.numel()
    _blend_kernel[(triton.cdiv(size, _BLOCK), Z.shape[0])](
        Z,
        numbers,
        start,
        start if finite is None else finite,
        size,
        scale,
        SKIP=finite is not None,
        BLOCK=_BLOCK,
    )
