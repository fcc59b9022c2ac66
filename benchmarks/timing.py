"""Timing for the benchmarks: medians of many runs after a warm-up, synchronized with the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

# Short runs are repeated for this long, so that a hiccup of the host is a small part.
LEAST_MILLISECONDS = 100


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int = 30) -> float:
    """Median time of ``run`` as its caller sees it, launches and Python included."""
    for _ in range(8 if device.type == "cuda" else 1):
        run()
    if device.type == "cpu":
        return statistics.median(clock(run) for _ in range(max(3, repeats // 6)))
    first = _median_of(run, 10)
    return _median_of(run, max(repeats, min(1000, round(LEAST_MILLISECONDS / first))))


def _median_of(run: Callable[[], object], repeats: int) -> float:
    torch.cuda.synchronize()
    events = [(timing_event(), timing_event()) for _ in range(repeats)]
    for start, end in events:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def timing_event() -> torch.cuda.Event:
    """An event that has a time, on the current GPU."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def replayed_milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Median time of ``run`` on the device alone: on a GPU replayed as a graph."""
    if device.type == "cpu":
        return milliseconds(run, device)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return milliseconds(graph.replay, device)


def clock(run: Callable[[], object]) -> float:
    """Milliseconds of one call, on a CPU."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def machine(device: torch.device) -> str:
    """The device in words, for the head of a table."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    from polarstep.ops.cpu import has_tiles

    tiles = "bfloat16 tiles" if has_tiles() else "no bfloat16 tiles"
    return f"CPU, {torch.get_num_threads()} threads, {tiles}, torch {torch.__version__}"
