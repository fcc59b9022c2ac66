"""Which parameter of our optimizer an entry of a checkpoint belongs to.

A wrong match would give a parameter the momentum of another in silence. So :func:`indices` matches the
parameters that the caller gives; else by name, if all have names; else by order, if no name contradicts
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from polarstep.convert.entries import Entry
from polarstep.groups import Group, labelled_params
from polarstep.optimizer import Muon
from polarstep.routing.anatomy import unwrapped

__all__ = ["ParameterPlace", "indices", "places_of"]


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
