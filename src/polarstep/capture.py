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
def captured(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture into ``graph`` what is launched inside; it does not run yet.

    Another thread (a loader that pins memory) may use CUDA meanwhile. This one must not free a graph:
    that ends the capture with an error, and the garbage collector would do it whenever it pleases to
    an old graph in a cycle. So it collects before, and not during.
    """
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    finally:
        if was_enabled:
            gc.enable()
