"""Reads the pickles of CIFAR-10's Python version without unpickling them.

Unpickling calls what the file names, and numpy's arrays trust the state they are given: a changed
byte can crash the process. Here the opcodes are interpreted one by one, and nothing is called. The
result is made of ``None``, bools, numbers, bytes, strings, lists, tuples and dicts. An array of
uint8 comes out as :class:`PickledArray`, its bytes and its shape, checked against each other; a
global name other than the few that such an array needs is an error.
"""

from __future__ import annotations

import math
import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["PickledArray", "PlainPickleError", "read_plain_pickle"]


class PlainPickleError(ValueError):
    """The pickle is damaged, or holds something else than plain data and arrays of uint8."""


@dataclass
class PickledArray:
    """An array of uint8 as it lies in a pickle: ``len(data)`` is the product of ``shape``."""

    shape: tuple[int, ...] = (0,)
    data: bytes = b""
    fortran: bool = False


def read_plain_pickle(raw: bytes) -> Any:
    """The object that ``raw`` is a pickle of; strings of Python 2 are bytes."""
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(raw):
            if opcode.name == "STOP":
                break
            machine.run(opcode.name, argument)
        (result,) = machine.stack
    except PlainPickleError:
        raise
    except (ValueError, LookupError, TypeError, struct.error) as error:
        raise PlainPickleError(f"its pickle is damaged: {error}") from error
    return result


@dataclass(frozen=True)
class _Name:
    """A global name: what unpickling would import."""

    text: str


class _DType:
    """The dtype uint8, the only one there is here."""


class _Mark:
    """A place on the stack that a later opcode looks for."""


_RECONSTRUCT = ("numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct")
_ARRAY, _DTYPE, _ENCODE = "numpy ndarray", "numpy dtype", "_codecs encode"
_NAMES = (*_RECONSTRUCT, _ARRAY, _DTYPE, _ENCODE)

_NUMBERS = ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT")
_TEXTS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
_BYTES = ("SHORT_BINBYTES", "BINBYTES", "BINBYTES8")
_OLD_STRINGS = ("STRING", "SHORT_BINSTRING", "BINSTRING")
_LITERALS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "MARK": _Mark,
}


class _Machine:
    """The stack and the memo of a pickle, and what each opcode does to them."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        stack = self.stack
        if name in _NUMBERS:
            if isinstance(argument, int) and argument.bit_length() > 64:
                raise PlainPickleError(f"it has an integer of {argument.bit_length()} bits")
            stack.append(argument)
        elif name in _TEXTS or name in _BYTES:
            stack.append(argument)
        elif name in _OLD_STRINGS:
            stack.append(argument.encode("latin-1"))
        elif name in _LITERALS:
            stack.append(_LITERALS[name]())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "APPEND":
            self._extend([stack.pop()])
        elif name == "APPENDS":
            self._extend(self._since_mark())
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            self._update([key, value])
        elif name == "SETITEMS":
            self._update(self._since_mark())
        elif name == "LIST":
            stack.append(self._since_mark())
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            items = [stack.pop() for _ in range(int(name[-1]))]
            stack.append(tuple(reversed(items)))
        elif name == "DICT":
            items = self._since_mark()
            stack.append({})
            self._update(items)
        elif name == "GLOBAL":
            stack.append(_named(argument))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            if not isinstance(module, str) or not isinstance(attribute, str):
                raise PlainPickleError("it names something that is not a string")
            stack.append(_named(f"{module} {attribute}"))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _build(stack[-1], state)
        elif name not in ("PROTO", "FRAME"):
            raise PlainPickleError(
                f"refusing the pickle opcode {name}: plain data does not need it"
            )

    def _since_mark(self) -> list[Any]:
        """Take everything above the last mark off the stack, and the mark with it."""
        items = []
        while not isinstance(item := self.stack.pop(), _Mark):
            items.append(item)
        return items[::-1]

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise PlainPickleError(f"it appends to a {type(target).__name__}, expected a list")
        target.extend(items)

    def _update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise PlainPickleError(f"it sets entries of a {type(target).__name__}, expected a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Nothing that contains others: hashing nested tuples can take forever.
            if not isinstance(key, bytes | str | int):
                raise PlainPickleError(f"it has a {type(key).__name__} as a key, expected a string")
            target[key] = value


def _named(text: str) -> _Name:
    """A global name, if it is one of those an array needs."""
    if text not in _NAMES:
        raise PlainPickleError(f"refusing to load {'.'.join(text.split(' ', 1))[:80]}")
    return _Name(text)


def _call(function: Any, arguments: Any) -> Any:
    """What unpickling would get from calling ``function``."""
    name = function.text if isinstance(function, _Name) else ""
    if not isinstance(arguments, tuple):
        raise PlainPickleError(f"it calls with a {type(arguments).__name__}, expected a tuple")
    if name in _RECONSTRUCT and arguments[:1] == (_Name(_ARRAY),):
        return PickledArray()
    if name == _DTYPE and arguments[:1] in (("u1",), (b"u1",)):
        return _DType()
    if name == _ENCODE:  # how Python 3 writes bytes in the protocols of Python 2
        text, *encoding = arguments
        if isinstance(text, str) and encoding in (["latin1"], [b"latin1"]):
            return text.encode("latin-1")
    raise PlainPickleError(f"refusing a call of {name or type(function).__name__}")


def _build(target: Any, state: Any) -> None:
    """Give an array its state: a version, its shape, its dtype, its order and its bytes."""
    if isinstance(target, _DType):
        return  # byte order and the like, which a byte does not have
    if not isinstance(target, PickledArray):
        raise PlainPickleError(f"it sets the state of a {type(target).__name__}, expected an array")
    if not isinstance(state, tuple) or len(state) != 5:
        raise PlainPickleError("an array has a state of another form than numpy writes")
    _, shape, dtype, fortran, data = state
    if not isinstance(dtype, _DType) or not isinstance(data, bytes):
        raise PlainPickleError("an array is not of uint8")
    if not isinstance(shape, tuple) or not all(type(side) is int and side >= 0 for side in shape):
        raise PlainPickleError("an array has a shape that is not made of integers")
    if math.prod(shape) != len(data):
        raise PlainPickleError(f"an array of shape {shape} has {len(data):,} bytes")
    if type(fortran) not in (bool, int) or fortran not in (0, 1):
        raise PlainPickleError("an array is neither in C order nor in Fortran order")
    target.shape, target.data, target.fortran = shape, data, bool(fortran)
