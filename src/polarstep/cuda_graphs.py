"""Capturing CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["captured", "in_a_graph"]


def in_a_graph() -> bool:
    """Whether kernels launched now are captured for later replays instead of being run."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


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
    """Give cached memory back if the device has less free than cached; a capture cannot do so.

    A capture needs about as much as the same launches, run before, have left in the cache.
    """
    free, _ = torch.cuda.mem_get_info()
    if free < torch.cuda.memory_reserved() - torch.cuda.memory_allocated():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
