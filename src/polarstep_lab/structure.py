"""Frozen dataclasses to plain data and back, with errors that name the key.

A config is a tree of frozen dataclasses. On disk it is JSON; on the command line a leaf is
``optimizer.lr=0.02``. Reading checks every key and every type before anything is built.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["ConfigError", "from_plain", "parse_assignment", "set_at", "to_plain"]

T = TypeVar("T")


class ConfigError(ValueError):
    """A config that cannot be run; the message names the key, its value and what was expected."""


def to_plain(config: Any) -> dict[str, Any]:
    """A dataclass tree as nested dicts; tuples stay tuples."""
    return asdict(config)


def from_plain(kind: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """An instance of the dataclass ``kind`` from nested dicts."""
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where or 'the config'}: expected a group of settings, got {data!r}")
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for key in data:
        if key not in names:
            raise ConfigError(_unknown(key, names, where))
    values = {
        key: _read(hints[key], value, f"{where}.{key}" if where else key)
        for key, value in data.items()
    }
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"{where or 'the config'}: {error}") from None
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _unknown(key: str, names: list[str], where: str) -> str:
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"no setting {where + '.' if where else ''}{key}: {hint}there is {', '.join(names)}"


def _read(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``hint``; int counts as float, a list as a tuple."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value, where)
    if is_dataclass(hint):
        return from_plain(hint, value, where)  # type: ignore[arg-type]
    if origin is Literal:
        if value not in arguments:
            expected = ", ".join(map(str, arguments))
            raise ConfigError(f"{where}={value!r}: expected one of {expected}")
        return value
    if origin is tuple:
        return _read_tuple(arguments, value, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(
            f"{where}={value!r}: expected {hint.__name__}, got {type(value).__name__}"
        )
    return value


def _read_union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    """The first alternative that fits; among dataclasses, the one that knows all the keys."""
    if value is None and type(None) in arguments:
        return None
    others = [hint for hint in arguments if hint is not type(None)]
    if isinstance(value, Mapping) and all(is_dataclass(hint) for hint in others):
        known = [{field.name for field in fields(hint)} for hint in others]
        scores = [len(names & value.keys()) for names in known]
        return from_plain(others[scores.index(max(scores))], value, where)
    error: ConfigError | None = None
    for hint in others:
        try:
            return _read(hint, value, where)
        except ConfigError as problem:
            error = problem
    assert error is not None
    raise error


def _read_tuple(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if isinstance(value, str) and arguments == (str, Ellipsis):
        value = [value]  # one pattern need not be written as a list
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}={value!r}: expected a list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        hints = [arguments[0]] * len(value)
    elif len(arguments) == len(value):
        hints = list(arguments)
    else:
        raise ConfigError(f"{where}={value!r}: expected {len(arguments)} values")
    return tuple(
        _read(hint, item, f"{where}.{index}")
        for index, (hint, item) in enumerate(zip(hints, value, strict=True))
    )


def set_at(data: dict[str, Any], path: str, value: Any) -> None:
    """Set the leaf ``path``, as in ``"optimizer.polar.rank"`` or ``"data.stages.0.steps"``."""
    *parents, leaf = path.split(".")
    node: Any = data
    for depth, key in enumerate(parents):
        node = _child(node, key, ".".join(parents[: depth + 1]))
        if isinstance(node, tuple):
            raise AssertionError("plain data to be changed holds lists, not tuples")
    present = _child(node, leaf, path)
    if isinstance(present, dict) and not isinstance(value, Mapping):
        raise ConfigError(
            f"{path}={value!r}: {path} is a group of settings; set one of "
            f"{', '.join(f'{path}.{name}' for name in present)}"
        )
    node[int(leaf) if isinstance(node, list) else leaf] = value


def _child(node: Any, key: str, path: str) -> Any:
    if isinstance(node, list):
        if not key.isdigit() or int(key) >= len(node):
            raise ConfigError(f"no setting {path}: the list has entries 0 to {len(node) - 1}")
        return node[int(key)]
    parent = path.rpartition(".")[0]
    if not isinstance(node, dict):
        raise ConfigError(f"no setting {path}: {parent} is the value {node!r}")
    if key not in node:
        raise ConfigError(_unknown(key, list(node), parent))
    return node[key]


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
    except json.JSONDecodeError:
        return key.strip(), value
