"""What ranks must agree on before a step: which gradients are there, and that no rank has failed.

A gradient may be missing on some ranks only: an expert that got no token there. Collectives would then
pair up with those of another parameter. So every step begins with one small exchange on the host. A
gradient that some rank has, and others miss, counts as zero there. If a rank has failed, all ranks
raise the same error. If a map fails in the midst of a step, the other ranks learn it at the next step.
Until then all ranks go on, with T = 0 for its matrices, so that no rank waits in a collective alone.

Everything else that decides which collectives a step makes is agreed on here, too: whether a hook of
some rank is to see whole matrices, and whether some rank must gather a basis again that all have kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from polarstep.distributed import wire
from polarstep.distributed.layout import Layout

__all__ = ["Agreement", "Report", "agreed", "all_finite"]


@dataclass(frozen=True)
class Report:
    """What a rank tells the others before a step."""

    step: int
    error: Exception | None = None
    hooked: bool = False  # whether hooks look at this step
    outdated: bool = False  # whether the state has another basis than the one kept in memory


@dataclass
class Agreement:
    """The ids of the parameters for which some rank that has a part of them says so."""

    with_gradient: set[int] = field(default_factory=set)
    hooked: set[int] = field(default_factory=set)
    outdated: set[int] = field(default_factory=set)


def agreed(spread: Sequence[tuple[Tensor, Layout]], report: Report) -> Agreement:
    """What the ranks say together.

    ``spread`` has every parameter that other ranks have a part of, with its layout, in the same order on
    all ranks. Raises on all ranks if one of them reports an error, or is at another step. With several
    sets of ranks, as the axes of a mesh, the sets that come later carry the failure on.
    """
    found, step = Agreement(), report.step
    failed: list[tuple[int, ...]] = []
    words = {}
    if report.error is not None:
        words[dist.get_rank()] = f"{type(report.error).__name__}: {report.error}"
    for ranks, params in _by_ranks(spread).items():
        flags = [bool(words or failed), report.hooked, report.outdated, step, -step]
        given = torch.tensor(
            [*map(int, flags), *(int(p.grad is not None) for p in params)],
            dtype=torch.int64,
            device="cpu",
        )
        some_broken, hooked, outdated, last, first, *has = wire.largest(
            given, ranks, on_host=True
        ).tolist()
        if last != -first:
            words[_OF_NO_RANK] = _apart(-first, last)
        if some_broken or last != -first:
            failed.append(ranks)
        ids = [id(p) for p in params]
        found.with_gradient |= {each for each, its in zip(ids, has, strict=True) if its}
        found.hooked |= set(ids) if hooked else set()
        found.outdated |= set(ids) if outdated else set()
    if failed:
        _raise_for_all(failed, words, report.error)
    return found


# The key for words that are not of a single rank.
_OF_NO_RANK = -1


def _apart(first: int, last: int) -> str:
    return (
        f"ranks are at different steps of the optimizer, from {first} to {last}: expected the same step "
        "on all ranks; call step() equally often on each, and load one checkpoint on all"
    )


def _by_ranks(spread: Sequence[tuple[Tensor, Layout]]) -> dict[tuple[int, ...], list[Tensor]]:
    params: dict[tuple[int, ...], list[Tensor]] = {}
    for p, layout in spread:
        params.setdefault(layout.ranks, []).append(p)
    return {ranks: those for ranks, those in params.items() if len(ranks) > 1}


def _raise_for_all(
    failed: list[tuple[int, ...]], words: dict[int, str], error: Exception | None
) -> NoReturn:
    """Raise one error on all ranks, with the ``words`` of every rank that failed.

    Every set of ranks in ``failed`` exchanges its words, as some of its ranks may be in no other set.
    """
    for ranks in failed:
        of_each: list[dict[int, str]] = [{} for _ in ranks]
        dist.all_gather_object(of_each, words, group=wire.side_group_of(ranks))
        words = {rank: word for those in of_each for rank, word in those.items()}
    apart = words.pop(_OF_NO_RANK, None)
    if not words:
        raise RuntimeError(apart)
    among = {*words, *(rank for ranks in failed for rank in ranks)}
    told = "; ".join(f"rank {rank}: {words[rank]}" for rank in sorted(words))
    raise RuntimeError(
        f"the optimizer's step failed on {len(words)} of {len(among)} ranks, so all of them stop: {told}"
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
