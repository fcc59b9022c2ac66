"""The trials of a study: workers train, and the head keeps the study and answers their reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from polarstep_lab.config import ConfigError
from polarstep_lab.suites.on_ray.cluster import ATTEMPTS, Cluster, cause
from polarstep_lab.suites.on_ray.conversation import Said, Talk
from polarstep_lab.tune import Objective, Pruned

__all__ = ["Trials", "Trying"]


@dataclass(frozen=True)
class Trying:
    """The job of a trial: the objective, with reports that the head answers."""

    objective: Objective
    overrides: Mapping[str, float]

    def __call__(self, talk: Talk) -> float | None:
        """The objective's value; None where the head has pruned the trial."""

        def report(number: int, loss: float) -> None:
            if (reason := talk.ask((number, loss))) is not None:
                raise Pruned(reason)

        try:
            return self.objective(self.overrides, report)
        except Pruned:
            return None


class Trials:
    """An objective that a worker of the cluster computes, for several threads of the head."""

    def __init__(self, cluster: Cluster, objective: Objective) -> None:
        self._cluster, self._objective = cluster, objective
        self.stopping = threading.Event()
        """Set to end the trials that are under way."""

    def __call__(
        self, overrides: Mapping[str, float], report: Callable[[int, float], None]
    ) -> float:
        """The value of a trial; another worker makes it again if the first dies."""
        job = Trying(self._objective, overrides)
        deaths, seen = 0, -1
        pruned: Exception | None = None
        while True:
            worker = self._cluster.worker()
            coming = worker.begin.remote(job)
            try:
                while not (said := self._awaited(coming, worker)).ended:
                    (number, loss), reply = said.what, None
                    if number > seen:  # a trial that is made again reports the same once more
                        seen = number
                        try:
                            report(number, loss)
                        except Exception as reason:
                            pruned, reply = reason, str(reason)
                    coming = worker.next.remote(reply, said.asks)
            except self._cluster.death as death:
                deaths += 1
                if deaths == ATTEMPTS:
                    raise ConfigError(
                        f"{cause(death)}: {deaths} workers died of a trial"
                    ) from death
                continue
            self._cluster.rest(worker)
            if pruned is not None:
                raise pruned
            if said.error is not None:
                raise said.error
            return float(said.what)

    def _awaited(self, coming: Any, worker: Any) -> Said:
        """The message that is ``coming`` from a worker, unless the study is being stopped."""
        ray = self._cluster.ray
        while not self.stopping.is_set():
            try:
                said: Said = ray.get(coming, timeout=0.5)
                return said
            except ray.exceptions.GetTimeoutError:
                continue
        ray.kill(worker)
        raise KeyboardInterrupt
