"""Workers of the tests of tuning: they write what a run would write, without training."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from polarstep_lab.jobs.job import Job
from polarstep_lab.jobs.local import Outcome
from polarstep_lab.records import record
from polarstep_lab.records.directory import claim_directory
from polarstep_lab.records.record import STOP, MetricRow, Result


@dataclass
class Bowls:
    """Runs whose loss is lowest at lr = 0.03, falls with every validation and diverges above 1.

    ``rates`` has the rate of each run that was begun. A run advances by one validation at each look.
    After ``interrupt_at`` runs were begun the next look raises KeyboardInterrupt.
    """

    count: int = 1
    interrupt_at: int | None = None
    rates: list[float] = field(default_factory=list)
    under_way: dict[Path, tuple[Job, int]] = field(default_factory=dict)

    def start(self, job: Job, force: bool = False) -> None:
        claim_directory(job.directory, job.spec, resume=True, force=force)
        self.rates.append(job.config.optimizer.lr)
        metrics = job.directory / record.METRICS
        done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        self.under_way[job.directory] = job, done

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        found = []
        for directory, (job, step) in list(self.under_way.items()):
            if self.interrupt_at == len(self.rates) and step >= 1:
                raise KeyboardInterrupt
            stopped = (directory / STOP).exists()
            if not stopped:
                step = self._validate(job, step + 1)
            if stopped or step == 5 or self._diverged(job, step):
                status = "stopped" if stopped else "diverged" if step < 5 else "finished"
                value = 1.0 if status == "finished" else math.nan
                Result("test_perplexity", value, status, step, 1.0, 1.0, 1.0).save(directory)
                found.append((job, Outcome()))
                del self.under_way[directory]
            else:
                self.under_way[directory] = job, step
        return found

    def _validate(self, job: Job, step: int) -> int:
        final = 1.0 + math.log10(job.config.optimizer.lr / 0.03) ** 2
        loss = math.nan if self._diverged(job, step) else final + 5 - step
        row = MetricRow(step, "val", loss, 0.1, 1.0).to_dict()
        row["loss"] = None if math.isnan(loss) else loss
        with (job.directory / record.METRICS).open("a") as file:
            file.write(json.dumps(row) + "\n")
        return step

    def _diverged(self, job: Job, step: int) -> bool:
        return job.config.optimizer.lr > 1.0 and step == 3

    def stop(self) -> None:
        self.under_way = {}

    def close(self) -> None:
        pass
