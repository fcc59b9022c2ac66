"""Runs on the workers of a Ray cluster: ``compare``, ``ablate`` and ``tune`` with ``--on ray``.

Ray starts by itself on this machine, or ``RAY_ADDRESS`` names a cluster. A worker is a process with one
GPU, where the cluster has GPUs, or one core. This process, the head, hands out the runs and keeps the
study of a tuning. It holds a conversation with each worker: the worker says how its job goes, or asks
a question, and the head answers.

The job of a worker that died is given to a new worker. A run then goes on from the last checkpoint that
the head's file system has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from polarstep_lab.suites.on_ray.cluster import Cluster
from polarstep_lab.suites.on_ray.runs import make
from polarstep_lab.suites.parallel import Event
from polarstep_lab.suites.suite import PlannedRun

if TYPE_CHECKING:
    from polarstep_lab.tune import Objective, StudyProgress, StudySpec

__all__ = ["OnRay"]


class OnRay:
    """Runs are made by workers of a Ray cluster."""

    def __init__(self, workers: int | None = None, device: str = "auto") -> None:
        """Connect to ``RAY_ADDRESS``, or start Ray on this machine.

        ``workers`` is how many runs are made at a time, by default as many as the cluster has GPUs
        or cores. Runs on the ``device`` cpu take no GPU.
        """
        self._cluster = Cluster(workers, device)

    def close(self) -> None:
        """Leave the cluster; a Ray that was started here ends."""
        self._cluster.close()

    def make(self, runs: Sequence[PlannedRun], force: bool = False) -> Iterator[Event]:
        """Make all ``runs``, resuming those under way, and yield what they report as it comes."""
        return make(self._cluster, runs, force)

    def tune(
        self,
        spec: StudySpec,
        objective: Objective,
        trials: int,
        on_progress: Callable[[StudyProgress], object],
    ) -> StudyProgress:
        """Bring the study to ``trials`` trials; workers train, and the study stays here."""
        from polarstep_lab.suites.on_ray.trials import Trials  # Optuna takes a second to import
        from polarstep_lab.tune import tune

        remote = Trials(self._cluster, objective)
        return tune(
            spec, remote, trials, self._cluster.workers, on_progress, stop=remote.stopping.set
        )
