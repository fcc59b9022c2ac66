"""What all ranks agree on before and after a step: one small exchange, and one error on all of them.

A gradient may be missing on some ranks only: an expert that got no token there. Collectives would then
pair up with those of another parameter. So every step begins with one small exchange on the host. A
gradient that some rank has, and others miss, counts as zero there. If a rank has failed, all ranks
raise the same error. If a rank fails in the midst of a step, all ranks go on, with zeros in place of
what it has to send, so that no rank waits in a collective alone. One more small exchange ends the step,
in which they learn of the failure and raise the same error.

Everything else that decides which collectives a step makes is agreed on here, too: which parameters the
ranks have in common, the options of their groups, what the states hold, and whether a hook of some rank
is to see whole matrices.

The first exchange has the same size whatever the ranks say, so that it cannot fail itself: long lists
are told by their checksums. Only where these differ are the lists exchanged.
"""

from __future__ import annotations

import operator
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polarstep.checked_values import is_number
from polarstep.checkpoints.plain import encoded
from polarstep.context import user_stacklevel
from polarstep.groups import NAMELESS, Group, named_params
from polarstep.numerics import widest
from polarstep.others import ELEMENTWISE, options_of
from polarstep.ranks import collectives
from polarstep.ranks.layout import Layout, is_sharded, local
from polarstep.ranks.plans import AskedPlan
from polarstep.state import State

__all__ = ["Agreement", "all_finite"]

Ranks = tuple[int, ...]
Spread = Sequence[tuple[Tensor, Layout]]
# Sums of options may differ by rounding: a learning rate from a cosine may differ in its last digit
# between machines.
ROUNDING = 1e-12


class Agreement:
    """What the ranks of an optimizer say of a step, together."""

    def __init__(self, plan: AskedPlan, bytes_in_flight: int) -> None:
        # The ids of the parameters of which some rank has a gradient, or at which a hook of it looks.
        self.with_gradient: set[int] = set()
        self.hooked: set[int] = set()
        self._options = _GroupOptions(plan, bytes_in_flight)
        self._copies = _Copies()
        self._warned = False
        self._common: list[_Common] = []
        self._made_from: tuple[Spread, list[int]] = ((), [])
        # The sets of ranks to which another set that comes later may have to tell a failure.
        self._back: list[Ranks] = []

    def before_step(
        self,
        groups: list[Group],
        state: State,
        spread: Spread,
        *,
        error: Exception | None,
        hooked: bool,
        everywhere: int,
    ) -> None:
        """Agree on the next step.

        Raises on all ranks if one of them has an ``error``, or if they differ in what must be the same.
        ``spread`` has every parameter that other ranks have a part of, with its layout. ``hooked``:
        whether hooks of this rank look at the step; ``everywhere``: how many of them all must have.

        With several sets of ranks, as the axes of a mesh, sets that come later carry a failure on, and
        then those that came earlier.
        """
        self._common = common = self._in_common(groups, spread)
        told = _Told(groups, state, self._options, error, hooked, everywhere)
        failure = _Failure(error)
        self.with_gradient, self.hooked, self._back = set(), set(), []
        last = set(common[-1].ranks) if common else set()
        goes_back = any(not last.issuperset(its.ranks) for its in common)
        for its in common:
            head = told.meet(its, failed=bool(failure), goes_back=goes_back)
            if head.goes_back:
                self._back.append(its.ranks)
            words = None if head.failed else told.difference(its, head)
            has = [p.grad is not None for p in its.params]
            if not head.failed and words is None and "gradients" in head.differ:
                has, words = _gradients(its)
            if head.failed or words is not None:
                failure.add(its.ranks, words)
                continue
            ids = [id(p) for p in its.params]
            self.with_gradient |= {each for each, its_has in zip(ids, has, strict=True) if its_has}
            self.hooked |= set(ids) if head.hooked else set()
        failure.tell_back(self._back)
        failure.raise_for_all()

    def compare_copies(self, groups: list[Group], layouts: Mapping[int, Layout]) -> None:
        """Begin to compare copies of a parameter; the end of the next step warns if they differ."""
        self._copies.look(self._common, layouts, groups)

    def after_step(self, groups: list[Group], error: Exception | None) -> None:
        """End a step: if some rank has an ``error`` of its share of it, raise on all ranks.

        Warn of parameters that should be copies of one another and are not.
        """
        step = max((group.get("step", 0) for group in groups), default=0)
        where = f"the end of step {max(0, step - 1)} of the optimizer"
        failure, sums, largest = _Failure(error), self._copies.sums(), {}
        for its in self._common:
            sent = [float(bool(failure)), *sums[its.ranks]]
            both = torch.tensor(sent, dtype=torch.float64, device="cpu")
            flag, *largest[its.ranks] = collectives.meet(both, its.ranks, where).tolist()
            if flag:
                failure.add(its.ranks)
        failure.tell_back(self._back)
        failure.raise_for_all()
        drift = self._copies.describe_drift(largest)
        if drift is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{drift} differ between ranks. Copies of a parameter, as with process_group=… or HSDP, "
                "must have the same values and the same gradients on all ranks, or each goes on with a "
                "model of its own. Expected DistributedDataParallel(model), which sends the values of "
                "rank 0 to all and averages the gradients in every backward pass outside no_sync(), or "
                "fully_shard, without set_requires_all_reduce(False) in the last backward pass before a "
                "step; without such copies, give no process_group",
                stacklevel=user_stacklevel(),
            )

    def _in_common(self, groups: list[Group], spread: Spread) -> list[_Common]:
        """What this rank has in common with others, found anew when a group has other parameters."""
        sizes = [len(group["params"]) for group in groups]
        if self._made_from[0] is spread and self._made_from[1] == sizes:
            return self._common
        self._made_from = spread, sizes
        return _in_common(groups, spread)


