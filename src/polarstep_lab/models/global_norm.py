"""Batch norm with the statistics of all ranks' batches, on CPUs and on GPUs.

torch's ``SyncBatchNorm`` needs a GPU. This module sums in two passes, the mean and then the squares of
what differs from it, and is therefore as accurate as batch norm in one process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["GlobalBatchNorm2d", "with_global_norms"]


class GlobalBatchNorm2d(nn.BatchNorm2d):
    """Batch norm of the batch that all ranks have together, in equal parts."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize (batch, channels, height, width); in training all ranks must call it."""
        if not self.training:
            return super().forward(x)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        count = x.numel() // x.shape[1] * dist.get_world_size()
        mean = _sum_over_ranks(wide.sum((0, 2, 3))) / count
        centred = wide - mean[:, None, None]
        variance = _sum_over_ranks(centred.square().sum((0, 2, 3))) / count
        self._remember(mean, variance * (count / max(1, count - 1)))
        factor = (variance + self.eps).rsqrt() * self.weight
        return (centred * factor[:, None, None] + self.bias[:, None, None]).to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)


class _Sum(torch.autograd.Function):
    """The sum over ranks: each rank's gradient is the sum of the gradients of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        dist.all_reduce(total)
        return total


def _sum_over_ranks(x: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(x)  # type: ignore[no-untyped-call]
    return total


def with_global_norms(model: nn.Module) -> None:
    """Make every batch norm of ``model`` a :class:`GlobalBatchNorm2d`, with the same parameters."""
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = GlobalBatchNorm2d
