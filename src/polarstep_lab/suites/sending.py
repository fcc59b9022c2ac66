"""A run directory as bytes, for machines that do not share a file system."""

from __future__ import annotations

import io
import tarfile
from functools import partial
from pathlib import Path, PurePosixPath
from shutil import copyfileobj

from polarstep_lab.records.directory import files_of_run
from polarstep_lab.records.mark import LOCK
from polarstep_lab.records.record import RESULT
from polarstep_lab.storage import StorageError, write_atomically

__all__ = ["archived", "unpack"]


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
