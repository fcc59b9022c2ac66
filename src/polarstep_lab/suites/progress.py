"""The display of runs: a bar with loss, speed and time left, or plain lines in a log file."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from polarstep_lab.config import RunConfig
from polarstep_lab.records.record import MetricRow, Result
from polarstep_lab.suites.parallel import Event

__all__ = ["ProgressBar", "follow", "how_it_ended", "progress_display"]


def progress_display(console: Console) -> Progress:
    """A display for one or several bars; it stays empty where the output is not a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=console,
        disable=not console.is_terminal,
    )


class ProgressBar:
    """One run in a display: an observer of the training loop."""

    def __init__(
        self, display: Progress, label: str, whole: TaskID | None = None, before: int = 0
    ) -> None:
        """Show a run as ``label``; ``whole`` is the bar of all runs, ``before`` of them are done."""
        self._display, self._label = display, label
        self._whole, self._before, self._steps = whole, before, 1
        self._bar: TaskID | None = None
        self._train = self._val = ""
        self._began = (0.0, 0)
        self._per_step = 0.0
        self._unit = "tok"

    def start(self, config: RunConfig, steps: int, step: int) -> None:
        """Add the bar."""
        self._began, self._steps = (time.perf_counter(), step), steps
        self._bar = self._display.add_task(self._label, total=steps, completed=step, figures="")
        if step:
            self._say(f"{self._label}: goes on after step {step} of {steps}")

    def row(self, row: MetricRow) -> None:
        """Show the latest figures; where the output is not a terminal, print validations."""
        amount = row.tokens if row.tokens is not None else row.images
        self._unit = "tok" if row.tokens is not None else "img"
        if row.step and amount:
            self._per_step = amount / row.step
        if row.kind == "train":
            self._train = f"loss {row.loss:.3f}"
            return
        self._val = _validation(row)
        if self._display.disable:
            self._say(f"{self._label}: step {row.step}  {self._train}  {self._val}".rstrip())

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._bar is None:
            return
        began, first = self._began
        rate = (step - first) * self._per_step / max(1e-9, time.perf_counter() - began)
        figures = f"{self._train} {self._val} {_short(rate)} {self._unit}/s"
        self._display.update(self._bar, completed=step, figures=figures)
        if self._whole is not None:
            self._display.update(self._whole, completed=self._before + step / self._steps)

    def end(self, result: Result | None) -> None:
        """Replace the bar by a line that says how the run ended."""
        if self._bar is not None:
            self._display.remove_task(self._bar)
        if result is not None:
            self._say(f"{self._label}: {how_it_ended(result)}")

    def _say(self, text: str) -> None:
        self._display.console.print(text, highlight=False, markup=False, soft_wrap=True)


def follow(events: Iterable[Event], count: int, console: Console) -> int:
    """Show runs in several processes, a bar for all and one for each; return how many failed."""
    failed = 0
    bars: dict[str, TaskID] = {}
    with progress_display(console) as display:
        whole = display.add_task("all runs", total=count, figures="", visible=count > 0)
        parts: dict[str, float] = {}
        for event in events:
            if event.steps:
                parts[event.label] = event.step / event.steps
                if event.label not in bars:
                    bars[event.label] = display.add_task(event.label, total=None, figures="")
                display.update(bars[event.label], completed=event.step, total=event.steps)
            if event.validation:
                display.update(bars[event.label], figures=_validation(event.validation))
            if event.notice:
                console.print(
                    f"{event.label}: {event.notice}",
                    style="yellow",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
            if event.result or event.error:
                failed += bool(event.error)
                parts[event.label] = 1.0
                told = how_it_ended(event.result) if event.result else f"failed: {event.error}"
                console.print(
                    f"{event.label}: {told}", markup=False, highlight=False, soft_wrap=True
                )
                if event.label in bars:
                    display.remove_task(bars.pop(event.label))
            display.update(whole, completed=round(sum(parts.values()), 2))
    return failed


def _validation(row: MetricRow) -> str:
    """Perplexity or accuracy of a validation, for the bar."""
    if row.perplexity is not None:
        return f"ppl {row.perplexity:.2f}"
    return f"acc {row.accuracy:.1%}" if row.accuracy is not None else ""


def how_it_ended(result: Result) -> str:
    """One line on how a run ended."""
    if result.status != "finished":
        return f"{result.status} at step {result.steps}: {result.message}"
    value = f"{result.value:.2%}" if result.metric == "test_accuracy" else f"{result.value:.3f}"
    name = result.metric.replace("_", " ").replace("val ", "validation ")
    return (
        f"{name} {value} after {result.steps} steps, {result.step_ms:.1f} ms each, "
        f"{result.optimizer_ms_per_step:.1f} ms of them the optimizer's"
    )


def _short(number: float) -> str:
    """A number to three digits with k, M or G.

    >>> _short(1234567.0), _short(950.0)
    ('1.23M', '950')
    """
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g}{letter}"
    return f"{number:.3g}"
