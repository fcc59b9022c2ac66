"""The collectives of a step: all-to-all and all-gather with parts of any size, and a maximum.

Numbers are sent as bytes, so that every backend takes every precision.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "Arriving",
    "exchange",
    "from_words",
    "has_ranks",
    "largest_of_ranks",
    "leave_words",
    "lend",
    "meet",
    "packed",
    "share",
    "side_group_of",
    "words",
]

# Its name since torch 2.13, which warns of the other.
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_GROUPS: dict[tuple[tuple[int, ...], str], Any] = {}
_LENT: dict[tuple[int, ...], Any] = {}
# How many times some ranks have met in this process.
_MEETINGS: Counter[tuple[int, ...]] = Counter()
# Seconds after which a rank that waits for others says so in the store, and for which it looks there
# for others before it names those that have not come.
NOTED_AFTER = 2.0
LOOKED_FOR = 3.0
# Ranks share what they have by one all-gather, of as much from each as from the rank that has most.
# Where they would send more than this many times what there is, each sends its own.
MOST_PADDED = 2


def has_ranks() -> bool:
    """Whether this process is one of the ranks of a run."""
    return dist.is_available() and dist.is_initialized()


def lend(ranks: tuple[int, ...], group: Any) -> None:
    """Use ``group``, that of a mesh, for ``ranks``, in place of one that they would have to make.

    Other groups of the user's are left alone: another thread may use them, to save a checkpoint.
    """
    if not _is_alive(_LENT.get(ranks)):
        _LENT[ranks] = group


def side_group_of(ranks: tuple[int, ...]) -> Any:
    """A group of ``ranks`` for tensors on the host, so that an exchange does not wait for a GPU.

    It is a group of its own also where the main group could send such tensors. A rank that takes one
    step less than others then leaves them waiting, until the timeout of the main group. In the main
    group its next reduction of gradients would meet their exchange, and gloo ends the process.
    """
    return _group(ranks, "gloo")


def _group_for(X: Tensor, ranks: tuple[int, ...]) -> Any:
    """The group for an exchange of ``X``; where ``X`` is offloaded to the host, NCCL cannot send it."""
    return _group(ranks, "gloo" if X.device.type == "cpu" else "")


def _group(ranks: tuple[int, ...], backend: str) -> Any:
    """The group of ``ranks``, made at the first call; all of ``ranks`` must call together."""
    world = tuple(range(dist.get_world_size()))
    if ranks == world and not backend:
        return dist.group.WORLD
    if not backend and _is_alive(_LENT.get(ranks)):
        return _LENT[ranks]
    key = (ranks, backend)
    if not _is_alive(_GROUPS.get(key)):
        timeout = _timeout(_LENT.get(ranks))
        if ranks != world:
            _number_groups_alike(ranks, backend, timeout)
        _GROUPS[key] = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend or None,
            use_local_synchronization=ranks != world,
        )
    return _GROUPS[key]


def _number_groups_alike(ranks: tuple[int, ...], backend: str, timeout: timedelta) -> None:
    """Let this rank be in as many groups as that of ``ranks`` which is in most.

    torch names a group that its members make alone by the number of groups in which a rank is. Ranks
    with different numbers would wait for one another under different names.
    """
    me, names = dist.get_rank(), dist.distributed_c10d._world.pg_names
    keys = [f"polarstep/{'-'.join(map(str, ranks))}/{backend}/groups/{rank}" for rank in ranks]
    _store().set(keys[ranks.index(me)], str(len(names)))
    _store().wait(keys, timeout)
    most = max(map(int, _store().multi_get(keys)))
    while len(names) < most:
        dist.new_group([me], backend="gloo", use_local_synchronization=True)


def _timeout(lent: Any) -> timedelta:
    """The user's timeout: that of init_process_group, or that of ``lent`` if it is shorter.

    The group of a mesh has torch's default of 30 minutes.
    """
    groups: list[Any] = [each for each in (lent, dist.group.WORLD) if _is_alive(each)]
    backends = [group._get_backend(device) for group in groups for device in group._device_types]
    found = [getattr(getattr(each, "options", None), "_timeout", None) for each in backends]
    return min((each for each in found if each is not None), default=dist.default_pg_timeout)


def _is_alive(group: Any) -> bool:
    """Whether ``group`` belongs to the present initialization of torch.distributed."""
    if group is None:
        return False
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return False
    return True


@dataclass
class Arriving:
    """What the other ranks have sent, once :meth:`wait` returns."""

    received: Tensor
    counts: list[int]
    handle: Any
    sent: Tensor  # alive until it is sent
    padding: int = 0  # the numbers that have come from each rank, where all send equally many

    def wait(self) -> list[Tensor]:
        """One flat tensor from each rank; a GPU waits in its stream, the host does not."""
        if self.handle is not None:
            self.handle.wait()
        if self.padding:
            whole = self.received.view(-1, self.padding)
            return [each[:count] for each, count in zip(whole, self.counts, strict=True)]
        return list(torch.split(self.received, self.counts))


def packed(
    parts: Sequence[Sequence[Tensor]],
    dtype: torch.dtype,
    device: torch.device,
    out: Tensor | None = None,
) -> Tensor:
    """All ``parts`` in one flat tensor of ``dtype`` on ``device``; written to ``out`` if it is given."""
    flat = [piece.reshape(-1).to(dtype) for part in parts for piece in part]
    if not flat:
        return torch.empty(0, dtype=dtype, device=device)
    return torch.cat(flat, out=out).to(device=device)


def words(X: Tensor, wide: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The bytes of ``X`` in the precision ``wide``, as a flat tensor of the narrower ``dtype``.

    >>> words(torch.ones(3), torch.float32, torch.bfloat16).shape
    torch.Size([6])
    """
    return X.reshape(-1).to(wide).contiguous().view(dtype)


