"""Workers of a Ray cluster: ``compare``, ``ablate``, ``study`` and ``tune`` with ``--on ray``.

Ray starts by itself on this machine, or ``RAY_ADDRESS`` names a cluster. A worker has one GPU, where the
cluster has GPUs, or one core. A run whose worker died is made by another, and goes on from the last
checkpoint in its directory.

A worker that does not see the file system of this process makes the run in a folder of its own and sends
the directory back when the run has ended. A run that is interrupted there starts again.
"""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
import time
import uuid
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from shutil import copyfileobj
from typing import Any

import torch

from polarstep_lab.config import ConfigError
from polarstep_lab.jobs.job import Job
from polarstep_lab.jobs.local import EXPLAINED, PARTING, Outcome, ask_to_stop, make
from polarstep_lab.records.directory import check_directory, claim_directory, files_of_run
from polarstep_lab.records.lock import RunLock
from polarstep_lab.records.mark import LOCK
from polarstep_lab.records.record import RESULT
from polarstep_lab.storage import StorageError, write_atomically

__all__ = ["RayWorkers", "SharedFolder", "archived", "unpack"]

RETRIES = 2
"""How many times a run is made again after its worker has died."""


@dataclass(frozen=True)
class SharedFolder:
    """A file with a content of its own, by which a worker knows that it sees the head's file system."""

    path: Path
    content: str
    folder: Path
    """The working directory of the head, to which paths of data are relative."""

    @classmethod
    def beside(cls, directory: Path) -> SharedFolder:
        """Write the file into the nearest folder that there is."""
        folder = next(place for place in directory.absolute().parents if place.is_dir())
        content = uuid.uuid4().hex
        path = folder / f".polarstep-head-{content}"
        write_atomically(path, lambda file: file.write(content.encode()))
        return cls(path, content, Path.cwd())

    def is_here(self) -> bool:
        """Whether this process sees the file."""
        try:
            return self.path.read_text() == self.content
        except OSError:
            return False


def _make(job: Job, force: bool, shared: SharedFolder) -> tuple[Outcome, bytes | None]:
    """Make a run on a worker; with the files of its directory where the worker has one of its own."""
    torch.set_num_threads(1)
    if shared.is_here():
        os.chdir(shared.folder)
        return make(job, force), None
    with tempfile.TemporaryDirectory(prefix="polarstep-run-") as folder:
        directory = Path(folder) / "run"
        outcome = make(replace(job, directory=directory), False)
        return outcome, archived(directory) if directory.exists() else None


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
        self._running: dict[Any, tuple[Job, bool, SharedFolder]] = {}

    def start(self, job: Job, force: bool = False) -> None:
        """Hand a run to the cluster."""
        absolute = job.program.absolute() if job.program is not None else None
        job = replace(job, directory=job.directory.absolute(), program=absolute)
        shared = SharedFolder.beside(job.directory)
        self._running[self._make.remote(job, force, shared)] = job, force, shared

    def ended(self, seconds: float) -> list[tuple[Job, Outcome]]:
        """The runs that have ended, after the files of their directories are there."""
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=seconds)
        found = []
        for task in ready:
            job, force, shared = self._running.pop(task)
            shared.path.unlink(missing_ok=True)
            try:
                outcome, files = self._ray.get(task)
                if files is not None:
                    _put_back(job, force, files)
            except EXPLAINED as error:
                outcome = Outcome(error=str(error))
            except self._ray.exceptions.RayError as error:
                first = str(error).strip().partition("\n")[0].rstrip(".")
                outcome = Outcome(error=f"{1 + RETRIES} workers died of this run ({first})")
            found.append((job, outcome))
        return found

    def stop(self) -> None:
        """Ask the runs under way for their checkpoints, end the tasks, and leave the cluster."""
        deadline = time.monotonic() + PARTING
        while self._running and time.monotonic() < deadline:
            ask_to_stop(job for job, *_ in self._running.values())
            self.ended(0.2)
            if not any((job.directory / LOCK).exists() for job, *_ in self._running.values()):
                break  # the others have not begun, or have no directory here
        for task, (*_, shared) in self._running.items():
            self._ray.cancel(task, force=True)
            shared.path.unlink(missing_ok=True)
        self._running = {}

    def close(self) -> None:
        """Leave the cluster; a Ray that was started here ends."""
        self._ray.shutdown()


def _put_back(job: Job, force: bool, files: bytes) -> None:
    """Write the files of a run that was made elsewhere into its directory."""
    with RunLock(job.directory, job.spec.label):
        check_directory(job.directory, job.spec, resume=True, force=force)
        if force:
            claim_directory(job.directory, job.spec, force=True, notify=lambda text: None)
        unpack(files, job.directory)


def archived(directory: Path) -> bytes:
    """All files of ``directory`` but its lock, as an uncompressed tar archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.name != LOCK:
                archive.add(path, path.relative_to(directory).as_posix(), recursive=False)
    return content.getvalue()


def unpack(content: bytes, directory: Path) -> None:
    """Write the files of an archive into ``directory``, each atomically, in place of the run there.

    ``result.json`` comes last: without it the run counts as unfinished. Files of a run that are not
    in the archive are removed; other files are left alone.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        members = [member for member in archive.getmembers() if member.isfile()]
        for member in sorted(members, key=lambda member: member.name == RESULT):
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts:
                raise StorageError(
                    f"a worker returned the file {member.name!r}, expected a name below the run "
                    "directory: nothing outside is written"
                )
            file = archive.extractfile(member)
            assert file is not None
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(directory / name, partial(copyfileobj, file))
    held = {directory / member.name for member in members}
    for path in files_of_run(directory):
        if path not in held:
            path.unlink()
