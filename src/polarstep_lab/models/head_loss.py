"""Cross-entropy of a large soft-capped head, without the logits of the whole batch in float32.

With z = xWᵀ, the logits are c·tanh(z/c), and a position with target y has the loss

    log Σⱼ exp(c·tanh(zⱼ/c)) − c·tanh(z_y/c),

whose gradient with respect to zⱼ is (pⱼ − [j = y])·(1 − tanh²(zⱼ/c)). No logit exceeds c, so the
exponentials cannot overflow without subtracting a maximum first. A row of z is read twice: once for
the sum and once for the gradient.

**Why not leave it to autograd.** With GPT-2's vocabulary the logits are by far the largest tensors
of a training step: 16,384 tokens have 0.8 billion logits. Computed plainly in float32, cap, loss and
their gradients move about 90 bytes per logit, which takes 17 ms on a GPU that moves 4.3 TB a second;
the three products of the head take 6 ms (3.8 TFLOP). Here z stays in the precision of its product,
2 bytes per logit. Compiled to one kernel, reading z and writing its gradient takes less than 1 ms.
The gradients of x and W are computed in the forward pass, chunk by chunk, and only they are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["LARGEST_SOFTCAP", "head_loss", "loss_of_rows", "softcapped"]

LARGEST_SOFTCAP = 64.0
"""The largest c for which the sum of exponentials stays within float32."""

CHUNK = 2**30
"""Logits per chunk: 2 GiB in bfloat16, 21,000 tokens with GPT-2's vocabulary."""
PLAIN_CHUNK = 2**28
"""Logits per chunk where rows are not compiled: their float32 intermediates take 1 GiB each."""
CPU_CHUNK = 2**22
"""Logits per chunk on a CPU, 16 MiB: they stay in the cache, which is three times as fast."""

Rows = Callable[[Tensor, Tensor, float, bool], tuple[Tensor, Tensor | None]]


def softcapped(z: Tensor, softcap: float) -> Tensor:
    """c·tanh(z/c), in float32 at least."""
    return softcap * torch.tanh(_wide(z) / softcap)


def head_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float,
    *,
    rows: Rows | None = None,
    chunk: int | None = None,
) -> Tensor:
    """The loss summed over all positions, for ``x`` (positions, width) and ``targets`` (positions,).

    The product is computed in the precision of ``x``; the gradient of ``weight`` is summed in the
    precision of ``weight``. ``rows`` replaces :func:`loss_of_rows`, for example by its compiled
    form. At most ``chunk`` logits are in memory at a time; the default depends on the device.
    """
    if not 0 < softcap <= LARGEST_SOFTCAP:
        raise ValueError(f"softcap={softcap}: expected above 0 and at most {LARGEST_SOFTCAP:g}")
    rows = rows or loss_of_rows
    if chunk is None:
        chunk = PLAIN_CHUNK if rows is loss_of_rows else CHUNK
        chunk = CPU_CHUNK if x.device.type == "cpu" else chunk
    parts = -(-targets.numel() * len(weight) // chunk)
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    with torch.autocast(x.device.type, enabled=False):
        loss: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            x, weight, targets, softcap, rows, parts, wanted
        )
    return loss


def loss_of_rows(
    z: Tensor, targets: Tensor, softcap: float, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss summed over the rows of ``z``, and its gradient in the precision of ``z``.

    >>> loss, gradient = loss_of_rows(torch.zeros(1, 4), torch.tensor([2]), 15.0, True)
    >>> round(loss.item(), 4), gradient.tolist()
    (1.3863, [[0.25, 0.25, -0.75, 0.25]])
    """
    t = torch.tanh(_wide(z) / softcap)
    exponentials = torch.exp(softcap * t)
    sums = exponentials.sum(dim=1, keepdim=True)
    column = targets[:, None]
    loss = sums.log().sum() - softcap * t.gather(1, column).sum()
    if not with_gradient:
        return loss, None
    p = exponentials / sums
    hit = torch.arange(z.shape[1], device=z.device) == column
    gradient = torch.where(hit, p - 1, p) * (1 - t * t)
    return loss, gradient.to(z.dtype)


class _HeadLoss(torch.autograd.Function):
    """Computes loss and gradients in ``forward``, chunk by chunk; ``backward`` scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        softcap: float,
        rows: Rows,
        parts: int,
        wanted: bool,
    ) -> Tensor:
        matrix = weight.to(x.dtype)
        total = torch.zeros((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        x_grads: list[Tensor] = []
        weight_grad: Tensor | None = None
        for chunk, aims in zip(x.chunk(parts), targets.chunk(parts), strict=True):
            loss, gradient = rows(chunk @ matrix.mT, aims, softcap, wanted)
            total += loss
            if gradient is not None:
                x_grads.append(gradient @ matrix)
                product = _product(gradient.mT, chunk, weight.dtype)
                weight_grad = product if weight_grad is None else weight_grad.add_(product)
        if weight_grad is not None:
            ctx.save_for_backward(torch.cat(x_grads) if parts > 1 else x_grads[0], weight_grad)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * grads[0], weight_grad * grads[0], *(None,) * 5


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """``a @ b`` in ``dtype``; a GPU writes its float32 accumulator without rounding."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)


def _wide(z: Tensor) -> Tensor:
    return z.to(torch.promote_types(z.dtype, torch.float32))
