"""A model shared out among ranks: whole on each (DDP), or a part of each parameter on each (FSDP2).

The gradients that an optimizer finds are those of the sum of all ranks' losses. Where each rank's
loss is that of its part of a batch, they are the gradients of one process with the whole batch, up to
rounding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from polarstep_lab.models.global_norm import with_global_norms
from polarstep_lab.train.ranks import Ranks

__all__ = ["Network", "parallelize", "unwrapped"]


class Network(Protocol):
    """A model as training calls it."""

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """``function(model, *inputs)``, on this rank's part of a batch."""

    def accumulating(self, last: bool) -> AbstractContextManager[object]:
        """A context for one forward and backward pass.

        Ranks exchange their gradients in the ``last`` pass of a step, not in those before.
        """

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the sum of all ranks' losses."""


class _Unwrapped:
    """The model itself, in a single process."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return function(self._model, *inputs)

    def accumulating(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


class _Averaged:
    """The passes of DDP and FSDP2, both of which divide summed gradients by the number of ranks."""

    def __init__(self, count: int) -> None:
        self._count = count

    def backward(self, loss: Tensor) -> None:
        (loss * self._count).backward()  # type: ignore[no-untyped-call]


class _Replicas(_Averaged):
    """torch's DistributedDataParallel."""

    def __init__(self, model: nn.Module, unused: bool, device: torch.device, count: int) -> None:
        super().__init__(count)
        with warnings.catch_warnings():
            # The newest torch has another name for broadcast_buffers, which torch 2.9 does not know.
            warnings.simplefilter("ignore", FutureWarning)
            self._module = DistributedDataParallel(
                _Calling(model),
                device_ids=[device] if device.type == "cuda" else None,
                broadcast_buffers=False,  # global norms have the same statistics on all ranks
                find_unused_parameters=unused,
            )

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        found: Tensor = self._module(function, *inputs)
        return found

    def accumulating(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self._module.no_sync()


class _Calling(nn.Module):
    """A module whose ``forward`` applies a function to ``model``: DDP prepares its exchange there."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return function(self.model, *inputs)


class _Shards(_Averaged):
    """torch's FSDP2, which changes the model in place."""

    def __init__(
        self, model: nn.Module, parts: Iterable[nn.Module], method: str, device: torch.device
    ) -> None:
        super().__init__(dist.get_world_size())
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for part in parts:
            fully_shard(part, mesh=mesh)
        self._model = fully_shard(model, mesh=mesh)
        if method != "forward":
            register_fsdp_forward_method(model, method)

    def __call__(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return function(self._model, *inputs)

    def accumulating(self, last: bool) -> AbstractContextManager[object]:
        self._model.set_requires_gradient_sync(last)
        return nullcontext()


def unwrapped(model: nn.Module) -> Network:
    """``model`` in this process alone."""
    return _Unwrapped(model)


def parallelize(
    model: nn.Module,
    parts: Iterable[nn.Module],
    method: str,
    device: torch.device,
    ranks: Ranks,
    *,
    unused: bool = False,
) -> Network:
    """``model`` shared out as ``ranks.parallel`` says.

    FSDP2 gathers one of the ``parts`` of the model at a time, and the rest of it whenever ``method``
    of the model is called. ``unused`` says that some parameters never get a gradient.
    """
    if ranks.parallel is None:
        return unwrapped(model)
    with_global_norms(model)
    if ranks.parallel == "fsdp":
        return _Shards(model, parts, method, device)
    return _Replicas(model, unused, device, ranks.count)
