"""What ranks must agree on before a step: which gradients are there, and that no rank has failed.

A gradient may be missing on some ranks only: an expert that got no token there. Collectives would then
pair up with those of another parameter. So every step begins with one small exchange on the host. A
gradient that some rank has, and others miss, counts as zero there. If a rank has failed, all ranks
raise the same error. If a map fails in the midst of a step, the other ranks learn it at the next step.
Until then all ranks go on, with T = 0 for its matrices, so that no rank waits in a collective alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from polarstep.distributed import wire
from polarstep.distributed.layout import Layout

__all__ = ["agreed", "all_finite"]


def agreed(
    spread: Sequence[tuple[Tensor, Layout]], step: int, error: Exception | None = None
) -> set[int]:
    """The ids of the parameters for which some rank has a gradient.

    ``spread`` has every parameter that other ranks have a part of, with its layout, in the same order on
    all ranks. Raises on all ranks if one of them gives an ``error``, or is at another ``step``.
    """
    found: set[int] = set()
    failed: list[tuple[int, ...]] = []
    apart: tuple[int, int] | None = None
    for ranks, params in _by_ranks(spread).items():
        broken = error is not None or bool(failed)
        flags = [int(broken), step, -step, *(int(p.grad is not None) for p in params)]
        given = torch.tensor(flags, dtype=torch.int64, device="cpu")
        most = wire.largest(given, ranks, on_host=True).tolist()
        if most[0]:
            failed.append(ranks)
        if most[1] != -most[2]:
            apart = (-most[2], most[1])
        found |= {id(p) for p, has in zip(params, most[3:], strict=True) if has}
    if failed:
        _raise_for_all(failed[0], error)
    if error is not None:
        raise error
    if apart is not None:
        raise RuntimeError(
            f"ranks are at different steps of the optimizer, from {apart[0]} to {apart[1]}: expected "
            "the same step on all ranks; call step() equally often on each, and load one checkpoint "
            "on all"
        )
    return found


def _by_ranks(spread: Sequence[tuple[Tensor, Layout]]) -> dict[tuple[int, ...], list[Tensor]]:
    params: dict[tuple[int, ...], list[Tensor]] = {}
    for p, layout in spread:
        params.setdefault(layout.ranks, []).append(p)
    return {ranks: those for ranks, those in params.items() if len(ranks) > 1}


def _raise_for_all(ranks: tuple[int, ...], error: Exception | None) -> None:
    """Raise one error, with the words of every rank that failed."""
    words: list[str | None] = [None] * len(ranks)
    mine = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(words, mine, group=wire.side_group_of(ranks))
    told = [f"rank {rank}: {word}" for rank, word in zip(ranks, words, strict=True) if word]
    raise RuntimeError(
        f"the optimizer's step failed on {len(told)} of {len(ranks)} ranks, so all of them stop: "
        f"{'; '.join(told) or 'on a rank of another mesh'}"
    ) from error


def all_finite(flags: Iterable[tuple[Tensor, Layout]]) -> None:
    """Combine flags over the ranks, in place: true where the gradient is finite on all of them.

    One exchange for each device and set of ranks, on the device; the host does not wait.
    """
    together: dict[tuple[tuple[int, ...], torch.device], list[Tensor]] = {}
    for flag, layout in flags:
        if len(layout.ranks) > 1:
            together.setdefault((layout.ranks, flag.device), []).append(flag)
    for (ranks, _), those in together.items():
        bad = wire.largest((~torch.stack(those)).to(torch.int32), ranks)
        for flag, value in zip(those, bad.unbind(), strict=True):
            flag.copy_(value == 0)
