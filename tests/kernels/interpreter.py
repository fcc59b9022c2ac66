"""Triton's interpreter in half of its time, with the same results.

Most functions here replace a part of the interpreter that repeats work. A version of Triton that does
not have such a part, or has another one in its place, is left as it is.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import types
from typing import Any

__all__ = ["hasten", "refuse_odd_numbers_of_warps"]


@functools.cache
def hasten() -> None:
    """Spare the interpreter, where it is asked for, what it repeats at each launch and operation."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    replace_the_language_once()
    do_not_look_for_overflows()
    look_up_types_once()
    make_types_of_blocks_once()
    leave_equal_shapes_alone()


def _takes(function: Any, *names: str) -> bool:
    return function is not None and (*inspect.signature(function).parameters,) == names


def replace_the_language_once() -> None:
    """Replace the functions of triton.language here and for good.

    The interpreter replaces them at each launch, and at each call of a function within a kernel. That
    takes half of its time.
    """
    from triton import language
    from triton.runtime import interpreter

    replace, scope = (
        getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope")
    )
    if scope is None or not _takes(replace, "fn"):
        return
    # A function that sees both modules which a kernel, or a function of Triton's own, may see.
    seeing = types.FunctionType((lambda: None).__code__, {"tl": language, "core": language.core})
    replace(seeing)
    nothing = scope()
    interpreter._patch_lang = lambda fn: nothing


def do_not_look_for_overflows() -> None:
    """For each sum and product of integers the interpreter computes whether the result overflows.

    It says so only if its ``debug`` is set, which it is not.
    """
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    if builder is not None and not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def look_up_types_once() -> None:
    """To look up one type the interpreter makes a table of all types."""
    from triton.runtime import interpreter

    known = getattr(interpreter, "_get_np_dtype", None)
    if known is not None:
        of_number = functools.cache(known)
        interpreter._get_np_dtype = lambda given: (
            known(given) if given.scalar.is_ptr() else of_number(given.scalar)
        )


def make_types_of_blocks_once() -> None:
    """The type of a block, and the shape of a tensor, are made once for each type of element and shape.

    The interpreter makes and checks them for the result of every operation.
    """
    from triton.language import core

    block_type, tensor = core.block_type, core.tensor
    make_type, make_tensor = block_type.__init__, tensor.__init__
    if not _takes(make_type, "self", "element_ty", "shape"):
        return
    if not _takes(make_tensor, "self", "handle", "type"):
        return
    of_types: dict[tuple[Any, ...], dict[str, Any]] = {}

    def type_once(self: Any, element_ty: Any, shape: Any) -> None:
        space = getattr(element_ty, "address_space", None)
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = (element_ty.name, space, *sizes)
        attributes = of_types.get(key)
        if attributes is None:
            make_type(self, element_ty, shape)
            example = object.__new__(tensor)
            make_tensor(example, None, self)
            of_types[key] = self.__dict__ | {"of_tensors": example.__dict__}
        else:
            self.__dict__.update(attributes)

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        attributes = type.__dict__.get("of_tensors")
        if attributes is None:  # the type of a number, of which there are few
            make_tensor(self, handle, type)
            type.of_tensors = self.__dict__ | {"handle": None}
        else:
            self.__dict__.update(attributes, handle=handle, type=type)

    block_type.__init__, tensor.__init__ = type_once, tensor_once


def leave_equal_shapes_alone() -> None:
    """Two blocks of one shape are returned as they are, without a look at each of their dimensions."""
    from triton.language.semantic import TritonSemantic

    broadcast = getattr(TritonSemantic, "broadcast_impl_value", None)
    if not _takes(broadcast, "self", "lhs", "rhs"):
        return

    def if_shapes_differ(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and [*one.shape] == [*other.shape]:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.broadcast_impl_value = if_shapes_differ


@functools.cache
def refuse_odd_numbers_of_warps() -> None:
    """Refuse a launch whose ``num_warps`` Triton's compiler would refuse; the interpreter drops it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def checked(executor: Any, *args: Any, num_warps: int = 4, **options: Any) -> None:
        assert num_warps in (1, 2, 4, 8, 16, 32), f"num_warps={num_warps} is no power of two"
        launch(executor, *args, **options)

    interpreter.GridExecutor.__call__ = checked
