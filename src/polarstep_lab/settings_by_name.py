"""Settings by name: how users set them, and the errors for settings that cannot be.

A setting has a dotted name, as ``optimizer.lr`` or ``data.stages.0.steps``, in overrides and in
errors alike.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = ["ConfigError", "explain", "hint", "parse_assignment", "set_at"]


class ConfigError(ValueError):
    """A config that cannot be run; the message names the key, its value and what was expected."""


def hint(name: str, known: Iterable[str]) -> str:
    """``"did you mean …? "`` where ``name`` resembles one of the ``known`` names, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def explain(error: ValidationError) -> str:
    """Every fault that pydantic found, as ``name=value: expected …``."""
    return "; ".join(_fault(fault) for fault in error.errors(include_url=False))


def _fault(fault: Any) -> str:
    kind, given = fault["type"], fault["input"]
    # Where a group has two kinds, one for each benchmark, pydantic puts the kind into the path.
    path = ".".join(str(key) for key in fault["loc"] if key not in ("nanogpt", "cifar10"))
    if kind == "value_error":  # raised by a group of settings, which names them itself
        return str(fault["ctx"]["error"])
    if kind == "unexpected_keyword_argument":
        return f"no setting {path}"
    if kind == "missing":
        return f"{path}: expected a value, there is none"
    expected = fault["msg"]
    if kind == "literal_error":
        expected = "expected one of " + fault["ctx"]["expected"].replace("'", "")
        expected = expected.replace(" or ", ", ")
    for theirs, ours in _PLAINLY.items():
        expected = expected.replace(theirs, ours)
    return f"{path or 'the config'}={given!r}: {expected}"


_PLAINLY = {
    "Input should be": "expected",
    "Tuple should have": "expected",
    " after validation": "",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    "greater than": "above",
    "less than": "below",
}
"""Words of pydantic's messages, and ours."""


def set_at(data: dict[str, Any], path: str, value: Any) -> None:
    """Set the leaf ``path``, as in ``"optimizer.polar.rank"`` or ``"data.stages.0.steps"``."""
    *parents, leaf = path.split(".")
    group: Any = data
    for depth, key in enumerate(parents):
        group = group[_key(group, key, ".".join(parents[:depth]))]
    last = _key(group, leaf, ".".join(parents))
    if isinstance(group[last], dict) and not isinstance(value, Mapping):
        raise ConfigError(
            f"{path}={value!r}: {path} is a group of settings; set one of "
            f"{', '.join(f'{path}.{name}' for name in group[last])}"
        )
    group[last] = value


def _key(group: Any, key: str, name: str) -> Any:
    """The name or the index of a setting within its group, whose own name is ``name``."""
    path = f"{name}.{key}" if name else key
    if not isinstance(group, dict | list):
        raise ConfigError(f"no setting {path}: {name} is the value {group!r}; set {name} itself")
    known = {str(k): k for k in (group if isinstance(group, dict) else range(len(group)))}
    if key not in known:
        raise ConfigError(f"no setting {path}: {hint(key, known)}there is {', '.join(known)}")
    return known[key]


def parse_assignment(text: str) -> tuple[str, Any]:
    """Key and value of ``"key=value"``; the value is JSON, or a string where it is not.

    >>> parse_assignment("optimizer.lr=2e-2"), parse_assignment("optimizer.polar.sketch=kaczmarz")
    (('optimizer.lr', 0.02), ('optimizer.polar.sketch', 'kaczmarz'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"{text!r}: expected KEY=VALUE, as in optimizer.lr=0.02")
    try:
        return key.strip(), json.loads(value)
    except ValueError:  # no JSON, or a number of more digits than Python reads
        return key.strip(), value
