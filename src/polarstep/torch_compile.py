"""What torch.compile should not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["as_it_is", "constant"]

P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Have it call ``function``, of Python numbers, instead of tracing what it does."""
    marked: Callable[P, R] = torch.compiler.assume_constant_result(function)  # type: ignore[no-untyped-call]
    return marked


def as_it_is(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have it call a function as it is; ``reason`` is what one reads who asked for a full graph."""
    decorator: Callable[[Callable[P, R]], Callable[P, R]]
    decorator = torch.compiler.disable(reason=reason)  # type: ignore[no-untyped-call]
    return decorator
