"""Names for the parameters of an added group, and for the group itself."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from polarstep.groups import NAMELESS, Group

__all__ = ["named_uniquely", "with_names"]


def with_names(group: Group, others: Sequence[Group], known: Mapping[int, str]) -> Group:
    """``group`` with names for its parameters if ``others`` have them: torch wants all or none.

    ``known`` has names in the model by the ids of parameters. If another parameter has the name already,
    as an old head that a new head replaces, a number is added.
    """
    if "param_names" in group or not any("param_names" in other for other in others):
        return group
    first = sum(len(other["params"]) for other in others)
    taken = {name for other in others for name in other.get("param_names") or ()}
    names = []
    for i, p in enumerate(group["params"]):
        names.append(_unused(known.get(id(p), f"{NAMELESS}{first + i}"), taken))
        taken.add(names[-1])
    return group | {"param_names": names}


def named_uniquely(group: Group, others: Sequence[Group]) -> Group:
    """``group`` with a ``"name"`` that no other group has: the name given, its role or its algorithm.

    Monitors of learning rates show the name, and Lightning's refuses two groups of one name.
    """
    base = group.get("name") or group.get("role") or group["algorithm"]
    return group | {"name": _unused(base, {other.get("name") for other in others})}


def _unused(base: str, taken: Container[Any]) -> str:
    """``base``, or ``base`` with the first number from 2 on that makes it a name not yet taken."""
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}-{count}"
    return name
