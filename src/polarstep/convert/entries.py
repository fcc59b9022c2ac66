"""The entries of a checkpoint, and which parameter of our optimizer each of them belongs to.

:func:`entries_of` reads the entries from a ``state_dict()`` and refuses what cannot be converted whole.
A wrong match would give a parameter the momentum of another in silence. So :func:`indices` matches the
parameters that the caller gives; else by name, if all have names; else by order, if no name contradicts
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from polarstep.convert.formats import FORMATS, Format, check_checkpoint, names_in, source_of
from polarstep.groups import Group, labelled_params
from polarstep.matrix import Layout
from polarstep.optimizer import Muon
from polarstep.routing.anatomy import unwrapped

__all__ = ["Entry", "ParameterPlace", "entries_of", "indices", "places_of"]

# Options that change the steps of an element-wise rule and that no rule here has, with remedies.
WITHOUT = {"maximize": "negate the loss", "amsgrad": "to go on without the largest moments"}


@dataclass(frozen=True)
class Entry:
    """One parameter of another optimizer's checkpoint."""

    name: str | None
    state: Mapping[str, Any]
    group: Group
    source: str  # the name of its format

    @property
    def kept(self) -> Format:
        """How the other optimizer names and scales what it keeps."""
        return FORMATS[self.source]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to convert: no tensor, only a flag as in a new state of Moonlight."""
        return not any(isinstance(value, Tensor) for value in self.state.values())

    @property
    def steps(self) -> int | None:
        """The number of steps, where the checkpoint knows it."""
        known = self.state.get(self.kept.counter, self.group.get("step"))
        return None if known is None else int(known)

    @property
    def sums_gradients(self) -> bool:
        """Whether the rule of this parameter keeps a sum or an average of gradients, as Muon does.

        Groups of dion's optimizers name their rule. The momentum of Lion and Dion has the same key as
        Muon's, but is not a sum of gradients; NorMuon's is.
        """
        if not self.group.get("use_muon", self.state.get("use_muon", True)):
            return False
        summed = self.group.get("algorithm", "muon") in ("muon", "normuon")
        return summed and self.kept.second not in self.state

    def layout(self, dimensions: int) -> Layout | None:
        """How the other Muon read a tensor of three or more dimensions; ``None`` if it read none."""
        flat = self.kept.as_matrix or (self.kept.by_kernel and dimensions == 4)
        known = self.kept.by_rank or "flatten" in self.group
        if dimensions < 3 or not known:
            return None
        return "conv" if self.group.get("flatten", flat) else "stack"


def entries_of(theirs: Mapping[str, Any], source: str | None) -> list[Entry]:
    """All parameters of a checkpoint, in the order of its groups."""
    check_checkpoint(theirs)
    entries = []
    for group in theirs["param_groups"]:
        name_of_format = source_of(group, source)
        _check_direction(group)
        for name, key in zip(names_in(group), group["params"], strict=True):
            state = theirs["state"].get(key, {})
            state = {what: value for what, value in state.items() if value is not None}
            entry = Entry(name, state, group, name_of_format)
            _check_tensors(entry, key)
            entries.append(entry)
    _check_keys(theirs)
    return entries


def _check_direction(group: Group) -> None:
    """Raise for options that change the steps of an element-wise rule, and that no rule has here."""
    for option, remedy in WITHOUT.items():
        if group.get(option):
            raise ValueError(
                f"{option}=True in a group of the checkpoint: expected False, as no rule here has it; "
                f'{remedy}, set theirs["param_groups"][…]["{option}"] = False and convert again'
            )


def _check_tensors(entry: Entry, key: object) -> None:
    """Raise if tensors that are to be converted are lists, as JSON makes them."""
    kept = entry.kept
    for what in {kept.momentum, kept.first, kept.second} & set(entry.state):
        value = entry.state[what]
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{what} of parameter {entry.name or key} is a {type(value).__name__} in the "
                "checkpoint: expected a tensor, as torch.load returns it"
            )


def _check_keys(theirs: Mapping[str, Any]) -> None:
    """Raise if no parameter of the groups has a state under its key, while others have."""
    listed = [key for group in theirs["param_groups"] for key in group["params"]]
    keys = list(theirs["state"])
    if listed and keys and not set(keys) & set(listed):
        raise ValueError(
            f"the state of the checkpoint has the keys {', '.join(map(repr, keys[:3]))}, …, and its "
            f"groups name the parameters {', '.join(map(repr, listed[:3]))}, …: expected the same keys, "
            "or every momentum would start anew; if a file format as JSON has turned numbers into "
            "strings, turn them back"
        )


# --- matching


class ParameterPlace(NamedTuple):
    """One parameter of our optimizer."""

    name: str
    param: Tensor
    group: Group

    @property
    def is_for_muon(self) -> bool:
        """Whether Muon updates the parameter, and no elementwise rule."""
        return bool(self.group["algorithm"] == "muon")


def places_of(optimizer: Muon) -> list[ParameterPlace]:
    """All parameters of our optimizer, in the order in which its ``state_dict()`` numbers them."""
    labelled = zip(optimizer.param_groups, labelled_params(optimizer.param_groups), strict=True)
    return [ParameterPlace(name, p, group) for group, named in labelled for name, p in named]


def indices(
    entries: Sequence[Entry], places: Sequence[ParameterPlace], params: Iterable[Tensor] | None
) -> list[int]:
    """For each entry the index of its place."""
    if params is not None:
        return _of_given(list(params), len(entries), places)
    names = [entry.name for entry in entries if entry.name is not None]
    if not entries or len(names) < len(entries):
        return _by_order(entries, places, "")
    by_name = _by_names(names, places)
    if by_name is not None:
        return by_name
    return _by_order(entries, places, f" ({_obstacle(names, places)}, so names do not match them)")


def _of_given(params: Sequence[Tensor], count: int, places: Sequence[ParameterPlace]) -> list[int]:
    """The places of the caller's ``params``, one for each of ``count`` entries."""
    index = {id(place.param): i for i, place in enumerate(places)}
    unknown = [i for i, p in enumerate(params) if id(p) not in index]
    distinct = len({id(p) for p in params})
    if unknown or not distinct == len(params) == count:
        what = f"{distinct} different params"
        if distinct == count:
            what = f"{len(params)} params, some of them twice"
        if unknown:
            what = f"params[{unknown[0]}] is not in the optimizer"
        raise ValueError(
            f"{what}: expected the {count} parameters of the checkpoint, each of them in the "
            "optimizer; leave out no parameter, and make the optimizer of the same model"
        )
    return [index[id(p)] for p in params]


