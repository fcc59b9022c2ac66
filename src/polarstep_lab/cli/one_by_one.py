"""Planned runs, made in this process one after the other, in one display."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich.console import Console

from polarstep_lab.cli.extras import need
from polarstep_lab.optimizers.peers import find_peer, load
from polarstep_lab.records.record import Result
from polarstep_lab.suites.board import TensorBoard
from polarstep_lab.suites.progress import ProgressBar, progress_display
from polarstep_lab.suites.suite import PlannedRun
from polarstep_lab.train.ranks import Ranks
from polarstep_lab.train.run import Observer, train

__all__ = ["check_peers", "run_one_by_one"]


def check_peers(runs: Sequence[PlannedRun]) -> None:
    """Raise if the package of a peer is missing, before the first run is made."""
    for name in dict.fromkeys(planned.config.rule.peer for planned in runs):
        if name is not None:
            load(find_peer(name))


def run_one_by_one(
    runs: Sequence[PlannedRun],
    resume: bool,
    force: bool,
    tensorboard: bool,
    ranks: Ranks | None = None,
) -> list[Result]:
    """Make ``runs`` one after the other and return their results.

    ``ranks`` are the processes that make each run together; without them this process is alone.
    """
    if tensorboard:
        need("--tensorboard", "tensorboard")
    results = []
    ranks = ranks or Ranks()
    with progress_display(Console(stderr=True, quiet=not ranks.first)) as display:
        whole = display.add_task("all runs", total=len(runs), figures="", visible=len(runs) > 1)
        for done, planned in enumerate(runs):
            observers: list[Observer] = [ProgressBar(display, planned.label, whole, done)]
            if tensorboard:
                observers.append(TensorBoard(planned.directory / "tensorboard"))
            result = train(
                planned.config,
                planned.directory,
                identity=planned.identity,
                resume=resume,
                force=force,
                observers=observers,
                tell=partial(_tell, display.console),
                ranks=ranks,
            )
            results.append(result)
            display.update(whole, completed=done + 1)
    return results


def _tell(console: Console, text: str) -> None:
    """Print what a run has to say, above its progress bar."""
    console.print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
