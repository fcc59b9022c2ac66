"""Options of a parameter group as plain data, for checkpoints.

A polar map, a transform, a precision or a function in a group becomes one string of JSON, and is read
back from it. Strings go through ``torch.load(weights_only=True)`` and through every option of
``torch.distributed.checkpoint``, which refuse objects.

>>> from polarstep import NewtonSchulz
>>> text = encoded(NewtonSchulz(3, "quintic"))
>>> text
'{"class": "NewtonSchulz", "options": {"steps": 3, "coefficients": "quintic", ...}}'
>>> decoded(text) == NewtonSchulz(3, "quintic")
True

Loading builds only polar maps, finders, sketches and transforms whose classes are defined in this
process: a checkpoint cannot name code to run. A function, and a map whose options are not plain, are
stored as their names. The optimizer that loads the checkpoint must have a function or map of that name
already, and keeps it.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

import torch

from polarstep.maps import Finder, PolarMap
from polarstep.maps.sketches import Sketch
from polarstep.momentum import Momentum
from polarstep.transforms import Transform

__all__ = ["KINDS", "decoded", "decoded_group", "encoded", "encoded_group"]

KINDS = (PolarMap, Finder, Sketch, Transform, Momentum)
PYTHONS_OWN: tuple[type[Any], ...] = (bool, int, float)


def encoded_group(group: dict[str, Any]) -> dict[str, Any]:
    """``group`` with every option as plain data."""
    return {key: encoded(value) for key, value in group.items()}


def decoded_group(group: dict[str, Any], now: dict[str, Any] | None = None) -> dict[str, Any]:
    """The inverse of :func:`encoded_group`; ``now`` is the group that the optimizer has at present."""
    now = now or {}
    return {key: decoded(value, now.get(key), option=key) for key, value in group.items()}


def encoded(value: Any) -> Any:
    """A string of JSON for a map, a transform, a ``torch.dtype`` or a function; else ``value``.

    Numbers of NumPy, as from ``numpy.logspace``, become Python's: ``torch.load`` refuses NumPy's.
    """
    if isinstance(value, tuple | list):
        numbers = [pythons_number(each) for each in value]
        return value if all(map(operator.is_, numbers, value)) else type(value)(numbers)
    value = pythons_number(value)
    if isinstance(value, (*KINDS, torch.dtype)) or callable(value):
        return json.dumps(_packed(value), ensure_ascii=False)
    return value


def decoded(value: Any, now: Any = None, option: str = "option") -> Any:
    """The inverse of :func:`encoded`; an object, which a hook may have put there, is returned as given.

    ``now`` is the option's present value. It is returned where ``value`` names a function or an object,
    and ``now`` has that name.
    """
    if not (isinstance(value, str) and value.startswith('{"')):
        return value
    try:
        packed = json.loads(value)
    except json.JSONDecodeError:
        raise _unreadable(value, option) from None
    return _unpacked(packed, now, option)


def _unreadable(value: object, option: str) -> ValueError:
    """The error for text that no ``state_dict`` has."""
    return ValueError(
        f"{option} of the checkpoint is {value!r}, which cannot be read: expected what "
        "optimizer.state_dict() wrote. Where the file is damaged or was edited, load an earlier "
        f"checkpoint, or {_go_on(option)}"
    )


def _go_on(option: str) -> str:
    """The remedy of taking an option out of a checkpoint."""
    return (
        "go on with what the optimizer has: "
        f'for group in state_dict["param_groups"]: group.pop({option!r}, None)'
    )


def _packed(value: Any) -> Any:
    """``value`` in the types of JSON."""
    value = pythons_number(value)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, KINDS):
        if is_dataclass(value):
            options = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
            if all(_is_plain(option) for option in options.values()):
                packed = {name: _packed(option) for name, option in options.items()}
                return {"class": path_of(type(value)), "options": packed}
        return {"object": path_of(type(value))}
    if callable(value):
        return _named(value)
    if isinstance(value, tuple | list):
        return [_packed(each) for each in value]
    return value


def _is_plain(value: Any) -> bool:
    """Whether :func:`_unpacked` returns an equal value."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, KINDS):
        return "class" in _packed(value)
    return value is None or isinstance(value, str | Real | torch.dtype)


def _unpacked(value: Any, now: Any, option: str) -> Any:
    if isinstance(value, list):
        return tuple(_unpacked(each, None, option) for each in value)
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        dtype = getattr(torch, str(value["dtype"]), None)
        if not isinstance(dtype, torch.dtype):
            raise _unreadable(value, option)
        return dtype
    if "class" in value:
        if not isinstance(value["class"], str) or not isinstance(value.get("options"), dict):
            raise _unreadable(value, option)
        kind = _class_of(value["class"], now, option)
        unknown = sorted(
            value["options"].keys() - {each.name for each in fields(kind) if each.init}
        )
        if unknown:
            raise ValueError(
                f"{option} of the checkpoint is a {value['class']} with {', '.join(unknown)}, an option "
                f"that the class does not have here: expected the version that wrote the checkpoint; "
                f"{_go_on(option)}"
            )
        options = {
            name: _unpacked(each, getattr(now, name, None), option)
            for name, each in value["options"].items()
        }
        return kind(**options)
    if value == _named(now):
        return now
    raise ValueError(
        f"{option} of the checkpoint is {value.get('function') or value.get('object')}, which a "
        f"checkpoint holds by its name alone: expected the optimizer to have it, but its {option} is "
        f"{now!r}; give {option}= to the optimizer before load_state_dict, or {_go_on(option)}"
    )


def _named(value: Any) -> dict[str, str]:
    """A function by its module and name, and any other object by its class."""
    if hasattr(value, "__qualname__"):
        return {"function": path_of(value)}
    return {"object": path_of(type(value))}


def path_of(value: Any) -> str:
    """Module and name of a class or a function; the name alone for classes of this package.

    A file of the package may then move, and checkpoints still load.
    """
    module = getattr(value, "__module__", "") or ""
    name = value.__qualname__
    return name if module.partition(".")[0] == "polarstep" else f"{module}.{name}"


def pythons_number(value: Any) -> Any:
    """``value``, as an ``int`` or a ``float`` if it is another kind of real number."""
    if not isinstance(value, Real) or type(value) in PYTHONS_OWN:
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _class_of(path: str, now: Any, option: str) -> Any:
    """The class with this :func:`path_of`: the class of ``now``, or the last one that was defined."""
    if path_of(type(now)) == path:
        return type(now)
    found = [kind for base in KINDS for kind in _below(base) if path_of(kind) == path]
    if not found:
        module = path.rpartition(".")[0]
        remedy = f"import {module}" if module else "install the polarstep that wrote the checkpoint"
        raise ValueError(
            f"{option} of the checkpoint is a {path}: expected a class that is defined in this process; "
            f"{remedy} before load_state_dict"
        )
    return found[-1]


def _below(kind: type[Any]) -> Iterator[type[Any]]:
    """All subclasses of ``kind`` that are dataclasses, in the order of their definition."""
    for each in kind.__subclasses__():
        if is_dataclass(each):
            yield each
        yield from _below(each)
