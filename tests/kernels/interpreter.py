"""Triton's interpreter in half of its time, with the same results, and with a GPU's bfloat16.

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

__all__ = ["compute_in_bfloat16", "hasten", "refuse_odd_numbers_of_warps"]


@functools.cache
def hasten() -> None:
    """Spare the interpreter, where it is asked for, what it repeats at each launch and operation."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    call_functions_directly()
    replace_the_language_once()
    do_not_look_for_overflows()
    look_up_types_once()
    make_types_of_blocks_once()
    compare_shapes_of_arrays()
    look_up_conversions()
    return_what_is_no_constant()
    check_sizes_once()
    look_at_functions_once()
    leave_tensors_where_they_are()


def _takes(function: Any, *names: str) -> bool:
    return function is not None and (*inspect.signature(function).parameters,) == names


def call_functions_directly() -> None:
    """A function of triton.language is called with the interpreter's semantic, and by nothing between.

    The interpreter copies the arguments of each call without ``_semantic``, and calls a function that
    looks whether ``_semantic`` is there.
    """
    from triton.runtime import interpreter

    semantic = getattr(interpreter, "interpreter_semantic", None)
    if semantic is None or not _takes(
        getattr(interpreter, "_patch_attr", None), "obj", "name", "member", "builder", "scope"
    ):
        return

    def replace(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        code = getattr(member, "__code__", None)
        looks = getattr(code, "co_qualname", None) == "builtin.<locals>.wrapper"
        function = member.__wrapped__ if looks else member

        def called(*args: Any, _semantic: Any = None, **options: Any) -> Any:
            return function(*args, _semantic=semantic, **options)

        scope.set_attr(obj, name, called)

    interpreter._patch_attr = replace


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
        sizes = shape.values if type(shape) is core.tuple else shape
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in sizes]
        key = (element_ty.name, space, *sizes)
        attributes = of_types.get(key)
        if attributes is None:
            make_type(self, element_ty, shape)
            self.sizes = (*sizes,)
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


