"""``torch.compile`` for functions that take a model, compiled once per process and shape.

Tuning and several seeds build one model after the other. A compiled module serves a single instance,
and compiling it again for each run takes longer than the training. A compiled function that takes
the model as an argument serves all models of the same shapes.
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
    # An ablation of sizes has more shapes than the eight that torch compiles by default; beyond
    # its limit torch silently runs the plain function.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return cast(F, torch.compile(function, dynamic=False))
