"""Descriptions of functions in plain data, so that a checkpoint need not hold the functions.

A function is described by its module and name. Where other functions have the same name, as all lambdas
of a module do, the description also has a hash of the bytecode and the values that the function
encloses:

>>> def times(k):
...     return lambda m, n: k * m / n
>>> described(times(0.5))["values"]
{'k': 0.5}
>>> differs(described(times(0.5)), times(0.5))
''
>>> differs(described(times(0.5)), times(5.0))
"values are {'k': 0.5} there and {'k': 5.0} here"

A ``functools.partial`` is described by its function and arguments. Another object that can be called is
described by its class and its fields: those that a dataclass compares, or what ``__getstate__`` returns.
Of any other object, as a model that a function encloses, only the class is named: it may change during a
run.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from numbers import Integral, Real
from types import CodeType, MethodType
from typing import Any

import torch

__all__ = ["described", "differs", "path_of", "pythons_number"]

PYTHONS_OWN: tuple[type[Any], ...] = (bool, int, float)
DEPTH = 4  # values inside values are described down to this depth: a function may enclose itself


def described(value: Any, depth: int = 0) -> dict[str, Any]:
    """A description of a function, or of an object that can be called, in the types of JSON.

    The key ``"function"``, ``"partial"`` or ``"object"`` says which kind it is. Keys for arguments,
    fields and code are left out where there is nothing to say.
    """
    if isinstance(value, partial):
        return {
            "partial": described(value.func, depth + 1),
            "args": [_told(each, depth + 1) for each in value.args],
            "keywords": {name: _told(each, depth + 1) for name, each in value.keywords.items()},
        }
    if hasattr(value, "__qualname__"):
        told = {"function": path_of(value)}
        if isinstance(value, MethodType) and _is_frozen(value.__self__):
            told["self"] = _told(value.__self__, depth + 1)
        if "<" in value.__qualname__ and depth < DEPTH:  # <lambda>, <locals>: others have this name
            told |= _code_and_values(value, depth)
        return told
    told = {"object": path_of(type(value))}
    if hasattr(value, "__name__"):
        told["name"] = str(value.__name__)
    if not isinstance(value, torch.nn.Module) and (held := _fields(value)) is not None:
        told["fields"] = _told(held, depth + 1)
    return told


def differs(saved: Mapping[str, Any], value: Any) -> str:
    """How ``value`` differs from the description of a saved function; empty if it does not.

    Bytecode of another version of Python is not compared.
    """
    here = json.loads(json.dumps(described(value)))
    if _is_same(saved, here):
        return ""
    if set(saved) != set(here):
        return "another function"
    key = next(key for key in _compared(saved, here) if not _is_same(saved[key], here[key]))
    verb = "are" if key.endswith("s") else "is"
    return f"{key} {verb} {saved[key]!s:.99} there and {here[key]!s:.99} here"


def _is_same(there: Any, here: Any) -> bool:
    if isinstance(there, dict) and isinstance(here, dict):
        same_keys = set(there) == set(here)
        return same_keys and all(_is_same(there[key], here[key]) for key in _compared(there, here))
    if isinstance(there, list) and isinstance(here, list):
        return len(there) == len(here) and all(map(_is_same, there, here))
    # NaN is not equal to itself, but its text is.
    return bool(there == here) or json.dumps(there) == json.dumps(here)


def _compared(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The keys by which two descriptions are compared; both have the same keys."""
    of_code = {"function", "python", "code"} <= set(there)
    other_python = of_code and there["python"] != here["python"]
    return [key for key in there if not (other_python and key in ("python", "code"))]


def path_of(value: Any) -> str:
    """Module and name of a class or a function; the name alone for classes of this package.

    A file of the package may then move, and checkpoints still load.
    """
    module = getattr(value, "__module__", "") or ""
    name = getattr(value, "__qualname__", None) or repr(value)
    return name if module.partition(".")[0] == "polarstep" else f"{module}.{name}"


def pythons_number(value: Any) -> Any:
    """``value``, as an ``int`` or a ``float`` if it is another kind of real number."""
    if not isinstance(value, Real) or type(value) in PYTHONS_OWN:
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _told(value: Any, depth: int) -> Any:
    """``value`` in the types of JSON; of an object that is not plain data, the class alone."""
    value = pythons_number(value)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Enum):
        return {"object": path_of(type(value)), "name": value.name}
    if depth < DEPTH:
        if isinstance(value, tuple | list):
            return [_told(each, depth + 1) for each in value]
        if isinstance(value, dict):
            if all(isinstance(key, str) for key in value):
                return {key: _told(each, depth + 1) for key, each in value.items()}
            return [[_told(key, depth + 1), _told(each, depth + 1)] for key, each in value.items()]
        if isinstance(value, set | frozenset):
            return sorted((_told(each, depth + 1) for each in value), key=json.dumps)
        if isinstance(value, partial) or (callable(value) and hasattr(value, "__qualname__")):
            return described(value, depth)
        if _is_frozen(value):
            return {"object": path_of(type(value)), "fields": _told(_fields(value), depth + 1)}
    return {"object": path_of(type(value))}


def _is_frozen(value: Any) -> bool:
    """Whether ``value`` is an object of a frozen dataclass, which does not change during a run."""
    frozen = is_dataclass(value) and not isinstance(value, type)
    return frozen and bool(type(value).__dataclass_params__.frozen)


def _fields(value: Any) -> Any:
    """What an object holds: what it would pickle, or the fields by which a dataclass compares."""
    if is_dataclass(value):
        return {each.name: getattr(value, each.name) for each in fields(value) if each.compare}
    try:
        return value.__getstate__()
    except Exception:  # an object of any class, which may refuse in any way
        return None


def _code_and_values(function: Any, depth: int) -> dict[str, Any]:
    """A hash of the bytecode of a Python function, its defaults and the values it encloses."""
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    if code is None:
        return {}
    values = dict(getattr(inner, "__kwdefaults__", None) or {})
    defaults = getattr(inner, "__defaults__", None) or ()
    names = code.co_varnames[: code.co_argcount]
    values |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    for name, cell in zip(code.co_freevars, inner.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # a name that has no value yet
            continue
    text = json.dumps(_of_code(code))
    return {
        "python": sys.implementation.cache_tag,  # as cpython-312; each version has its own bytecode
        "code": hashlib.sha256(text.encode()).hexdigest()[:16],
        "values": {name: _told(each, depth + 1) for name, each in values.items()},
    }


def _of_code(code: CodeType) -> list[Any]:
    """What a code object does: its instructions and what they refer to, without file and lines."""
    constants = [
        _of_code(each) if isinstance(each, CodeType) else _constant(each) for each in code.co_consts
    ]
    return [code.co_code.hex(), constants, list(code.co_names), list(code.co_freevars)]


def _constant(value: Any) -> Any:
    """The text of a constant. Sets are sorted: their order changes from process to process."""
    if isinstance(value, frozenset):
        return sorted(map(repr, value))
    return repr(value)