def compare_shapes_of_arrays() -> None:
    """Two blocks are brought to one shape by the shapes of their arrays.

    The interpreter looks at each dimension of their types. Blocks of one shape are returned as they are.
    """
    import numpy as np
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    broadcast = getattr(TritonSemantic, "broadcast_impl_value", None)
    if not _takes(broadcast, "self", "lhs", "rhs"):
        return
    common = functools.cache(np.broadcast_shapes)

    def by_arrays(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if not lhs.type.is_block() or not rhs.type.is_block():
            return broadcast(self, lhs, rhs)
        shapes = lhs.handle.data.shape, rhs.handle.data.shape
        if shapes[0] == shapes[1]:
            return lhs, rhs
        if len(shapes[0]) != len(shapes[1]):
            return broadcast(self, lhs, rhs)
        try:
            shape = common(*shapes)
        except ValueError:  # the interpreter says which dimensions differ
            return broadcast(self, lhs, rhs)
        one, other = (
            block
            if here == shape
            else self.make_tensor(
                self.builder.create_broadcast(block.handle, shape),
                core.block_type(block.type.scalar, [*shape]),
            )
            for block, here in zip((lhs, rhs), shapes, strict=True)
        )
        return one, other

    TritonSemantic.broadcast_impl_value = by_arrays


def look_up_conversions() -> None:
    """The operands of each pair of types are converted by a table, and a number is once for each shape.

    The interpreter goes through its rules at each operation. A quotient has rules of its own. Operands
    of two shapes get the type of the result's shape and no more, as numpy repeats their entries itself.
    """
    import numpy as np
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    names = ("lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod")
    convert = getattr(TritonSemantic, "binary_op_type_checking_impl", None)
    if not _takes(convert, "self", *names):
        return
    tensor, numbers, many = core.tensor, (int, float), 1000
    constants: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    common, of_pairs = functools.cache(np.broadcast_shapes), dict[tuple[str, str], Any]()

    def of_one_shape(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        sizes = [block.type.__dict__.get("sizes") for block in (lhs, rhs)]  # None for a number
        if sizes[0] == sizes[1]:
            return lhs, rhs
        if None in sizes:
            shape = sizes[0] or sizes[1]
        elif len(sizes[0]) != len(sizes[1]):
            return self.broadcast_impl_value(lhs, rhs)
        else:
            try:
                shape = common(*sizes)
            except ValueError:  # the interpreter says which dimensions differ
                return self.broadcast_impl_value(lhs, rhs)
        one, other = (
            block
            if here == shape
            else tensor(block.handle, core.block_type(block.type.scalar, [*shape]))
            for block, here in zip((lhs, rhs), sizes, strict=True)
        )
        return one, other

    def with_number(self: Any, block: Any, number: Any) -> tuple[Any, Any]:
        """A block and a number in the type of their computation, the number as a block too."""
        shape = block.handle.data.shape if block.type.is_block() else None
        key = (block.dtype.name, str(number), shape)
        if key not in constants:
            if len(constants) == many:
                constants.clear()
            own = self.to_tensor_type(number)
            dtype = self.computation_type_impl(block.dtype, False, own, True, False)
            constant = self._cast_to_computation_type(number, dtype)
            _, constant = self.broadcast_impl_value(block, constant)
            constant.handle.data.flags.writeable = False  # other operations have it too
            constants[key] = dtype, constant
        dtype, constant = constants[key]
        return self.cast(block, dtype), constant

    def looked_up(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> tuple[Any, Any]:
        one, other = type(lhs), type(rhs)
        if arithmetic_check and not div_or_mod:
            if one is tensor and other is tensor:
                left, right = lhs.dtype, rhs.dtype
                if left.is_ptr() or right.is_ptr():
                    if (allow_lhs_ptr and right.is_int()) or (allow_rhs_ptr and left.is_int()):
                        return of_one_shape(self, lhs, rhs)
                elif left.name == right.name:
                    return of_one_shape(self, lhs, rhs)
                else:
                    pair = left.name, right.name
                    if pair not in of_pairs:
                        of_pairs[pair] = self.computation_type_impl(
                            left, False, right, False, False
                        )
                    dtype = of_pairs[pair]
                    return of_one_shape(self, self.cast(lhs, dtype), self.cast(rhs, dtype))
            elif one is tensor and other in numbers and not lhs.dtype.is_ptr():
                return with_number(self, lhs, rhs)
            elif other is tensor and one in numbers and not rhs.dtype.is_ptr():
                return with_number(self, rhs, lhs)[::-1]
        return convert(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    TritonSemantic.binary_op_type_checking_impl = looked_up


def return_what_is_no_constant() -> None:
    """The value of a ``constexpr``, and what is none, after one look at its type instead of four."""
    from triton.language import core

    unwrap = getattr(core, "_unwrap_if_constexpr", None)
    if not _takes(unwrap, "o"):
        return
    constant = core.constexpr
    plain = frozenset((int, float, bool, str, type(None), core.tensor, core.dtype))

    def unwrapped(o: Any) -> Any:
        kind = type(o)
        if kind is constant:
            return o.value
        return o if kind in plain else unwrap(o)

    core._unwrap_if_constexpr = unwrapped


def check_sizes_once() -> None:
    """That an array's entries are no larger than its type is looked at once for each pair of them."""
    from triton.runtime import interpreter

    handle = getattr(interpreter, "TensorHandle", None)
    check = getattr(handle, "__post_init__", None)
    if not _takes(getattr(handle, "__init__", None), "self", "data", "dtype", "attr"):
        return
    if not _takes(check, "self"):
        return
    known = set[tuple[int, str]]()

    def make(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        pair = data.itemsize, dtype.name
        if pair not in known:
            check(self)
            known.add(pair)

    handle.__init__ = make


def look_at_functions_once() -> None:
    """What arguments a kernel takes, and which type has which name, is found out once."""
    from triton import language
    from triton.runtime import interpreter

    of_name = getattr(language, "str_to_ty", None)
    if getattr(interpreter, "inspect", None) is not inspect or not _takes(of_name, "name", "c"):
        return
    look = functools.cache(inspect.getfullargspec)

    def arguments(function: Any, /, *args: Any, **options: Any) -> dict[str, Any]:
        names = look(function).args
        bound = dict(zip(names, args, strict=False)) | options
        if len(names) == len(bound) == len(args) + len(options):
            return bound
        return inspect.getcallargs(function, *args, **options)  # defaults, or an error

    interpreter.inspect = types.SimpleNamespace(**vars(inspect))
    interpreter.inspect.getfullargspec = look
    interpreter.inspect.getcallargs = arguments
    interpreter.inspect.get_annotations = functools.cache(inspect.get_annotations)
    language.str_to_ty = functools.cache(of_name)


def leave_tensors_where_they_are() -> None:
    """Arguments of a launch are copied to the CPU and back by the interpreter, which no CPU needs."""
    import torch
    from triton.runtime import interpreter

    if torch.cuda.is_available():
        return
    executor = getattr(interpreter, "GridExecutor", None)
    if not _takes(getattr(executor, "_init_args_hst", None), "self", "args_dev", "kwargs"):
        return
    back = getattr(executor, "_restore_args_dev", None)
    if not _takes(back, "self", "args_dev", "args_hst", "kwargs", "kwargs_hst"):
        return
    executor._init_args_hst = lambda self, args_dev, kwargs: (args_dev, kwargs)
    executor._restore_args_dev = lambda self, *both: None


@functools.cache
def compute_in_bfloat16() -> None:
    """Round to bfloat16 and multiply bfloat16 matrices as a GPU does.

    NumPy has no bfloat16. The interpreter keeps the bits of such a number as a 16-bit integer, cuts off
    digits where a GPU rounds to the nearest number, and multiplies and adds the bits as integers. Here
    matrices of bfloat16 are multiplied in float32, and other arithmetic on bfloat16 is refused: kernels
    convert to float32 first.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    cast, dot = builder.cast_impl, builder.create_dot

    def bits_of(x: Any) -> Any:
        x = np.asarray(x, dtype=np.float32)
        bits = x.view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16  # half way to even
        return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)

    def in_float32(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self: Any, src: Any, dst_type: Any) -> Any:
        src, to = in_float32(src), dst_type.scalar
        if to == tl.bfloat16:
            return handle(bits_of(src.data), to)
        return src if src.dtype.scalar == to else cast(self, src, dst_type)

    def multiplied(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return dot(self, in_float32(a), in_float32(b), *others)

    def refusing(compute: Any) -> Any:
        def checked(self: Any, x: Any, *others: Any) -> Any:
            assert x.dtype.scalar != tl.bfloat16, "arithmetic on bfloat16: convert to float32 first"
            return compute(self, x, *others)

        return checked

    builder.cast_impl, builder.create_dot = rounded, multiplied
    builder.binary_op, builder.unary_op = refusing(builder.binary_op), refusing(builder.unary_op)


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
