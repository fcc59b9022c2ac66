"""Where runs are made: in processes on this machine, or by the workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from polarstep_lab.suites.parallel import Event, run_in_processes
from polarstep_lab.suites.suite import PlannedRun

if TYPE_CHECKING:
    from polarstep_lab.tune import Objective, StudyProgress, StudySpec

__all__ = ["Home", "Place", "Where", "place_for"]

Where = Literal["home", "ray"]


class Place(Protocol):
    """A place that makes runs. The records do not depend on the place."""

    def make(self, runs: Sequence[PlannedRun], force: bool = False) -> Iterator[Event]:
        """Make all ``runs``, resuming those under way, and yield what they report as it comes.

        A run that fails ends with an event that carries the error; the others go on.
        """

    def tune(
        self,
        spec: StudySpec,
        objective: Objective,
        trials: int,
        on_progress: Callable[[StudyProgress], object],
    ) -> StudyProgress:
        """Bring a study to ``trials`` trials in all, those it already has included."""


@dataclass(frozen=True)
class Home:
    """Processes on this machine, ``workers`` at a time."""

    workers: int = 1

    def make(self, runs: Sequence[PlannedRun], force: bool = False) -> Iterator[Event]:
        """Make ``runs`` in processes with one thread each."""
        return run_in_processes(runs, self.workers, force)

    def tune(
        self,
        spec: StudySpec,
        objective: Objective,
        trials: int,
        on_progress: Callable[[StudyProgress], object],
    ) -> StudyProgress:
        """Share the study among processes; a single worker is this process itself."""
        from polarstep_lab.tune import tune

        return tune(spec, objective, trials, self.workers, on_progress)


@contextmanager
def place_for(where: Where, workers: int | None, device: str = "auto") -> Iterator[Place]:
    """The place of ``--on``, with ``workers`` at a time: by default one at home, or all of a cluster.

    ``device`` is that of the runs.
    """
    if where == "home":
        yield Home(workers or 1)
        return
    from polarstep_lab.suites.on_ray import OnRay

    cluster = OnRay(workers, device)
    try:
        yield cluster
    finally:
        cluster.close()