def from_words(flat: Tensor, wide: torch.dtype) -> Tensor:
    """The numbers of precision ``wide`` that :func:`words` took apart.

    Returns a copy, as ``flat`` may begin at an address where a wider number cannot.
    """
    return flat.clone().view(wide)


def exchange(
    sent: Tensor, sizes: Sequence[int], counts: Sequence[int], ranks: tuple[int, ...]
) -> Arriving:
    """Send ``sizes[i]`` numbers of ``sent`` to rank ``ranks[i]``, and receive ``counts[i]`` from it.

    All ranks must call in the same order. ``sent`` must not change before the numbers have arrived.
    """
    if len(ranks) == 1:
        return Arriving(sent, list(counts), None, sent)
    received = torch.empty(sum(counts), dtype=sent.dtype, device=sent.device)
    each = sent.dtype.itemsize
    handle = dist.all_to_all_single(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [each * count for count in counts],
        [each * size for size in sizes],
        group=_group_for(sent, ranks),
        async_op=True,
    )
    return Arriving(received, list(counts), handle, sent)


def share(sent: Tensor, counts: Sequence[int], ranks: tuple[int, ...]) -> Arriving:
    """Send ``sent`` to all of ``ranks``, and receive ``counts[i]`` numbers from rank ``ranks[i]``.

    All ranks must call in the same order. ``sent`` must not change before the numbers have arrived.
    """
    if len(ranks) == 1:
        return Arriving(sent, list(counts), None, sent)
    group, most = _group_for(sent, ranks), max(counts)
    if len(ranks) * most <= MOST_PADDED * sum(counts):
        padded = torch.nn.functional.pad(sent, (0, most - sent.numel()))
        received = sent.new_empty(len(ranks) * most)
        handle = ALL_GATHER(
            received.view(torch.uint8), padded.view(torch.uint8), group=group, async_op=True
        )
        return Arriving(received, list(counts), handle, padded, padding=most)
    received = sent.new_empty(sum(counts))
    parts = torch.split(received, list(counts))
    parts[ranks.index(dist.get_rank())].copy_(sent)
    handles = [
        dist.broadcast(part.view(torch.uint8), src=rank, group=group, async_op=True)
        for rank, part in zip(ranks, parts, strict=True)
        if part.numel()
    ]
    return Arriving(received, list(counts), _All(handles), sent)


@dataclass
class _All:
    """Several exchanges as one."""

    handles: list[Any]

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


def largest_of_ranks(values: Tensor, ranks: tuple[int, ...]) -> Tensor:
    """The largest of each of ``values`` over ``ranks``, in place; a GPU waits in its stream."""
    if len(ranks) > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=_group_for(values, ranks))
    return values


def meet(values: Tensor, ranks: tuple[int, ...], where: str) -> Tensor:
    """The largest of each of ``values`` over ``ranks``, on the host, in place.

    Raises an error that names the ranks that did not come; ``where`` says in words where they were
    expected. Which ranks have come, only those know that wait for long or in vain: they say so in the
    store of torch.distributed, so that others take nothing from it.
    """
    is_made = _is_alive(_GROUPS.get((ranks, "gloo")))
    _MEETINGS[ranks] += 1
    note = f"polarstep/{'-'.join(map(str, ranks))}/{_MEETINGS[ranks]}"
    if not is_made:  # to make a group, ranks wait for one another, too
        _leave_note(note)
    try:
        group = side_group_of(ranks)
        handle = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group, async_op=True)
        try:
            handle.wait(timedelta(seconds=NOTED_AFTER))
        except RuntimeError:  # too late, or an error that the next wait raises again
            _leave_note(note)
            handle.wait()
    except RuntimeError as error:
        _leave_note(note)
        absent = _absent(note, ranks)
        if not absent:
            raise
        told = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
        raise RuntimeError(
            f"{told} did not come to {where}, where this rank has waited for them: "
            + (_last_words(absent) or _WHY_ABSENT)
        ) from error
    return values


_WHY_ABSENT = (
    "expected step() equally often on all ranks that have parts or copies of a parameter. A rank that "
    "does not come has ended, has skipped a step, or is busy for longer than the group's timeout"
)


def leave_words(error: Exception) -> None:
    """Tell ``error`` to the ranks that will wait for this one in vain, as it ends its step alone."""
    with contextlib.suppress(RuntimeError):
        _store().set(f"polarstep/words/{dist.get_rank()}", f"{type(error).__name__}: {error}")


def _last_words(ranks: Sequence[int]) -> str:
    """What those of ``ranks`` have left that ended their step alone."""
    with contextlib.suppress(RuntimeError):
        keys = {rank: f"polarstep/words/{rank}" for rank in ranks}
        return "; ".join(
            f"rank {rank}: {_store().get(key).decode()}"
            for rank, key in keys.items()
            if _store().check([key])
        )
    return ""


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _leave_note(note: str) -> None:
    """Say in the store that this rank has come; a store that is gone is no further error."""
    with contextlib.suppress(RuntimeError):
        _store().set(f"{note}/{dist.get_rank()}", "came")


def _absent(note: str, ranks: tuple[int, ...]) -> list[int]:
    """The ranks that have left no note, after some seconds for those that came late."""
    absent, end = list(ranks), time.monotonic() + LOOKED_FOR
    with contextlib.suppress(RuntimeError):
        while absent and time.monotonic() < end:
            absent = [rank for rank in absent if not _store().check([f"{note}/{rank}"])]
            time.sleep(LOOKED_FOR / 30 if absent else 0)
    return absent
