"""How long steps take, measured without making the device wait.

On a GPU, events are recorded around each span and read later, when the loss has been fetched for
the log and the device is known to have passed them. On a CPU a clock does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["StepTimer"]


class StepTimer:
    """Spans ``"step"`` and ``"optimizer"`` since the last :meth:`read`."""

    def __init__(self, device: torch.device, cycle: int = 1) -> None:
        """Time on ``device``, where the work of a step repeats after ``cycle`` steps."""
        self._cuda = device.type == "cuda"
        self._cycle = cycle
        self._spans: dict[str, list[float | tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time what runs inside."""
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
        """Milliseconds of a step, since the last read: the median of the means over whole cycles.

        Of the spans there are, where they are fewer than a cycle; NaN where there was none.
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
