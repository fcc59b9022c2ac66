"""Times of steps whose work repeats after a few of them."""

import math
import time

import pytest
import torch

from polarstep_lab.train.timing import StepTimer


@pytest.fixture
def spans(monkeypatch):
    """The time that a timer with a cycle finds for spans of these milliseconds."""

    def read(cycle, milliseconds):
        ticks = iter([t for ms in milliseconds for t in (0.0, ms / 1e3)])
        monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
        timer = StepTimer(torch.device("cpu"), cycle)
        for _ in milliseconds:
            with timer.span("step"):
                pass
        return timer.read("step")

    return read


@pytest.mark.parametrize(
    ("cycle", "milliseconds", "expected"),
    [
        (1, [1, 2, 90], 2),  # a median: one that was disturbed does not count
        (4, [7, 1, 1, 1], 2.5),  # not 1, which is what most steps take
        (4, [7, 1, 1, 1, 7, 1, 1, 1, 7, 1, 99, 1, 7, 1, 1], 2.5),  # nor what is left of a cycle
        (4, [7, 1], 4),  # all there is
    ],
)
def test_a_step_takes_its_share_of_a_cycle(spans, cycle, milliseconds, expected):
    assert spans(cycle, milliseconds) == pytest.approx(expected)


def test_without_spans_there_is_no_time():
    assert math.isnan(StepTimer(torch.device("cpu")).read("step"))
