"""What ranks must agree on before a step: parameters, options, gradients, and that no rank has failed.

A gradient may be missing on some ranks only: an expert that got no token there. Collectives would then
pair up with those of another parameter. So every step begins with one small exchange on the host. A
gradient that some rank has, and others miss, counts as zero there. If a rank has failed, all ranks
raise the same error. If a rank fails in the midst of a step, all ranks go on, with zeros in place of
what it has to send, so that no rank waits in a collective alone. One more small exchange ends the step,
in which they learn of the failure and raise the same error.

Everything else that decides which collectives a step makes is agreed on here, too: which parameters the
ranks have in common, the options of their groups, and whether a hook of some rank is to see whole
matrices.

The first exchange has the same size whatever the ranks say, so that it cannot fail itself: long lists
are told by their checksums. Only where these differ are the lists exchanged.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from polarstep.ranks import collectives
from polarstep.ranks.layout import Layout, is_sharded

__all__ = [
    "Agreement",
    "Common",
    "Options",
    "Report",
    "agreed",
    "all_finite",
    "in_common",
    "stop_together",
]

Ranks = tuple[int, ...]
# Sums of options may differ by rounding: a learning rate from a cosine may differ in its last digit
# between machines.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Options:
    """The options of a group that all ranks must have alike: numbers, and all others as text."""

    name: str  # of the group
    numbers: Mapping[str, float]
    texts: Mapping[str, str]

    def told(self) -> dict[str, str]:
        """All options as text, by their names."""
        return {**self.texts, **{name: repr(value) for name, value in self.numbers.items()}}


@dataclass(frozen=True)
class Common:
    """The parameters that this rank has in common with a set of ranks, and their groups."""

    ranks: Ranks
    params: list[Tensor]
    lines: list[
        str
    ]  # a parameter in words: its name if it has one, shape, precision, number of group
    groups: list[int]  # the numbers of the groups in the optimizer
    checksum: int


@dataclass(frozen=True)
class Report:
    """What a rank tells the others before a step."""

    steps: Sequence[int]  # of all groups
    options: Callable[[int], Options]  # of a group, by its number
    states: Callable[[Common], list[int]]  # a code for each parameter of what its state holds
    error: Exception | None = None
    hooked: bool = False  # whether hooks look at this step
    loaded: bool = False  # whether a state may have come since the last step
    everywhere: int = 0  # the number of hooks that all ranks must have


@dataclass
class Agreement:
    """The ids of the parameters for which some rank that has a part of them says so."""

    with_gradient: set[int] = field(default_factory=set)
    hooked: set[int] = field(default_factory=set)
    loaded: set[int] = field(default_factory=set)
    back: list[Ranks] = field(default_factory=list)
    """The sets of ranks to which another set that comes later may have to tell a failure."""


def in_common(
    spread: Sequence[tuple[Tensor, Layout]], groups: Sequence[Sequence[tuple[str | None, Tensor]]]
) -> list[Common]:
    """What this rank has in common with every set of ranks, in an order that all ranks have.

    ``spread`` has every parameter that other ranks have a part of, with its layout. ``groups`` has the
    parameters of every group, with the names that the user gave them.
    """
    number = {id(p): (i, name) for i, group in enumerate(groups) for name, p in group}
    sets: dict[Ranks, list[Tensor]] = {}
    for p, layout in spread:
        if len(layout.ranks) > 1:
            sets.setdefault(layout.ranks, []).append(p)
    found = []
    for ranks in sorted(sets, key=lambda ranks: (len(ranks), ranks)):
        params = sets[ranks]
        # A rank may have more groups than others, so groups are numbered in each set of ranks.
        places = {i: place for place, i in enumerate(sorted({number[id(p)][0] for p in params}))}
        lines = []
        for p in params:
            i, name = number[id(p)]
            shape = "×".join(map(str, p.shape))
            line = f"{shape} {p.dtype}" if name is None else f"{name} ({shape} {p.dtype})"
            lines.append(f"{line} in group {places[i]}")
        checksum = zlib.crc32(repr(lines).encode())
        found.append(Common(ranks, params, lines, list(places), checksum))
    return found


def agreed(common: Sequence[Common], report: Report) -> Agreement:
    """What the ranks say together.

    Raises on all ranks if one of them reports an error, or if they differ in what must be the same. With
    several sets of ranks, as the axes of a mesh, sets that come later carry a failure on, and then those
    that came earlier.
    """
    found = Agreement()
    failed: list[Ranks] = []
    words: dict[int, str] = {}
    if report.error is not None:
        words[dist.get_rank()] = f"{type(report.error).__name__}: {report.error}"
    last = set(common[-1].ranks) if common else set()
    goes_back = any(not last.issuperset(its.ranks) for its in common)
    for its in common:
        head = _heads(its, report, failed=bool(words or failed), goes_back=goes_back)
        if head.goes_back:
            found.back.append(its.ranks)
        told = None if head.failed else _difference(its, report, head)
        if told is not None:
            words[_OF_NO_RANK] = told
        if head.failed or told is not None:
            failed.append(its.ranks)
            continue
        has = [p.grad is not None for p in its.params]
        if not head.same_gradients:
            has, told = _gradients(its)
            if told is not None:
                words[_OF_NO_RANK] = told
                failed.append(its.ranks)
        ids = [id(p) for p in its.params]
        found.with_gradient |= {each for each, its_has in zip(ids, has, strict=True) if its_has}
        found.hooked |= set(ids) if head.hooked else set()
        found.loaded |= set(ids) if head.loaded else set()
    _tell_back(found.back, failed)
    if failed:
        _raise_for_all(failed, words, report.error)
    return found


def stop_together(
    common: Sequence[Common],
    back: Sequence[Ranks],
    error: Exception | None,
    where: str,
    numbers: Mapping[Ranks, list[float]],
) -> dict[Ranks, list[float]]:
    """End a step: if some rank has an ``error`` of its share of it, raise on all ranks.

    ``back`` is that of the agreement before the step, and ``where`` says in words what has ended.
    Returns the largest of ``numbers`` of each set of ranks, which are sent along.
    """
    failed: list[Ranks] = []
    largest = {}
    for its in common:
        sent = [float(error is not None or bool(failed)), *numbers[its.ranks]]
        both = torch.tensor(sent, dtype=torch.float64, device="cpu")
        flag, *largest[its.ranks] = collectives.meet(both, its.ranks, where).tolist()
        if flag:
            failed.append(its.ranks)
    _tell_back(back, failed)
    if failed:
        words = {} if error is None else {dist.get_rank(): f"{type(error).__name__}: {error}"}
        _raise_for_all(failed, words, error)
    return largest


def _tell_back(back: Sequence[Ranks], failed: list[Ranks]) -> None:
    """Tell a failure to sets that came before the set in which it was found; extends ``failed``."""
    for ranks in reversed(back):
        if ranks not in failed:
            flag = torch.tensor([float(bool(failed))], dtype=torch.float64, device="cpu")
            if collectives.largest_of_ranks(flag, ranks).item():
                failed.append(ranks)


@dataclass(frozen=True)
class _Head:
    """The first exchange among a set of ranks, of one size whatever they have to say."""

    failed: bool
    hooked: bool
    loaded: bool
    goes_back: bool  # whether some rank must tell a failure to a set that came before
    first_step: int
    last_step: int
    same_params: bool
    same_options: bool
    same_gradients: bool
    same_hooks: bool
    same_states: bool


def _heads(its: Common, report: Report, *, failed: bool, goes_back: bool) -> _Head:
    """Exchange the heads. What must be the same is sent with its negative: both maxima then agree."""
    step, texts, states, total, size = 0, 0, 0, 0.0, 0.0
    if report.error is None:  # else the options of a group may be missing
        step = sum(report.steps[i] for i in its.groups)
        options = [report.options(i) for i in its.groups]
        states = zlib.crc32(bytes(report.states(its)))
        texts = zlib.crc32(repr([each.texts for each in options]).encode())
        for place, each in enumerate(options, 1):
            values = list(each.numbers.values())
            total += place * sum(k * value for k, value in enumerate(values, 1))
            size += place * sum(k * abs(value) for k, value in enumerate(values, 1))
    codes = zlib.crc32(bytes(map(_gradient_code, its.params)))
    flags = [failed, report.hooked, report.loaded, goes_back, size]
    same = [step, len(its.params), its.checksum, texts, codes, report.everywhere, states, total]
    given = [float(each) for each in (*flags, *same)] + [-float(each) for each in same]
    sent = torch.tensor(given, dtype=torch.float64, device="cpu")
    step_here = max((report.steps[i] for i in its.groups), default=0)
    found = collectives.meet(sent, its.ranks, f"step {step_here} of the optimizer").tolist()
    *said, size = found[: len(flags)]
    both = found[len(flags) :]
    most, least = both[: len(same)], [-each for each in both[len(same) :]]
    alike = [a == b for a, b in zip(most, least, strict=True)]
    failed, hooked, loaded, goes_back = map(bool, said)
    return _Head(
        failed,
        hooked,
        loaded,
        goes_back,
        first_step=int(least[0]),
        last_step=int(most[0]),
        same_params=alike[1] and alike[2],
        same_options=alike[3] and most[-1] - least[-1] <= ROUNDING * size,
        same_gradients=alike[4],
        same_hooks=alike[5],
        same_states=alike[6],
    )


def _gradient_code(p: Tensor) -> int:
    """0: no gradient; 1: one that this rank can use as it is; 2: one that ranks must place anew."""
    grad = p.grad
    if grad is None:
        return 0
    return 2 if is_sharded(grad) and is_sharded(p) and grad.placements != p.placements else 1


# The key for words that are not of a single rank.
_OF_NO_RANK = -1


def _difference(its: Common, report: Report, head: _Head) -> str | None:
    """What the ranks should have alike and have not, in words; all of them ask together."""
    if not head.same_params:
        return _of_params(its)
    if head.first_step != head.last_step:
        return (
            f"ranks are at different steps of the optimizer, from {head.first_step} to "
            f"{head.last_step}: expected the same step on all ranks; call step() equally often on each, "
            "and load one checkpoint on all"
        )
    if not head.same_options:
        return _of_options(its, report)
    if not head.same_states:
        return _of_states(its, report)
    if not head.same_hooks:
        return (
            "a hook that gathers tensors itself, as that of a certificate.Monitor, is on some of the "
            f"ranks {its.ranks} only, and would wait for the others: expected it on all ranks; make a "
            "Monitor on every rank, and give a file or a writer to one of them"
        )
    return None


def _gathered(mine: Any, ranks: Ranks) -> list[Any]:
    of_each: list[Any] = [None for _ in ranks]
    dist.all_gather_object(of_each, mine, group=collectives.side_group_of(ranks))
    return of_each


def _of_params(its: Common) -> str:
    of_each = _gathered(its.lines, its.ranks)
    alike = 0
    while len({tuple(lines[: alike + 1]) for lines in of_each}) == 1:
        alike += 1
    told = []
    for rank, lines in zip(its.ranks, of_each, strict=True):
        some = ", ".join(lines[alike : alike + 4])
        from_there = f", from number {alike + 1} on" if alike and some else ""
        more = ", …" if len(lines) > alike + 4 else ""
        told.append(
            f"rank {rank}: {len(lines)} parameters in common with ranks {its.ranks}{from_there}"
            f"{': ' if some else ''}{some}{more}"
        )
    return (
        f"{'; '.join(told)}: expected the same parameters in the same groups and order on all of them, "
        "and a group that is added, on all of them. With process_group=… these are all plain "
        "parameters: give those that one rank has alone to another optimizer"
    )


def _of_options(its: Common, report: Report) -> str:
    of_each = _gathered([report.options(i).told() for i in its.groups], its.ranks)
    for place, mine in enumerate(of_each[0]):
        for option in mine:
            values: dict[str, list[int]] = {}
            for rank, groups in zip(its.ranks, of_each, strict=True):
                values.setdefault(groups[place].get(option, "missing"), []).append(rank)
            if len(values) > 1:
                told = " and ".join(
                    f"{value} on rank{'s' if len(those) > 1 else ''} {', '.join(map(str, those))}"
                    for value, those in values.items()
                )
                name = report.options(its.groups[place]).name
                return (
                    f"{option} of group {name!r} is {told}: expected the same options on all ranks that "
                    "have parts or copies of a parameter, as they share one step; read them from the "
                    "same configuration on all ranks, and step schedulers equally often"
                )
    return "the options of a group differ between ranks: expected the same on all"


def _of_states(its: Common, report: Report) -> str:
    of_each = _gathered(report.states(its), its.ranks)
    for i, line in enumerate(its.lines):
        with_most = max(codes[i] for codes in of_each)
        less = [
            str(rank)
            for rank, codes in zip(its.ranks, of_each, strict=True)
            if codes[i] < with_most
        ]
        if less:
            return (
                f"the optimizer's state of {line} lacks on rank{'s' if len(less) > 1 else ''} "
                f"{', '.join(less)} what it has on others of the ranks {its.ranks}: expected the same "
                "entries on all of them; load one checkpoint on all, or clear the state on all"
            )
    return "the optimizer's state differs between ranks: expected the same entries on all"


def _gradients(its: Common) -> tuple[list[bool], str | None]:
    """Which parameters have a gradient on some rank; in words, which gradient cannot be used."""
    codes = [_gradient_code(p) for p in its.params]
    given = torch.tensor([*codes, *(-code for code in codes)], dtype=torch.int64, device="cpu")
    found = collectives.largest_of_ranks(given, its.ranks).tolist()
    most, least = found[: len(codes)], [-each for each in found[len(codes) :]]
    told = None
    for line, high, low in zip(its.lines, most, least, strict=True):
        if high == 2 and low < 2:
            told = (
                f"the gradient of {line} is placed otherwise than the parameter, as a sum that is still "
                f"to be made, on some of the ranks {its.ranks} alone: expected it on all of them or "
                "none, as they place it anew together; give p.grad.redistribute(placements="
                "p.placements) before the step, or zeros where it is missing"
            )
            break
    return [high > 0 for high in most], told


def _raise_for_all(failed: list[Ranks], words: dict[int, str], error: Exception | None) -> NoReturn:
    """Raise one error on all ranks, with the ``words`` of every rank that failed.

    Every set of ranks in ``failed`` exchanges its words, as some of its ranks may be in no other set.
    """
    for ranks in failed:
        of_each = _gathered(words, ranks)
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
    together: dict[tuple[Ranks, torch.device], list[Tensor]] = {}
    for flag, layout in flags:
        if len(layout.ranks) > 1:
            together.setdefault((layout.ranks, flag.device), []).append(flag)
    for (ranks, _), those in together.items():
        bad = collectives.largest_of_ranks((~torch.stack(those)).to(torch.int32), ranks)
        torch._foreach_copy_(those, (bad == 0).unbind())
