"""Kernels run compiled where there is a GPU, and through Triton's interpreter where there is none.

The interpreter must be asked for before Triton is imported, so it has a process of its own:
``TRITON_INTERPRET=1 pytest tests/kernels``, which ``make test`` runs beside all the other tests.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")


@functools.cache
def builtin_names(place: Any) -> list[str]:
    """The names of the functions of a module or class that the interpreter replaces by its own."""
    from triton.language import core

    return [name for name, member in inspect.getmembers(place) if core.is_builtin(member)]


@pytest.fixture(scope="session", autouse=True)
def builtins_are_looked_up_once() -> None:
    """Spare Triton's interpreter a quarter of its time.

    At each launch, and at each call of a function within a kernel, it goes through all members of
    triton.language and of its classes for the functions that it replaces. A version of Triton that
    does so by another function is left as it is.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    def patch_builtin(place: Any, builder: Any, scope: Any) -> None:
        for name in builtin_names(place):
            member = getattr(place, name)
            if interpreter.tl.core.is_builtin(member):  # not replaced by a launch around this call
                interpreter._patch_attr(place, name, member, builder, scope)

    known = getattr(interpreter, "_patch_builtin", None)
    if known is not None and [*inspect.signature(known).parameters] == ["pkg", "builder", "scope"]:
        interpreter._patch_builtin = patch_builtin


@pytest.fixture(scope="session", autouse=True)
def num_warps_are_powers_of_two() -> None:
    """Refuse a launch whose ``num_warps`` Triton's compiler would refuse; the interpreter drops it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def checked(executor: Any, *args: Any, num_warps: int = 4, **options: Any) -> None:
        assert num_warps in (1, 2, 4, 8, 16, 32), f"num_warps={num_warps} is no power of two"
        launch(executor, *args, **options)

    interpreter.GridExecutor.__call__ = checked


@pytest.fixture(scope="session", autouse=True)
def overflows_are_not_looked_for() -> None:
    """Spare Triton's interpreter two fifths of its time.

    For each sum and product of integers it computes whether the result overflows. It says so only if
    its ``debug`` is set, which it is not.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    builder = getattr(interpreter, "interpreter_builder", None)
    if builder is not None and not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


@pytest.fixture(scope="session", autouse=True)
def types_are_looked_up_once() -> None:
    """Spare Triton's interpreter a table of all types that it makes to look up one of them."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    known = getattr(interpreter, "_get_np_dtype", None)
    if known is not None:
        of_number = functools.cache(known)
        interpreter._get_np_dtype = lambda given: (
            known(given) if given.scalar.is_ptr() else of_number(given.scalar)
        )


@pytest.fixture(autouse=True)
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU: run TRITON_INTERPRET=1 pytest tests/kernels")
    return torch.device("cpu")
