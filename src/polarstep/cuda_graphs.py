"""Capturing CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["captured", "in_a_graph"]


def in_a_graph() -> bool:
    """Whether what is launched now is captured for later replays, and does not run."""
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


@contextmanager
def captured(
    graph: torch.cuda.CUDAGraph, beside: torch.cuda.CUDAGraph | None = None
) -> Iterator[None]:
    """Capture into ``graph`` what is launched inside on the current device; it does not run yet.

    It works in the memory of the graph ``beside`` it, if there is one; they must not run at a time.

    Another thread (a loader that pins memory) may use CUDA meanwhile. This one must not free a graph:
    that ends the capture with an error, and the garbage collector would do it whenever it pleases to
    an old graph in a cycle. So it does not collect here. Nor before: that takes 0.2 s, a tenth of a
    whole run on CIFAR-10. And cached memory is not given back first, as ``torch.cuda.graph`` does,
    unless there is no room without: everything would be allocated again.
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
    """The one that captures on the current device: graphs share memory that one stream allocated."""
    device = torch.cuda.current_device()
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]


def _make_room() -> None:
    """Give cached memory back where the device has less than that: a capture cannot.

    It needs about what the same launches, not captured, have left in the cache.
    """
    free, _ = torch.cuda.mem_get_info()
    if free < torch.cuda.memory_reserved() - torch.cuda.memory_allocated():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
