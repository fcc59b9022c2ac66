"""The workers of a Ray cluster: Ray on this machine, or the cluster that ``RAY_ADDRESS`` names."""

from __future__ import annotations

import os
import queue
from typing import Any

from polarstep_lab.config import ConfigError
from polarstep_lab.suites.on_ray.conversation import Worker

__all__ = ["ATTEMPTS", "Cluster", "cause"]

ATTEMPTS = 3
"""How many workers may die of a job before the job counts as failed."""


class Cluster:
    """Workers with one GPU each, where the cluster has GPUs, or one core each."""

    def __init__(self, workers: int | None, device: str) -> None:
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
        self.ray = ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get("RAY_ADDRESS", "local")
        own = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, **own)
        resources = ray.cluster_resources()
        gpus = 0 if device == "cpu" else int(resources.get("GPU", 0))
        self._share = {"num_cpus": 1, "num_gpus": 1 if gpus else 0}
        self.workers = workers or gpus or max(1, int(resources.get("CPU", 1)))
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def close(self) -> None:
        """Leave the cluster; a Ray that was started here ends."""
        self.ray.shutdown()

    @property
    def death(self) -> type[Exception]:
        """What Ray raises where a message was expected from a worker that has died."""
        error: type[Exception] = self.ray.exceptions.RayActorError
        return error

    def worker(self) -> Any:
        """A worker without a job; a new one starts when the cluster has room for it."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            options = self._share | {"max_concurrency": 2}
            return self.ray.remote(Worker).options(**options).remote()

    def rest(self, worker: Any) -> None:
        """Keep a worker whose job has ended for the next one."""
        self._idle.put(worker)


def cause(death: BaseException) -> str:
    """The first line of Ray's account of a worker's end."""
    return str(death).strip().partition("\n")[0].rstrip(".")
