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

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from polarstep.distributed import wire
from polarstep.distributed.layout import Layout

__all__ = ["Agreement", "Report", "agreed", "all_finite", "check_alike"]


@dataclass(frozen=True)
class Report:
    """What a rank tells the others before a step."""

    steps: Mapping[tuple[int, ...], int]  # of the groups that share parameters with these ranks
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
    found = Agreement()
    failed: list[tuple[int, ...]] = []
    words = {}
    if report.error is not None:
        words[dist.get_rank()] = f"{type(report.error).__name__}: {report.error}"
    for ranks, params in _by_ranks(spread).items():
        step = report.steps[ranks]
        flags = [bool(words or failed), report.hooked, report.outdated, step, -step]
        given = torch.tensor(
            [*map(int, flags), *(int(p.grad is not None) for p in params)],
            dtype=torch.int64,
            device="cpu",
        )
        some_broken, hooked, outdated, last, first, *has = wire.largest(given, ranks).tolist()
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


def check_alike(spread: Sequence[tuple[Tensor, Layout]]) -> None:
    """Raise on all ranks if they have other parameters in common, or in another order.

    :func:`agreed` exchanges a flag for each parameter, so its exchange would fail or never end.
    """
    failed: list[tuple[int, ...]] = []
    words: dict[int, str] = {}
    for ranks, params in _by_ranks(spread).items():
        shapes = [(tuple(p.shape), str(p.dtype)) for p in params]
        numbers = (len(params), zlib.crc32(repr(shapes).encode()))
        flags = [bool(failed), *numbers, *(-number for number in numbers)]
        given = torch.tensor(flags, dtype=torch.int64, device="cpu")
        broken, most, last, least, first = wire.largest(given, ranks).tolist()
        if (most, last) != (-least, -first):
            words[dist.get_rank()] = _told(ranks, shapes)
        if broken or (most, last) != (-least, -first):
            failed.append(ranks)
    if failed:
        _raise_for_all(failed, words, None)


def _told(ranks: tuple[int, ...], shapes: list[tuple[tuple[int, ...], str]]) -> str:
    first = ", ".join(f"{'×'.join(map(str, shape))} {dtype}" for shape, dtype in shapes[:4])
    more = ", …" if len(shapes) > 4 else ""
    return (
        f"{len(shapes)} parameters in common with ranks {ranks}: {first}{more}; expected the same "
        "parameters in the same order on all of them. With process_group=… these are all plain "
        "parameters: give those that one rank has alone to another optimizer"
    )


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
