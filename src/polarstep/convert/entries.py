"""The entries of a checkpoint: each of its parameters, with its name, its state and its group.

:func:`entries_of` reads them from a ``state_dict()`` and refuses what cannot be converted whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polarstep.convert.formats import FORMATS, Format, source_of
from polarstep.groups import Group
from polarstep.matrix import Layout

__all__ = ["Entry", "check_checkpoint", "entries_of"]

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
        for name, key in zip(_names(group), group["params"], strict=True):
            state = theirs["state"].get(key, {})
            state = {what: value for what, value in state.items() if value is not None}
            entry = Entry(name, state, group, name_of_format)
            _check_tensors(entry, key)
            entries.append(entry)
    _check_keys(theirs)
    return entries


def _names(group: Group) -> list[str | None]:
    """The names of a group's parameters, or ``None`` for each of them if the group has no names.

    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` lists names in place of numbers.
    """
    keys = group["params"]
    named = bool(keys) and all(isinstance(key, str) and not key.isdigit() for key in keys)
    names = group.get("param_names") or (keys if named else [])
    return list(names) or [None] * len(keys)


def check_checkpoint(theirs: object, several: str = "or a list of them") -> None:
    """Raise if ``theirs`` is no ``state_dict()``; ``several``: what the error says about lists."""
    if isinstance(theirs, Mapping) and {"state", "param_groups"} <= set(theirs):
        return
    only = (
        f", only {', '.join(map(repr, list(theirs)[:6]))}"
        if isinstance(theirs, dict) and theirs
        else ""
    )
    raise TypeError(
        f"theirs is a {type(theirs).__name__} without 'state' and 'param_groups'{only}: expected what "
        f"state_dict() of the other optimizer returns, {several}; in a checkpoint of a whole run it is "
        'one of the entries, as checkpoint["optimizer"]'
    )


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
