"""Capturing CUDA graphs, and the rules by which the launches of a step are captured and replayed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from polarstep.context import user_stacklevel

__all__ = ["Replays", "captured"]

# A step is captured after this many steps of its kind, when all its kernels are compiled. Launching
# the kernels one by one takes milliseconds of Python.
STEPS_BEFORE_CAPTURE = 1

Kind = tuple[bool, ...]


@contextmanager
def captured(
    graph: torch.cuda.CUDAGraph, beside: torch.cuda.CUDAGraph | None = None
) -> Iterator[None]:
    """Capture into ``graph`` the launches of the block on the current device, without running them.

    The graph shares the memory of the graph ``beside`` it, if given; the two must not run at once.

    Other threads (a loader that pins memory) may use CUDA meanwhile. Freeing a CUDA graph on this
    thread aborts a capture, and Python's collector may do so at any time; it is disabled until the
    capture ends. It is not run beforehand: that takes 0.2 s, a tenth of a whole run on CIFAR-10.
    Cached memory is given back first only if there is no room otherwise, unlike in
    ``torch.cuda.graph``, since everything would have to be allocated again.
    """
    _make_room()
    stream = _stream()
    stream.wait_stream(torch.cuda.current_stream())
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            pool = None if beside is None else beside.pool()
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
    finally:
        if was_enabled:
            gc.enable()


_STREAMS: dict[int, torch.cuda.Stream] = {}


def _stream() -> torch.cuda.Stream:
    """The capture stream of the current device: graphs share memory only within one stream."""
    device = torch.cuda.current_device()
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]


def _make_room() -> None:
    """Free torch's cached memory if the device has less room than that; a capture cannot free it.

    A capture needs about as much as the same launches, run before, have left in the cache.
    """
    free, _ = torch.cuda.mem_get_info()
    if free < torch.cuda.memory_reserved() - torch.cuda.memory_allocated():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Replays:
    """Launches that are the same at every step: run one by one at first, then captured and replayed.

    The ``kind`` of a step says for each of its parts whether the part draws random numbers. Steps of
    two kinds launch different kernels, so each kind has graphs of its own, one for each device. The
    numbers themselves are not drawn in a graph: the caller writes them, and everything else that
    changes from step to step, to tensors that keep their places. A graph is bound to these places, and
    all graphs are dropped when a place changes.
    """

    def __init__(self) -> None:
        self.graphs: dict[Kind, list[torch.cuda.CUDAGraph]] = {}
        self.steps: dict[Kind, int] = {}  # how many steps of each kind there were in these places
        self._places: Any = None
        self._refused = False

    def count(self, kind: Kind, places: object) -> None:
        """Note that there is a step of ``kind``, on tensors whose addresses are in ``places``."""
        if places != self._places:
            self._places, self.steps, self.graphs = places, {}, {}
        self.steps[kind] = self.steps.get(kind, 0) + 1

    def run(
        self,
        kind: Kind,
        launch: Callable[[torch.device], object],
        devices: Sequence[torch.device],
        *,
        repeats: bool = True,
        beside: torch.cuda.CUDAGraph | None = None,
    ) -> None:
        """Replay the step of ``kind`` that was counted last; capture it first, or launch it.

        ``launch(device)`` makes the launches of one device. It must leave the same tensors in the same
        places whether its launches run or are captured. ``repeats``: whether later steps of this kind
        will make the same launches. The graph ``beside``, which never runs at the same time, lends its
        memory.

        If a step cannot be captured, there is one warning, and steps are launched from then on.
        """
        if kind not in self.graphs and repeats and self._can_capture(kind, devices):
            self._capture(kind, launch, devices, beside)
        if kind in self.graphs:
            for graph in self.graphs[kind]:
                graph.replay()
        else:
            for device in devices:
                launch(device)

    def _can_capture(self, kind: Kind, devices: Sequence[torch.device]) -> bool:
        """Whether all devices are GPUs, and all kernels of this kind of step are compiled.

        The kernels of a step that draws no numbers are among those of a step that draws numbers.
        """
        covered = any(
            all(draws or not wanted for wanted, draws in zip(kind, other, strict=True))
            for other in self.graphs
        )
        compiled = covered or self.steps[kind] > STEPS_BEFORE_CAPTURE
        return compiled and not self._refused and all(device.type == "cuda" for device in devices)

    def _capture(
        self,
        kind: Kind,
        launch: Callable[[torch.device], object],
        devices: Sequence[torch.device],
        beside: torch.cuda.CUDAGraph | None,
    ) -> None:
        """Capture a step, a graph for each device; after an error no step is captured any more."""
        others = next(iter(self.graphs.values()), [beside] * len(devices))
        graphs: list[torch.cuda.CUDAGraph] = []
        try:
            for device, other in zip(devices, others, strict=True):
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.device(device), captured(graphs[-1], other), _NoWaiting():  # type: ignore[no-untyped-call]
                    launch(device)
        except Exception as error:
            self._refused = True
            for graph in graphs:
                graph.reset()
            _FAILED.extend(graphs)
            warnings.warn(
                f"a step could not be captured as a CUDA graph ({type(error).__name__}: {error}), so "
                "its kernels are launched one by one, here and in later steps. Expected a polar map "
                "that does not wait for the device; Muon(fused=False) does not try to capture it",
                stacklevel=user_stacklevel(),
            )
        else:
            self.graphs[kind] = graphs


# Graphs whose capture has failed, without their memory. torch's allocator may still refer to them.
_FAILED: list[torch.cuda.CUDAGraph] = []


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise where a number on the device is read, which inside a capture waits for ever.

    CUDA itself would abort the capture, and torch's random generator and allocator would stay as they
    were in the middle of it. After an error raised by Python the capture ends as usual.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        reads = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}
        if reads and any(isinstance(x, Tensor) and x.device.type != "cpu" for x in args):
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))
