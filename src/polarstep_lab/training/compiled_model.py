"""``torch.compile`` once for a process: tuning and seeds build one model after the other.

A compiled module belongs to its instance, and the next run would compile again, for longer than it
trains. A compiled function that takes the model as an argument is kept, and used again for every
model of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar, cast

import torch

__all__ = ["compiled"]

F = TypeVar("F", bound=Callable[..., object])


@cache
def compiled(function: F) -> F:
    """``function`` of a model and its inputs, compiled for each new combination of shapes."""
    # A process that ablates sizes meets more shapes than the eight that torch allows by default,
    # and would fall back to the plain function without a word.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return cast(F, torch.compile(function, dynamic=False))