class _Failure:
    """The sets of ranks that know of a failure, and its words by rank."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error
        self._sets: list[Ranks] = []
        self._words: dict[int, str] = {}
        if error is not None:
            self._words[dist.get_rank()] = f"{type(error).__name__}: {error}"

    def __bool__(self) -> bool:
        return bool(self._words or self._sets)

    def add(self, ranks: Ranks, words: str | None = None) -> None:
        """Some of ``ranks`` has failed; or they differ, as ``words`` say."""
        self._sets.append(ranks)
        if words is not None:
            self._words[_OF_NO_RANK] = words

    def tell_back(self, back: Sequence[Ranks]) -> None:
        """Tell it to sets that came before the set in which it was found."""
        for ranks in reversed(back):
            if ranks not in self._sets:
                flag = torch.tensor([float(bool(self._sets))], dtype=torch.float64, device="cpu")
                if collectives.largest_of_ranks(flag, ranks).item():
                    self._sets.append(ranks)

    def raise_for_all(self) -> None:
        """Raise one error on all ranks, with the words of every rank that failed.

        Every set of ranks that knows of it exchanges its words, as some of its ranks may be in no other.
        """
        if not self._sets:
            return
        words = self._words
        for ranks in self._sets:
            words = {rank: word for each in _gathered(words, ranks) for rank, word in each.items()}
        apart = words.pop(_OF_NO_RANK, None)
        if not words:
            raise RuntimeError(apart)
        among = {*words, *(rank for ranks in self._sets for rank in ranks)}
        told = "; ".join(f"rank {rank}: {words[rank]}" for rank in sorted(words))
        raise RuntimeError(
            f"the optimizer's step failed on {len(words)} of {len(among)} ranks, so all of them stop: "
            f"{told}"
        ) from self._error


# The key for words that are not of a single rank.
_OF_NO_RANK = -1


def _gathered(mine: Any, ranks: Ranks) -> list[Any]:
    of_each: list[Any] = [None for _ in ranks]
    dist.all_gather_object(of_each, mine, group=collectives.side_group_of(ranks))
    return of_each


@dataclass(frozen=True)
class _Common:
    """The parameters that this rank has in common with a set of ranks, and their groups."""

    ranks: Ranks
    params: list[Tensor]
    # Each parameter in words: its name if it has one, shape, precision, and the number of its group.
    lines: list[str]
    groups: list[int]  # the numbers of the groups in the optimizer
    checksum: int


def _in_common(groups: list[Group], spread: Spread) -> list[_Common]:
    """What this rank has in common with every set of ranks, in an order that all ranks have."""
    of = {id(p): (i, name) for i, group in enumerate(groups) for name, p in named_params(group)}
    sets: dict[Ranks, list[Tensor]] = {}
    for p, layout in spread:
        sets.setdefault(layout.ranks, []).append(p)
    found = []
    for ranks in sorted(sets, key=lambda ranks: (len(ranks), ranks)):
        params = sets[ranks]
        # A rank may have more groups than others, so groups are numbered in each set of ranks.
        places = {i: place for place, i in enumerate(sorted({of[id(p)][0] for p in params}))}
        lines = []
        for p in params:
            i, name = of[id(p)]
            line = f"{'×'.join(map(str, p.shape))} {p.dtype}"
            line = line if name.startswith(NAMELESS) else f"{name} ({line})"
            lines.append(f"{line} in group {places[i]}")
        found.append(_Common(ranks, params, lines, list(places), zlib.crc32(repr(lines).encode())))
    return found


@dataclass(frozen=True)
class _Head:
    """What the first exchange among a set of ranks has found."""

    failed: bool
    hooked: bool
    goes_back: bool  # whether some rank must tell a failure to a set that came before
    steps: tuple[int, int]  # the first and the last that a rank has come to
    differ: set[str]  # what should be the same on all ranks and is not


@dataclass(frozen=True)
class _Told:
    """What this rank tells the others before a step."""

    groups: list[Group]
    state: State
    options_of: _GroupOptions
    error: Exception | None
    hooked: bool
    everywhere: int

    def options(self, its: _Common) -> list[_Options]:
        """The options of the groups."""
        return [self.options_of.of(i, self.groups[i]) for i in its.groups]

    def meet(self, its: _Common, *, failed: bool, goes_back: bool) -> _Head:
        """Exchange the heads, of one size whatever the ranks have to say.

        What must be the same is sent with its negative: both maxima then agree.
        """
        same = {"params": float(its.checksum), "hooks": float(self.everywhere)}
        same["gradients"] = _checksum(bytes(map(_gradient_code, its.params)))
        same |= dict.fromkeys(("steps", "texts", "numbers", "states"), 0.0)
        size = 0.0
        if self.error is None:  # else the options of a group may be missing
            options = self.options(its)
            weighed = [
                place * k * value
                for place, each in enumerate(options, 1)
                for k, value in enumerate(each.numbers.values(), 1)
            ]
            same["steps"] = float(sum(self.groups[i].get("step", 0) for i in its.groups))
            same["texts"] = _checksum(repr([each.texts for each in options]).encode())
            same["numbers"], size = sum(weighed), sum(map(abs, weighed))
            same["states"] = _checksum(bytes(_state_codes(its, self.groups, self.state)))
        some = [float(failed), float(self.hooked), float(goes_back), size]
        both = [*same.values(), *(-value for value in same.values())]
        sent = torch.tensor([*some, *both], dtype=torch.float64, device="cpu")
        step = max((self.groups[i].get("step", 0) for i in its.groups), default=0)
        found = collectives.meet(sent, its.ranks, f"step {step} of the optimizer").tolist()
        (failed, hooked, goes_back, size), both = found[: len(some)], found[len(some) :]
        most = dict(zip(same, both[: len(same)], strict=True))
        least = dict(zip(same, (-value for value in both[len(same) :]), strict=True))
        allowed = dict.fromkeys(same, 0.0) | {"numbers": ROUNDING * size}
        return _Head(
            bool(failed),
            bool(hooked),
            bool(goes_back),
            (int(least["steps"]), int(most["steps"])),
            {name for name in same if not most[name] - least[name] <= allowed[name]},
        )

    def difference(self, its: _Common, head: _Head) -> str | None:
        """What the ranks should have alike and have not, in words; all of them ask together."""
        if "params" in head.differ:
            return _of_params(its)
        if "steps" in head.differ:
            first, last = head.steps
            return (
                f"ranks are at different steps of the optimizer, from {first} to {last}: expected the "
                "same step on all ranks; call step() equally often on each, and load one checkpoint on "
                "all"
            )
        if head.differ & {"texts", "numbers"}:
            return _of_options(its, self.options(its))
        if "states" in head.differ:
            return _of_states(its, _state_codes(its, self.groups, self.state))
        if "hooks" in head.differ:
            return (
                "a hook that gathers tensors itself, as that of a certificate.Monitor, is on some of "
                f"the ranks {its.ranks} only, and would wait for the others: expected it on all ranks; "
                "make a Monitor on every rank, and give a file or a writer to one of them"
            )
        return None


def _checksum(content: bytes) -> float:
    return float(zlib.crc32(content))


def _gradient_code(p: Tensor) -> int:
    """0: no gradient; 1: one that this rank can use as it is; 2: one that ranks must place anew."""
    grad = p.grad
    if grad is None:
        return 0
    return 2 if is_sharded(grad) and is_sharded(p) and grad.placements != p.placements else 1


def _state_codes(its: _Common, groups: list[Group], state: State) -> list[int]:
    """How many of the entries that ranks exchange the state of each parameter has."""
    names: dict[int, tuple[str, ...]] = {}
    for i in its.groups:
        group = groups[i]
        if group["algorithm"] == "muon":
            transform = group["transform"]
            carried = (*group["polar"].traits.carries, *(transform.carries if transform else ()))
            exchanged = ("momentum_buffer", *carried)
            names |= dict.fromkeys(map(id, group["params"]), exchanged)
    return [
        sum(name in state[p] for name in names.get(id(p), ())) if p in state else 0
        for p in its.params
    ]


def _of_params(its: _Common) -> str:
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


def _of_options(its: _Common, options: list[_Options]) -> str:
    of_each = _gathered([each.told() for each in options], its.ranks)
    for place, mine in enumerate(of_each[0]):
        for option in mine:
            values: dict[str, list[int]] = {}
            for rank, groups in zip(its.ranks, of_each, strict=True):
                values.setdefault(groups[place].get(option, "missing"), []).append(rank)
            if len(values) > 1:
                told = " and ".join(
                    f"{value} on {_ranks_in_words(those)}" for value, those in values.items()
                )
                return (
                    f"{option} of group {options[place].name!r} is {told}: expected the same options on "
                    "all ranks that have parts or copies of a parameter, as they share one step; read "
                    "them from the same configuration on all ranks, and step schedulers equally often"
                )
    return "the options of a group differ between ranks: expected the same on all"


def _of_states(its: _Common, codes: list[int]) -> str:
    of_each = _gathered(codes, its.ranks)
    for i, line in enumerate(its.lines):
        most = max(each[i] for each in of_each)
        less = [rank for rank, each in zip(its.ranks, of_each, strict=True) if each[i] < most]
        if less:
            return (
                f"the optimizer's state of {line} lacks on {_ranks_in_words(less)} what it has on "
                f"others of the ranks {its.ranks}: expected the same entries on all of them; load one "
                "checkpoint on all, or clear the state on all"
            )
    return "the optimizer's state differs between ranks: expected the same entries on all"


def _ranks_in_words(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _gradients(its: _Common) -> tuple[list[bool], str | None]:
    """Which parameters have a gradient on some rank; in words, which gradient cannot be used."""
    codes = [_gradient_code(p) for p in its.params]
    given = torch.tensor([*codes, *(-code for code in codes)], dtype=torch.int64, device="cpu")
    found = collectives.largest_of_ranks(given, its.ranks).tolist()
    most, least = found[: len(codes)], [-each for each in found[len(codes) :]]
    for line, high, low in zip(its.lines, most, least, strict=True):
        if high == 2 and low < 2:
            return [], (
                f"the gradient of {line} is placed otherwise than the parameter, as a sum that is still "
                f"to be made, on some of the ranks {its.ranks} alone: expected it on all of them or "
                "none, as they place it anew together; give p.grad.redistribute(placements="
                "p.placements) before the step, or zeros where it is missing"
            )
    return [high > 0 for high in most], None


def all_finite(flags: Iterable[tuple[Tensor, Layout]]) -> None:
    """Combine flags over the ranks, in place: true where the gradient is finite on all of them.

    One exchange for each device and set of ranks, on the device; the host does not wait.
    """
    together: dict[tuple[Ranks, torch.device], list[Tensor]] = {}
    for flag, layout in flags:
        together.setdefault((layout.ranks, flag.device), []).append(flag)
    for (ranks, _), those in together.items():
        bad = collectives.largest_of_ranks((~torch.stack(those)).to(torch.int32), ranks)
        torch._foreach_copy_(those, (bad == 0).unbind())


# The options that ranks must have alike, as they take parts of one step. "fused" is left out: it says
# how a rank computes its share, and not which share.
OF_MUON = (
    "lr",
    "momentum",
    "momentum_rule",
    "nesterov",
    "polar",
    "weight_decay",
    "shape_scale",
    "layout",
    "split_sizes",
    "split_columns",
    "split_repeats",
    "lr_factor",
    "momentum_dtype",
    "rounding",
    "transform",
    "nonfinite",
    "seed",
    "plan",
)
# Whole numbers of any size, which a sum of numbers would round.
AS_TEXT = ("seed", "split_repeats", "split_sizes", "split_columns")


@dataclass(frozen=True)
class _Options:
    """The options of a group: numbers, and all others as text.

    Numbers that are computed, as a learning rate from a cosine, may differ in their last digit.
    """

    name: str  # of the group
    numbers: Mapping[str, float]
    texts: Mapping[str, str]

    def told(self) -> dict[str, str]:
        """All options as text, by their names."""
        return {**self.texts, **{name: repr(value) for name, value in self.numbers.items()}}


class _GroupOptions:
    """The options of every group of an optimizer, read anew where one is another object."""

    def __init__(self, plan: AskedPlan, bytes_in_flight: int) -> None:
        self._plan, self._bytes = plan, bytes_in_flight
        self._known: dict[int, tuple[list[Any], _Options]] = {}

    def of(self, number: int, group: Group) -> _Options:
        """The options of ``group``, which is the optimizer's group of this number."""
        names: tuple[str, ...] = OF_MUON
        if group["algorithm"] != "muon":
            rule = ELEMENTWISE[group["algorithm"]]
            names = (*options_of(rule), "lr_factor", "nonfinite", "rounding")
        values = [group.get(name) for name in ("algorithm", *names)]
        known = self._known.get(number)
        if known is not None and _are_same(known[0], values):
            return known[1]
        numbers: dict[str, float] = {}
        texts: dict[str, str] = {"bytes_in_flight": str(self._bytes)}
        for name, value in zip(("algorithm", *names), values, strict=True):
            for key, each in _flat(name, value or self._plan if name == "plan" else value):
                if _is_compared_as_number(key, each):
                    numbers[key] = float(each)
                elif not isinstance(each, Tensor):  # the host would wait for a GPU to read it
                    texts[key] = str(encoded(each))
        found = _Options(str(group.get("name", number)), numbers, texts)
        self._known[number] = values, found
        return found


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A sequence of numbers as its entries, with names of their own."""
    if name not in AS_TEXT and isinstance(value, tuple | list):
        for i, each in enumerate(value):
            yield f"{name}[{i}]", each
    else:
        yield name, value


def _is_compared_as_number(name: str, value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.device.type == "cpu"
    return is_number(value) and name not in AS_TEXT


def _are_same(known: list[Any], values: list[Any]) -> bool:
    """Whether all values are the same objects, none of which can have changed."""
    alike = len(known) == len(values) and all(map(operator.is_, known, values))
    return alike and not any(isinstance(each, Tensor | list) for each in values)


# Sums of equal tensors differ by rounding alone, on machines of several kinds. Sums of n independent
# entries of one size differ by about √(2n) entries, and the norm is √n entries.
PART_OF_NORM = 0.02
# What a rank tells that has no part in a comparison: sums and norm of a value, and of a gradient.
_NOTHING = [-torch.inf] * 6


class _Copies:
    """Notices parameters of which ranks hold copies that are none, or whose gradients differ.

    A rank computes some matrices for all others, from its own gradients. So with ``process_group`` all
    ranks must have the same parameters and the same gradients, as with DDP, and so must the copies of
    HSDP. If a backward pass ran without DDP, or in ``no_sync()``, each rank would go on with a model of
    its own, in silence.

    At every step ranks sum one parameter and its gradient, each in its turn: a backward pass without
    DDP's reductions leaves other gradients of all parameters, so that the first of them shows it. The
    sums are sent with the exchange that ends the next step, so that the host waits for no GPU.
    """

    def __init__(self) -> None:
        self._of: Sequence[_Common] = ()
        self._copied: dict[Ranks, list[int]] = {}  # parameters of which there are copies
        # Of the last step, and of this one, for each set of ranks: a parameter, and its sums.
        self._last: dict[Ranks, tuple[str, _Sums]] = {}
        self._now: dict[Ranks, tuple[str, _Sums]] = {}

    def look(
        self, common: Sequence[_Common], layouts: Mapping[int, Layout], groups: Sequence[Group]
    ) -> None:
        """Begin to sum what is compared of this step, of which all ranks have the same number."""
        if common is not self._of:
            self._of, self._now = common, {}
            self._copied = {
                its.ranks: [i for i, p in enumerate(its.params) if layouts[id(p)].has_copies]
                for its in common
            }
        self._last, self._now = self._now, {}
        for its in common:
            copied = self._copied[its.ranks]
            if copied:
                turn, which = divmod(max(groups[i].get("step", 0) for i in its.groups), len(copied))
                p = its.params[copied[which]]
                sums = _sums_of(p, layouts[id(p)], turn)
                self._now[its.ranks] = its.lines[copied[which]], sums

    def sums(self) -> dict[Ranks, list[float]]:
        """What this rank tells each set of ranks of the step before."""
        return {
            its.ranks: self._last[its.ranks][1]() if its.ranks in self._last else _NOTHING
            for its in self._of
        }

    def describe_drift(self, largest: Mapping[Ranks, list[float]]) -> str | None:
        """What differs between ranks, in words; ``largest`` has the largest sums of all ranks."""
        told = []
        for ranks, (line, _) in self._last.items():
            sums = largest[ranks]
            for what, (high, low, norm) in (("values", sums[:3]), ("gradients", sums[3:])):
                if high + low > PART_OF_NORM * norm:
                    told.append(f"the {what} of {line}")
        return " and ".join(told) or None


_Sums = Callable[[], list[float]]


def _sums_of(p: Tensor, layout: Layout, turn: int) -> _Sums:
    """Begin to sum the part of ``p`` whose ``turn`` it is; ranks that hold it as copies compare it."""
    parts = layout.parts
    if not parts or layout.boxes[layout.me] != parts[turn % len(parts)]:
        return lambda: _NOTHING
    X, G = local(p).detach(), p.grad
    sums = torch.zeros(2, 3, dtype=widest(X.device), device=X.device)
    sums[0] = _sums(X)
    if G is not None:
        # A gradient that is placed otherwise is a sum that is still to be made.
        alike = getattr(G, "placements", None) == getattr(p, "placements", None)
        sums[1] = _sums(local(G)) if alike else -torch.inf
    if X.device.type != "cuda":
        return lambda: _usable(sums)
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    host.copy_(sums, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(X.device))

    def arrived() -> list[float]:
        event.synchronize()
        return _usable(host)

    return arrived


def _sums(X: Tensor) -> Tensor:
    """The sum of ``X``, minus that sum, and the norm.

    The largest of the first two over ranks are the highest sum and minus the lowest.
    """
    wide = widest(X.device)
    s = X.sum(dtype=wide)
    return torch.stack([s, -s, torch.linalg.vector_norm(X, dtype=wide)])


def _usable(sums: Tensor) -> list[float]:
    """``sums`` as numbers; a rank with a NaN has no part in what is compared: its sums are −∞."""
    return [float(x) for x in sums.double().nan_to_num(-torch.inf, torch.inf, -torch.inf).flatten()]
