"""Times of steps, measured without waiting for the device.

On a GPU, events are recorded around each span. They are read when the loss is fetched for the log,
by which time the device has passed them. On a CPU a clock is read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["StepTimer"]


class StepTimer:
    """Times of named spans, ``"step"`` and ``"optimizer"``, since the last :meth:`read`."""

    def __init__(self, device: torch.device, cycle: int = 1) -> None:
        """Measure on ``device``; the work of a step repeats after ``cycle`` steps."""
        self._cuda = device.type == "cuda"
        self._cycle = cycle
        self._spans: dict[str, list[float | tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Measure the time of the ``with`` block."""
        spans = self._spans.setdefault(name, [])
        if self._cuda:
            start, end = _event(), _event()
            start.record()
            yield
            end.record()
            spans.append((start, end))
        else:
            began = time.perf_counter()
            yield
            spans.append(1e3 * (time.perf_counter() - began))

    def read(self, name: str) -> float:
        """Milliseconds per span since the last read: the median of the means over whole cycles.

        With fewer spans than a cycle, their mean; without any, NaN.
        """
        spans = self._spans.pop(name, [])
        if not spans:
            return float("nan")
        times = [span if isinstance(span, float) else _elapsed(*span) for span in spans]
        cycle = min(self._cycle, len(times))
        firsts = range(0, len(times) - cycle + 1, cycle)
        return statistics.median(statistics.fmean(times[i : i + cycle]) for i in firsts)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _elapsed(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return float(start.elapsed_time(end))
