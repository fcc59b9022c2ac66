"""Options of a parameter group as plain data, for checkpoints.

A polar map, a transform, a precision or a function in a group becomes one string of JSON, and is read
back from it. Strings go through ``torch.load(weights_only=True)`` and through every option of
``torch.distributed.checkpoint``, which refuse objects.

>>> from polarstep import NewtonSchulz
>>> text = encoded(NewtonSchulz(3))
>>> text
'{"class": "NewtonSchulz", "options": {"steps": 3, "coefficients": "quintic", ...}}'
>>> decoded(text) == NewtonSchulz(3)
True

Only classes that are defined in this process are built, and only polar maps, finders, sketches and
transforms: a checkpoint cannot name code to run. A function, and an object whose options are not plain,
is stored by its name alone; the optimizer that loads the checkpoint must have it, and keeps its own.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

import torch

from polarstep.optim.groups import LR_SCALE
from polarstep.optim.transforms import Transform
from polarstep.polar import Finder, PolarMap
from polarstep.sketch import Sketch

__all__ = ["decoded", "decoded_group", "encoded", "encoded_group"]

KINDS = (PolarMap, Finder, Sketch, Transform)
PYTHONS_OWN: tuple[type[Any], ...] = (bool, int, float)


def encoded_group(group: dict[str, Any]) -> dict[str, Any]:
    """``group`` with every option as plain data."""
    return {key: encoded(value) for key, value in group.items()}


def decoded_group(group: dict[str, Any], now: dict[str, Any] | None = None) -> dict[str, Any]:
    """The inverse of :func:`encoded_group`; ``now`` is the optimizer's group to be replaced."""
    now = now or {}
    found = {}
    for key, value in group.items():
        # Older checkpoints have lr_scale under its own name.
        ours, option = (LR_SCALE, "lr_scale") if key in (LR_SCALE, "lr_scale") else (key, key)
        found[key] = decoded(value, now.get(ours), option=option)
    return found


def encoded(value: Any) -> Any:
    """A string of JSON for a map, a transform, a ``torch.dtype`` or a function; else ``value``.

    Numbers of NumPy, as from ``numpy.logspace``, become Python's: ``torch.load`` refuses NumPy's.
    """
    if isinstance(value, tuple | list):
        numbers = [_number(each) for each in value]
        return value if all(map(operator.is_, numbers, value)) else type(value)(numbers)
    value = _number(value)
    if isinstance(value, (*KINDS, torch.dtype)) or (callable(value) and hasattr(value, "__name__")):
        return json.dumps(_packed(value), ensure_ascii=False)
    return value


def decoded(value: Any, now: Any = None, option: str = "option") -> Any:
    """The inverse of :func:`encoded`; objects, which older checkpoints have, are returned as given.

    ``now`` is the present value of the option. It is returned where ``value`` names an object that was
    stored by its name alone.
    """
    if not (isinstance(value, str) and value.startswith('{"')):
        return value
    return _unpacked(json.loads(value), now, option)


def _number(value: Any) -> Any:
    """``value``, as an ``int`` or a ``float`` if it is another kind of real number."""
    if not isinstance(value, Real) or type(value) in PYTHONS_OWN:
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _packed(value: Any) -> Any:
    """``value`` in the types of JSON."""
    value = _number(value)
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, KINDS):
        if is_dataclass(value):
            options = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
            if all(_is_plain(option) for option in options.values()):
                packed = {name: _packed(option) for name, option in options.items()}
                return {"class": _path(type(value)), "options": packed}
        return {"object": _path(type(value))}
    if callable(value):
        return {"function": _path(value)}
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
        return getattr(torch, value["dtype"])
    if "class" in value:
        kind = _class_of(value["class"], now, option)
        known = {each.name for each in fields(kind)}
        options = {
            name: _unpacked(each, getattr(now, name, None), option)
            for name, each in value["options"].items()
            if name in known
        }
        return kind(**options)
    if value == {"function": "fan_ratio"}:
        return "fan-ratio"  # it was a function of this package before it had a name
    path = value.get("object") or value.get("function")
    if path == _path(now if "function" in value else type(now)):
        return now
    raise ValueError(
        f"{option} of the checkpoint is {path}, which a checkpoint holds by its name alone: expected "
        f"the optimizer to have it, but its {option} is {now!r}; give {option}= to the optimizer before "
        "load_state_dict"
    )


def _class_of(path: str, now: Any, option: str) -> Any:
    """The class whose :func:`_path` is ``path``: that of ``now``, or else the last one defined."""
    if _path(type(now)) == path:
        return type(now)
    found = [kind for base in KINDS for kind in _below(base) if _path(kind) == path]
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


def _path(value: Any) -> str:
    """Module and name of a class or a function; the name alone for classes of this package.

    A file of the package may then move, and older checkpoints still load.
    """
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", repr(value))
    return name if module.partition(".")[0] == "polarstep" else f"{module}.{name}"
