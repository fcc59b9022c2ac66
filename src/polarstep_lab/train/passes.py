"""Forward and backward passes made fast: compiled once, or recorded as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from polarstep.engines.graphs import captured

__all__ = ["CapturedBackward", "compiled"]

F = TypeVar("F", bound=Callable[..., object])


@cache
def compiled(function: F) -> F:
    """``function`` of a model and its inputs, compiled for each new combination of shapes.

    Tuning and several seeds build one model after the other. A compiled module serves a single
    instance, and compiling it again for each run takes longer than the training. A compiled function
    that takes the model as an argument serves all models of the same shapes.
    """
    # An ablation of sizes has more shapes than the eight that torch compiles by default; beyond
    # its limit torch silently runs the plain function.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return cast(F, torch.compile(function, dynamic=False))


EAGER_RUNS = 3
"""Runs before the capture, in which cuDNN chooses algorithms and libraries allocate workspaces."""


class CapturedBackward:
    """Calls ``work(*inputs)``, and replays a recording of it from the fourth call on.

    A step of a small convolutional network has about two hundred kernels of a few microseconds each.
    Launching them one by one from Python takes longer than running them; a graph records them once and
    replays all with a single call.

    ``work`` calls ``backward`` and returns the loss. The inputs must have the same shapes at every
    call. A replay replaces the gradients of ``parameters``; they cannot accumulate over calls.
    """

    def __init__(self, work: Callable[..., Tensor], parameters: Sequence[nn.Parameter]) -> None:
        """Keep ``work``; the capture happens at the fourth call."""
        self._work = work
        self._parameters = tuple(parameters)
        self._eager_runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: tuple[Tensor, ...] = ()
        self._gradients: tuple[Tensor | None, ...] = ()
        self._loss = torch.empty(0)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Return the loss of ``inputs`` and set the gradients of the parameters."""
        for p in self._parameters:
            p.grad = None
        if self._graph is None:
            if self._eager_runs < EAGER_RUNS:
                self._eager_runs += 1
                return self._work(*inputs)
            self._graph = self._capture(inputs)
        for held, given in zip(self._inputs, inputs, strict=True):
            held.copy_(given)
        self._graph.replay()
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient
        return self._loss.clone()

    def _capture(self, inputs: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        """Record the work. A capture computes nothing, so weights and statistics do not change."""
        self._inputs = tuple(x.clone() for x in inputs)
        graph = torch.cuda.CUDAGraph()
        with captured(graph):
            self._loss = self._work(*self._inputs)
        self._gradients = tuple(p.grad for p in self._parameters)
        return graph
