"""The lock of a run directory: at most one process works in it.

``.lock`` is held from before the first look into the directory until the run has ended. The operating
system drops the lock when the process dies, by SIGKILL too.
"""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no flock; there, two runs in one directory are not noticed.
    fcntl = None  # type: ignore[assignment]

from polarstep_lab.records.mark import LOCK, read_object, refuse_foreign
from polarstep_lab.storage import StorageError, refuse_unwritable

__all__ = ["RunLock"]

PATIENCE = 2.0
"""Seconds to wait for a process that has just taken the lock to write down who it is."""


class RunLock:
    """At most one process works in a run directory; the lock dies with the process.

    A directory that does not exist is made. It is removed with the lock if nothing else came into it.
    """

    def __init__(self, directory: Path, label: str = "") -> None:
        """Lock ``directory``; ``label`` tells others what runs there. Raises if it cannot be locked."""
        refuse_foreign(directory)
        refuse_unwritable(directory / LOCK, "--out")
        self._directory = directory
        self._made = [path for path in (directory, *directory.parents) if not path.exists()]
        self._file: IO[bytes] | None = _locked_file(directory)
        if self._file is not None:
            with suppress(OSError):  # on a full disk the lock holds, and does not say whose it is
                self._file.truncate(0)
                self._file.write(json.dumps(_holder(label)).encode())

    def release(self) -> None:
        """Let others in, and remove the folders that were made and are still empty."""
        if self._file is not None:
            # Unlinked before it is unlocked: after that, the file may be another process's lock.
            (self._directory / LOCK).unlink(missing_ok=True)
            self._file.close()
            self._file = None
        for folder in self._made:
            with suppress(OSError):  # not empty
                folder.rmdir()
        self._made = []

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _locked_file(directory: Path) -> IO[bytes] | None:
    """The lock file of ``directory``, locked; ``None`` where the system has no such locks."""
    path = directory / LOCK
    patience = time.monotonic() + PATIENCE
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if fcntl is None:
                return None
            file = path.open("ab", buffering=0)
        except FileNotFoundError:
            if time.monotonic() < patience:
                continue  # another process removed the empty folder it had made
            raise
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            holder = read_object(path)
            if not holder and time.monotonic() < patience:
                time.sleep(0.01)  # the process that has the lock is about to say who it is
                continue
            raise StorageError(
                f"another process is running in {directory}{_describe(holder)}: wait for it to "
                "end, or give another --out"
            ) from None
        except OSError as error:
            file.close()
            raise StorageError(
                f"{path} cannot be locked ({error}), so that two runs in one directory would go "
                "unnoticed: give an --out on a file system that has locks, as a local disk"
            ) from error
        if _is_at(file, path):
            return file
        file.close()  # the process that had the lock has just removed the file


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Whether an open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(label: str) -> dict[str, object]:
    """What the lock file says about the process that holds the lock."""
    return {
        "process": os.getpid(),
        "host": platform.node(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "label": label,
    }


def _describe(holder: dict[str, object]) -> str:
    """The content of a lock file in words."""
    if not holder:
        return ""
    label = f"{holder.get('label')}, " if holder.get("label") else ""
    return (
        f" ({label}process {holder.get('process')} on {holder.get('host')}, since "
        f"{holder.get('since')})"
    )