def _by_names(names: Sequence[str], places: Sequence[ParameterPlace]) -> list[int] | None:
    """The places of these names, with or without prefixes of wrappers; ``None`` if a name has none."""
    for called in (str, unwrapped):
        index = {called(place.name): i for i, place in enumerate(places)}
        found = [index[called(name)] for name in names if called(name) in index]
        if len(set(found)) == len(names):
            return found
    return None


def _obstacle(names: Sequence[str], places: Sequence[ParameterPlace]) -> str:
    """What keeps :func:`_by_names` from a place for each of these names, for errors."""
    known = {unwrapped(place.name) for place in places}
    for name in names:
        if unwrapped(name) not in known:
            return f"the optimizer has no {name!r}"
    times = Counter(map(unwrapped, names))
    return f"{next(name for name in names if times[unwrapped(name)] > 1)!r} is there twice"


def _by_order(entries: Sequence[Entry], places: Sequence[ParameterPlace], why: str) -> list[int]:
    """All places, in their order. ``why``: what errors say about names that did not match."""
    if len(entries) != len(places):
        raise ValueError(
            f"the checkpoint has {len(entries)} parameters and the optimizer {len(places)}{why}: "
            "expected as many, in the same order; give params= in the order of the other optimizer's "
            "groups, or a list of checkpoints if the other run had two optimizers"
        )
    if any("role" in place.group for place in places):
        without = f"names{why}" if why else "no names of parameters"
        raise ValueError(
            f"the checkpoint has {without}, and muon_for has put them in an order of its "
            "own: expected params=, the parameters in the order of the other optimizer's groups"
        )
    index = {unwrapped(place.name): i for i, place in enumerate(places)}
    for i, entry in enumerate(entries):
        if entry.name is not None and index.get(unwrapped(entry.name), i) != i:
            raise ValueError(
                f"{entry.name!r} is number {i} in the checkpoint and number "
                f"{index[unwrapped(entry.name)]} in the optimizer{why}: expected the same names, or "
                "the same order; give params= in the order of the other optimizer's groups"
            )
    return list(range(len(places)))
