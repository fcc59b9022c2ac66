"""What an owner computes between its two exchanges, on a GPU as one CUDA graph that is replayed.

    received: parts of M and of carries  →  M  →  the polar map  →  parts of T and of carries, to send

Launched kernel by kernel, this takes milliseconds of Python for each bucket of matrices. So it is
captured after the first steps and replayed from then on, by the rules of
:class:`polarstep.engines.graphs.Replays`. The numbers are the same, bit for bit. Collectives stay
outside the graphs, so the communication of one bucket runs beside the replay of another.

A graph reads and writes tensors that keep their places: what was received, random numbers, flags, and
what is sent. The first three are copied to their places at each step, one more pass over the bytes of M.
Momentum, learning rates and the update of X are not in the graph, and carries arrive with the received
parts, from the optimizer's state. So a loaded checkpoint or a new learning rate needs no new graph. If
the matrices, maps, precisions or options of a bucket change, it gets a new
:class:`~polarstep.ranks.parts.Table`, for which graphs are captured anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor

from polarstep.engines.fused import runs_by_kernels
from polarstep.engines.graphs import Replays
from polarstep.engines.replay import LARGEST_BUCKET
from polarstep.groups import Group
from polarstep.maps import Draw

if TYPE_CHECKING:
    from polarstep.ranks.parts import SharedBucket

__all__ = ["OwnedGraph", "can_replay", "is_worth_a_graph"]

# (what was received, the draw of the step, a tensor to write to or None) ↦ what is sent.
Compute = Callable[[Tensor, Draw, Tensor | None], Tensor]


def can_replay(group: Group, device: torch.device) -> bool:
    """Whether the polar map of a group's matrices on ``device`` may be replayed as a CUDA graph."""
    return device.type == "cuda" and runs_by_kernels(group, device)


def is_worth_a_graph(b: SharedBucket, count: int) -> bool:
    """Whether the steps of a bucket are captured, of which this rank computes ``count`` matrices.

    A graph holds the memory of its tensors between steps. It is not worth it for more than
    :data:`LARGEST_BUCKET` bytes of M, which compute for longer than their launches take.
    """
    its = b.key
    return (
        count > 0
        and 2 * count * its.m * its.n <= LARGEST_BUCKET
        and all(can_replay(member.group, its.device) for member in b.members)
    )


class OwnedGraph:
    """The tensors that the graphs of one bucket read and write, and the graphs."""

    def __init__(self, device: torch.device, all_graphs: WeakSet[OwnedGraph]) -> None:
        self.device, self.replays = device, Replays()
        self._all = all_graphs  # of the optimizer
        self._all.add(self)
        self._inputs: dict[str, Tensor] = {}
        self._sent: Tensor | None = None

    def run(self, compute: Compute, received: Tensor, draw: Draw) -> Tensor:
        """What ``compute(received, draw, None)`` returns, launched or replayed.

        The result stays valid until the next call.
        """
        there = self._placed("received", received)
        numbers = None if draw.numbers is None else self._placed("numbers", draw.numbers)
        finite = None if draw.finite is None else self._placed("finite", draw.finite)
        places = [finite is None, *(tensor.data_ptr() for tensor in self._inputs.values())]
        kind = (numbers is not None,)

        def launch(device: torch.device) -> None:
            self._sent = compute(there, Draw(numbers, finite), self._sent)

        self.replays.count(kind, places)
        self.replays.run(kind, launch, [self.device], beside=self._beside())
        assert self._sent is not None
        return self._sent

    def _beside(self) -> torch.cuda.CUDAGraph | None:
        """A graph of any bucket on the device. Buckets run one after the other and can share memory."""
        graphs = (
            graph
            for bucket in self._all
            if bucket.device == self.device
            for found in bucket.replays.graphs.values()
            for graph in found
        )
        return next(graphs, None)

    def _placed(self, name: str, given: Tensor) -> Tensor:
        """A copy of ``given`` at the place that the graphs know by ``name``."""
        known = self._inputs.get(name)
        if known is None or (known.shape, known.dtype) != (given.shape, given.dtype):
            self._inputs[name] = given.clone()
        else:
            known.copy_(given)
        return self._inputs[name]
