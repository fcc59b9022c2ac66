"""Whether what is loaded has the form of a ``state_dict``, before anything is read from it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

from polarstep.groups import PER_PARAMETER

__all__ = ["check_groups", "check_state"]

REMEDY = (
    "expected what optimizer.state_dict() returned; where the file is damaged or was edited, load an "
    "earlier checkpoint"
)


def check_groups(state_dict: object) -> None:
    """Raise if ``state_dict`` is not an optimizer's, or its groups cannot be parameter groups."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        only = ""
        if isinstance(state_dict, Mapping) and state_dict:
            only = f", only {', '.join(map(repr, list(state_dict)[:6]))}"
        raise TypeError(
            f"state_dict is a {type(state_dict).__name__} without 'state' and 'param_groups'{only}: "
            "expected what optimizer.state_dict() returned; in a checkpoint of a whole run it is one of "
            'the entries, as checkpoint["optimizer"]'
        )
    groups = state_dict["param_groups"]
    if not isinstance(groups, list | tuple):
        raise TypeError(
            f"'param_groups' of the checkpoint is {_told(groups)}, and not a list: {REMEDY}"
        )
    for index, group in enumerate(groups):
        _check_group(f"group {index} of the checkpoint", group)


def _check_group(title: str, group: object) -> None:
    """Raise if ``group`` is not a dict with a list of parameters."""
    if not isinstance(group, dict):
        raise TypeError(f"{title} is {_told(group)}, and not a dict: {REMEDY}")
    if "params" not in group:
        only = ", ".join(map(repr, list(group)[:6])) or "nothing"
        raise ValueError(f"{title} has no 'params', only {only}: {REMEDY}")
    for key in ("params", *PER_PARAMETER):
        found = group.get(key)
        if not isinstance(found, list | tuple) and not (found is None and key != "params"):
            raise TypeError(f"{title} has {key}={found!r}, and not a list: {REMEDY}")
    bad = [p for p in group["params"] if not isinstance(p, Hashable)]
    if bad:
        raise TypeError(
            f"{title} has {bad[0]!r} in its 'params', and not the number of a parameter: {REMEDY}"
        )


def check_state(state_dict: Mapping[str, Any]) -> None:
    """Raise if the state of a parameter in the groups of ``state_dict`` is not a dict."""
    state = state_dict["state"]
    if not isinstance(state, Mapping):
        raise TypeError(f"'state' of the checkpoint is {_told(state)}, and not a dict: {REMEDY}")
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            if key in state and not isinstance(state[key], Mapping):
                raise TypeError(
                    f"the state of parameter {key!r} in the checkpoint is {_told(state[key])}, and not "
                    f"a dict: {REMEDY}"
                )


def _told(found: object) -> str:
    """The kind of a value that is out of place."""
    return "None" if found is None else f"a {type(found).__name__}"
