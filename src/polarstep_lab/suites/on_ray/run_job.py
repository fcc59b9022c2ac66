"""The job of making a run, as a worker does it.

A worker that sees the head's file system trains in the run directory itself. A worker that does not
trains in a folder of its own: it asks the head for the files of a run that goes on, and returns the
whole directory when the run ends.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from polarstep_lab.storage import write_atomically
from polarstep_lab.suites.on_ray.conversation import Talk
from polarstep_lab.suites.parallel import Event, Messenger, outcome
from polarstep_lab.suites.sending import archived, unpack
from polarstep_lab.suites.suite import PlannedRun
from polarstep_lab.train.run import StopTraining

__all__ = ["Apart", "HeadFiles", "Refused", "Returned", "Training"]


@dataclass(frozen=True)
class HeadFiles:
    """How a worker recognizes the head's file system: a file with a content of its own."""

    path: Path
    content: str
    folder: Path
    """The working directory of the head, to which paths of data are relative."""

    @classmethod
    def below(cls, folder: Path) -> HeadFiles:
        """Write the file into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        content = uuid.uuid4().hex
        path = folder.absolute() / f".polarstep-head-{content}"
        write_atomically(path, lambda file: file.write(content.encode()))
        return cls(path, content, Path.cwd())

    def is_here(self) -> bool:
        """Whether this process sees the file."""
        try:
            return self.path.read_text() == self.content
        except OSError:
            return False


@dataclass(frozen=True)
class Apart:
    """A worker says that it does not see the head's file system, and asks for the run's files."""


@dataclass(frozen=True)
class Refused:
    """The head's answer if nothing may be written into the run directory."""

    reason: str


@dataclass(frozen=True)
class Returned:
    """How a run ended, and its directory where the worker has a folder of its own."""

    event: Event
    directory: bytes | None = None


@dataclass(frozen=True)
class Training:
    """The job of making a run."""

    run: PlannedRun
    force: bool
    head: HeadFiles

    def __call__(self, talk: Talk) -> Returned:
        """Train, in the run directory or in a folder of the worker's own."""
        if self.head.is_here():
            os.chdir(self.head.folder)
            return Returned(self._train(self.run.directory, talk, self.force))
        with tempfile.TemporaryDirectory(prefix="polarstep-run-") as folder:
            directory = Path(folder) / "run"
            sent = talk.ask(Apart())
            if isinstance(sent, Refused):
                return Returned(Event(self.run.label, error=sent.reason))
            if sent is not None:
                unpack(sent, directory)
            event = self._train(directory, talk, force=False)
            return Returned(event, archived(directory) if directory.exists() else None)

    def _train(self, directory: Path, talk: Talk, force: bool) -> Event:
        """Train as a worker process at home does; the last event says how the run ended."""
        run = replace(self.run, directory=directory)
        return outcome(run, _Stoppable(run.label, talk), force)


class _Stoppable(Messenger):
    """A messenger that ends the run, with a checkpoint, when the head asks for it."""

    def __init__(self, label: str, talk: Talk) -> None:
        super().__init__(label, talk.tell)
        self._stopping = talk.stopping

    def advance(self, step: int) -> None:
        """Pass a step on, and stop if this was asked for."""
        super().advance(step)
        if self._stopping.is_set():
            raise StopTraining("the command that made this run was interrupted")
