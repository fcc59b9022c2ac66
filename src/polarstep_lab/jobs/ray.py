"""Workers of a Ray cluster: ``compare``, ``ablate``, ``study`` and ``tune`` with ``--on ray``.

Ray starts by itself on this machine, or ``RAY_ADDRESS`` names a cluster. A worker has one GPU, where the
cluster has GPUs, or one core. A run whose worker died is made by another, and goes on from the last
checkpoint in its directory, so all machines of a cluster have to see the same folders.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from polarstep_lab.config import ConfigError
from polarstep_lab.jobs.job import Job
from polarstep_lab.jobs.local import PARTING, Outcome, ask_to_stop, make
from polarstep_lab.records.record import LOCK

__all__ = ["RayWorkers"]

RETRIES = 2
"""How many times a run is made again after its worker has died."""


def _make(job: Job, force: bool, folder: Path) -> Outcome:
    """Make a run on a worker; relative paths of data are those below ``folder``."""
    if not (job.directory.is_dir() and folder.is_dir()):
        return Outcome(
            f"a worker of the Ray cluster does not see {job.directory}: give an --out, and start from "
            "a folder, that all machines share"
        )
    torch.set_num_threads(1)
    os.chdir(folder)
    return make(job, force)


class RayWorkers:
    """Tasks on a Ray cluster, one for each run."""

    def __init__(self, count: int | None, device: str = "auto") -> None:
        """Connect to ``RAY_ADDRESS``, or start Ray on this machine.

        ``count`` is how many runs are made at a time, by default as many as the cluster has GPUs or
        cores. Runs on the ``device`` cpu take no GPU.
        """
        try:
            import ray
        except ModuleNotFoundError:
            raise ConfigError(
                '--on ray needs Ray, which is not installed: pip install "polarstep[ray]"'
            ) from None
        if device.startswith("cuda:"):
            raise ConfigError(
                f"runtime.device={device!r} with --on ray: expected auto, cpu or cuda, as Ray gives "
                "each run a GPU of its own"
            )
        self._ray: Any = ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get("RAY_ADDRESS", "local")
        own = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, **own)
        resources = ray.cluster_resources()
        gpus = 0 if device == "cpu" else int(resources.get("GPU", 0))
        self.count = count or gpus or max(1, int(resources.get("CPU", 1)))
        share = {"num_cpus": 1, "num_gpus": 1 if gpus else 0}
        self._make = ray.remote(max_retries=RETRIES, **share)(_make)
        self._running: dict[Any, Job] = {}

    def start(self, job: Job, force: bool = False) -> None:
        """Hand a run to the cluster."""
        program = job.program.absolute() if job.program is not None else None
        job = replace(job, directory=job.directory.absolute(), program=program)
        job.directory.mkdir(parents=True, exist_ok=True)
        self._running[self._make.remote(job, force, Path.cwd())] = job

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The runs that have ended."""
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        found = []
        for task in ready:
            job = self._running.pop(task)
            try:
                outcome = self._ray.get(task)
            except self._ray.exceptions.RayError as error:
                first = str(error).strip().partition("\n")[0].rstrip(".")
                outcome = Outcome(error=f"{1 + RETRIES} workers died of this run ({first})")
            found.append((job, outcome))
        return found

    def stop(self) -> None:
        """Ask the runs under way for their checkpoints, end the tasks, and leave the cluster."""
        deadline = time.monotonic() + PARTING
        while self._running and time.monotonic() < deadline:
            ask_to_stop(self._running.values())
            self.ended(0.2)
            if not any((job.directory / LOCK).exists() for job in self._running.values()):
                break  # the others have not begun
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._running = {}

    def close(self) -> None:
        """Leave the cluster; a Ray that was started here ends."""
        self._ray.shutdown()
