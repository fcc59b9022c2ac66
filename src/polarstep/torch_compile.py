"""Decorators for functions that torch.compile must not trace.

The public decorators, ``torch.compiler.assume_constant_result`` and ``torch.compiler.disable``,
import ``torch._dynamo``, which takes as long as importing torch. Most programs never compile, so these
decorators do without that import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["constant", "not_compiled"]

P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Have torch.compile call ``function`` while tracing, on Python numbers, and keep the result."""
    # All that torch.compiler.assume_constant_result does.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Exclude a function from torch.compile; ``reason`` appears in the fullgraph=True error."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def excluded(*args: P.args, **kwargs: P.kwargs) -> R:
            run: Callable[P, R]
            run = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
            return run(*args, **kwargs)

        # What torch.compiler.disable sets for the error message.
        excluded._torchdynamo_disable = True  # type: ignore[attr-defined]
        excluded._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return excluded

    return decorate
