"""The processes of one run, as ``torchrun`` starts them: one rank each.

Every rank computes its part of each batch, and all ranks make the same step. Rank 0 alone reads and
writes the run directory and talks to the user. A process that was started without ``torchrun`` is
rank 0 of 1, and none of the functions here sends anything.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from polarstep_lab.records.environment import pick_device
from polarstep_lab.settings_by_name import ConfigError

__all__ = [
    "Parallel",
    "Ranks",
    "StopVote",
    "first_failure",
    "launched",
    "refuse_launcher",
    "world_size",
]

Parallel = Literal["ddp", "fsdp"]
T = TypeVar("T")

FAILURE = "polarstep/failure"
"""The key in the store of all ranks under which the first rank that fails leaves its message."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """This process among the ``count`` processes of a run; by default it is the only one."""

    rank: int = 0
    count: int = 1
    parallel: Parallel | None = None
    """How the model is shared out; ``None`` for a process that was not started by torchrun."""
    control: dist.ProcessGroup | None = field(default=None, repr=False)
    """A gloo group for decisions and small objects, apart from the group of the gradients."""

    @property
    def first(self) -> bool:
        """Whether this rank writes the records and talks to the user."""
        return self.rank == 0

    def device(self, name: str) -> torch.device:
        """The device of this rank for ``runtime.device=name``: each rank has a GPU of its own."""
        device = pick_device(name)
        if self.parallel is None or device.type != "cuda":
            return device
        local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        if device.index is not None and here > 1:
            raise ConfigError(
                f"runtime.device={name!r} with {here} processes on this machine: expected cuda, of "
                "which each process takes the GPU of its own number"
            )
        if here > torch.cuda.device_count():
            raise ConfigError(
                f"--nproc-per-node {here}, but torch finds {torch.cuda.device_count()} GPUs here: "
                "start at most as many processes, or give --device cpu"
            )
        device = torch.device("cuda", local if device.index is None else device.index)
        torch.cuda.set_device(device)
        return device

    def check_divides(self, setting: str, size: int) -> None:
        """Raise if a batch of ``size`` examples cannot be divided evenly among the ranks."""
        if size % self.count:
            raise ConfigError(
                f"{setting}={size} with {self.count} processes: expected a multiple of "
                f"{self.count}, as each process takes an equal part of every batch; change the "
                "number of processes or set another batch"
            )

    def share(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """This rank's part of each tensor, along the first dimension."""
        return tuple(x.tensor_split(self.count)[self.rank] for x in tensors)

    def total(self, x: Tensor) -> Tensor:
        """The sum of ``x`` over all ranks."""
        if self.count > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def joined(self, x: Tensor) -> Tensor:
        """The tensors of all ranks, of equal shapes, one after another in the first dimension."""
        if self.count == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.count)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0 alone; return its value, or raise its error, on all ranks."""
        if self.count == 1:
            return function()
        outcome: list[tuple[T | None, Exception | None]] = [(None, None)]
        if self.first:
            try:
                outcome = [(function(), None)]
            except Exception as error:
                outcome = [(None, _sendable(error))]
        dist.broadcast_object_list(outcome, src=0, group=self.control)
        value, failure = outcome[0]
        if failure is not None:
            raise failure
        return cast(T, value)

    def wait(self) -> None:
        """Wait until all ranks have come here."""
        if self.count > 1:
            dist.barrier(group=self.control)


class StopVote:
    """What the ranks want to do after a step: the greatest of their numbers, at the next step.

    The exchange runs beside the step that follows, so that no rank waits for the others. All ranks
    learn the same number at the same step. A process that is alone learns its number at once.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._ballot = torch.zeros(1, dtype=torch.int64)
        self._pending: dist.Work | None = None

    def cast(self, wish: int) -> int:
        """Hand in this rank's number for this step, and return the greatest of the last step."""
        if self._ranks.count == 1:
            return wish
        decided = self.close()
        self._ballot = torch.tensor([wish])
        self._pending = dist.all_reduce(
            self._ballot, op=dist.ReduceOp.MAX, group=self._ranks.control, async_op=True
        )
        return decided

    def close(self) -> int:
        """The greatest number of the last step, after waiting for the exchange."""
        if self._pending is None:
            return 0
        self._pending.wait()
        self._pending = None
        return int(self._ballot)


def world_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many processes torchrun has started for this run; ``None`` without torchrun."""
    return int(environment["WORLD_SIZE"]) if "WORLD_SIZE" in environment else None


def refuse_launcher(command: str) -> None:
    """Raise where torchrun has started ``command``, of which every process would make all runs."""
    if (world_size() or 1) > 1:
        raise ConfigError(
            f"torchrun with polarstep {command}: expected polarstep run, whose processes make one "
            f"run together; for many runs at a time, `polarstep {command} … --workers N` or --on ray"
        )


@contextmanager
def launched(parallel: Parallel | None = None) -> Iterator[Ranks]:
    """The ranks that torchrun has started, connected; without torchrun, this process alone.

    ``parallel`` says how the model is shared out: ``"ddp"``, a copy on each rank, which is the
    default for two and more ranks, or ``"fsdp"``, a part of each parameter on each rank.
    """
    count = world_size()
    if count is None:
        if parallel is not None:
            raise ConfigError(
                f"--parallel {parallel} in a single process: expected several, as "
                "`torchrun --nproc-per-node 2 -m polarstep run …` starts them"
            )
        yield Ranks()
        return
    if count == 1 and parallel is None:
        yield Ranks()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    control = dist.new_group(backend="gloo")
    yield Ranks(dist.get_rank(), count, parallel or "ddp", control)
    # Not after an error: NCCL would wait for ranks that are stuck in another collective.
    dist.destroy_process_group()


def first_failure(error: BaseException) -> tuple[bool, str]:
    """Whether ``error`` is the first failure among all ranks, and the message of the first.

    A rank that fails takes the others down with it: they lose their connection, or are stopped.
    Only the first failure says why.
    """
    told = f"{type(error).__name__}: {error}"
    if not dist.is_initialized():
        return int(os.environ.get("RANK", 0)) == 0, told
    mine = f"rank {dist.get_rank()}: {told}"
    try:
        found = dist.distributed_c10d._get_default_store().compare_set(FAILURE, "", mine).decode()
    except RuntimeError:  # the launcher, which holds the store, has ended
        return False, mine
    return found == mine, found


def _sendable(error: Exception) -> Exception:
    """``error`` itself if it survives pickling, else an error of the same text."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
