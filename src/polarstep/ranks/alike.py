"""The options of a group that ranks must have alike, as they take parts of one step.

With different options each rank would take its part of another step, or wait in a collective that the
others never make. Numbers are told apart from all other options, since those that are computed, as a
learning rate from a cosine, may differ in their last digit between machines.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from polarstep.checked_values import is_number
from polarstep.checkpoints.plain import encoded
from polarstep.groups import Group
from polarstep.others import ELEMENTWISE, options_of
from polarstep.ranks.plans import AskedPlan
from polarstep.ranks.status import Options

__all__ = ["GroupOptions"]

# "fused" is left out: it says how a rank computes its share, and not which share.
OF_MUON = (
    "lr",
    "momentum",
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


class GroupOptions:
    """The options of every group of an optimizer, read anew where one is another object."""

    def __init__(self, plan: AskedPlan) -> None:
        self._plan = plan
        self._known: dict[int, tuple[list[Any], Options]] = {}

    def of(self, number: int, group: Group) -> Options:
        """The options of ``group``, which is the optimizer's group of this number."""
        names = _names(group)
        values = [group.get(name) for name in names]
        known = self._known.get(number)
        if known is not None and _are_same(known[0], values):
            return known[1]
        found = self._read(str(group.get("name", number)), names, values)
        self._known[number] = values, found
        return found

    def _read(self, title: str, names: Sequence[str], values: Sequence[Any]) -> Options:
        numbers: dict[str, float] = {}
        texts: dict[str, str] = {}
        for name, value in zip(names, values, strict=True):
            if name == "plan":
                value = value or self._plan
            for key, each in _flat(name, value):
                if _is_compared_as_number(key, each):
                    numbers[key] = float(each)
                elif not isinstance(each, Tensor):  # the host would wait for a GPU to read it
                    texts[key] = str(encoded(each))
        return Options(title, numbers, texts)


def _names(group: Group) -> Sequence[str]:
    algorithm = group["algorithm"]
    if algorithm == "muon":
        return ("algorithm", *OF_MUON)
    common = ("lr_factor", "nonfinite", "rounding")
    return ("algorithm", *options_of(ELEMENTWISE[algorithm]), *common)


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
