"""The display of runs: a bar with loss, speed and time left, or plain lines in a log file."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from types import TracebackType

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
from polarstep_lab.jobs.job import Job
from polarstep_lab.jobs.local import Outcome
from polarstep_lab.records import record
from polarstep_lab.records.record import MetricRow, Result
from polarstep_lab.storage import read_object

__all__ = ["Bar", "Bars", "MetricsTail", "how_it_ended", "progress_display"]


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


class Bar:
    """One run in a display, as an observer of its training loop or from what it writes."""

    def __init__(self, display: Progress, label: str) -> None:
        """Show a run as ``label``, from its start on."""
        self._display, self._label = display, label
        self._bar: TaskID | None = None
        self._train = self._val = ""
        self._began, self._steps = (time.perf_counter(), 0), 1
        self._per_step, self._unit = 0.0, "tok"
        self.share = 0.0
        """The part of the run that is done."""

    def start(self, config: RunConfig | None, steps: int, step: int) -> None:
        """Add the bar."""
        self._began, self._steps = (time.perf_counter(), step), max(1, steps)
        self._bar = self._display.add_task(self._label, total=steps, completed=step, figures="")
        if step:
            self.say(f"goes on after step {step} of {steps}")

    def row(self, row: MetricRow) -> None:
        """Show the latest figures; where the output is not a terminal, print validations."""
        amount = row.tokens if row.tokens is not None else row.images
        self._unit = "tok" if row.tokens is not None else "img"
        if row.step and amount:
            self._per_step = amount / row.step
        if row.kind == "train":
            self._train = f"loss {row.loss:.3f}"
            return
        if row.perplexity is not None:
            self._val = f"ppl {row.perplexity:.2f}"
        elif row.accuracy is not None:
            self._val = f"acc {row.accuracy:.1%}"
        if self._display.disable:
            self.say(f"step {row.step}  {self._train}  {self._val}".rstrip())

    def advance(self, step: int) -> None:
        """Move the bar."""
        self.share = step / self._steps
        if self._bar is None:
            return
        began, first = self._began
        rate = (step - first) * self._per_step / max(1e-9, time.perf_counter() - began)
        figures = f"{self._train} {self._val} {_short(rate)} {self._unit}/s"
        self._display.update(self._bar, completed=step, figures=figures)

    def end(self, result: Result | None) -> None:
        """Replace the bar by a line that says how the run ended."""
        if self._bar is not None:
            self._display.remove_task(self._bar)
        self._bar = None
        if result is not None:
            self.say(how_it_ended(result))

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line about the run, above the bars."""
        self._display.console.print(
            f"{self._label}: {text}", style=style, highlight=False, markup=False, soft_wrap=True
        )


class Bars:
    """A bar for all runs, and one for each that is under way in another process."""

    def __init__(self, console: Console, count: int) -> None:
        """Show ``count`` runs in all."""
        self._display = progress_display(console)
        self._whole = self._display.add_task("all runs", total=count, figures="", visible=count > 1)
        self._shown: dict[str, tuple[Job, Bar, MetricsTail]] = {}
        self._done = 0

    def __enter__(self) -> Bars:
        self._display.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._display.stop()

    def bar(self, label: str) -> Bar:
        """A bar for a run of this process."""
        return Bar(self._display, label)

    def start(self, job: Job) -> None:
        """Show a run from what it writes from now on."""
        self._shown[job.label] = job, self.bar(job.label), MetricsTail(job, from_now_on=True)

    def update(self) -> None:
        """Look at what the runs have written."""
        shares = 0.0
        for _, bar, tail in self._shown.values():
            if tail.steps is None and (steps := tail.find_steps()) is not None:
                bar.start(None, steps, 0)
            rows = tail.rows()
            for row in rows:
                bar.row(row)
            if rows:
                bar.advance(rows[-1].step)
            shares += bar.share
        self._display.update(self._whole, completed=round(self._done + shares, 2))

    def end(self, job: Job, outcome: Outcome) -> None:
        """Say how a run ended."""
        self.update()
        _, bar, _ = self._shown.pop(job.label)
        for notice in outcome.notices:
            bar.say(notice, style="yellow")
        failed = outcome.error
        bar.end(None if failed else Result.load(job.directory))
        if failed:
            bar.say(f"failed: {failed}")
        self.count_one()

    def count_one(self) -> None:
        """One more run is done."""
        self._done += 1
        self._display.update(self._whole, completed=self._done)

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._display.console.print(
            text, style="yellow", markup=False, highlight=False, soft_wrap=True
        )


class MetricsTail:
    """The rows of a run's ``metrics.jsonl``, as they come."""

    def __init__(self, job: Job, from_now_on: bool = False) -> None:
        """Read the run of ``job``, all of it or what it writes ``from_now_on``."""
        self._path = job.directory / record.METRICS
        self._environment = job.directory / record.ENVIRONMENT
        self._read = 0
        if from_now_on and self._path.exists():
            self._read = self._path.stat().st_size
        self.steps: int | None = None
        """The steps of the run, once :meth:`find_steps` has found them."""

    def find_steps(self) -> int | None:
        """How many steps the run has, as soon as it says so."""
        found = read_object(self._environment).get("steps")
        self.steps = found if isinstance(found, int) else None
        return self.steps

    def rows(self) -> list[MetricRow]:
        """The complete rows since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            if (
                file.seek(0, 2) < self._read
            ):  # a resumed run has cut off what is after its checkpoint
                self._read = file.tell()
            file.seek(self._read)
            new = file.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._read += len(complete)
        found = []
        for line in complete.splitlines():
            with suppress(ValueError, TypeError):  # a damaged line is the run's to tell
                found.append(MetricRow.from_dict(json.loads(line)))
        return found


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
