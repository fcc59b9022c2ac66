"""The records of a study in one file, ``results/STUDY/records.jsonl.gz``: a line of JSON for each.

A line is a run, a trial, a time, a certificate or whatever else was measured::

    {"kind": "run", "study": "frontier", "part": "runs", "variant": "full",
     "config": {…}, "environment": {…}, "result": {…}, "logs": {"curve": […]}}

``part`` tells apart the tables of a study, and ``variant`` what was compared. ``config`` says what was
asked for, ``environment`` where it ran, ``result`` how it ended, ``logs`` what was measured on the way.
Runs of another program than ``polarstep`` name it as ``program``.

A run of ``polarstep`` has a ``name``, its path below the folder that ``polarstep pack`` was given, and
with that a path like any other: ``results/long-run/records.jsonl.gz/table/muon/seed-3``. What a run
directory holds is in its line: ``config.json`` as ``config``, ``metrics.jsonl`` as ``logs["metrics"]``.

A machine that makes runs appends lines of this form to a file of its own, without ``.gz``; :func:`add`
puts them into the study afterwards.
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polarstep_lab.storage import StorageError, write_atomically

__all__ = [
    "ARCHIVE",
    "add",
    "archived_runs",
    "flat",
    "read",
    "read_archived",
    "split_path",
    "write",
    "write_archive",
]

ARCHIVE = "records.jsonl.gz"
Line = dict[str, Any]
Files = Mapping[str, Any]
"""What a run directory holds: an object for each ``.json``, a list of rows for each ``.jsonl``."""
_DOCUMENTS = ("config", "environment", "result")


# --- lines --------------------------------------------------------------------------------------


def read(path: Path) -> list[Line]:
    """The lines of a record file, or of the one in the folder of a study."""
    path = path / ARCHIVE if path.is_dir() else path
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        lines = [json.loads(line) for line in text.decode().split("\n") if line]
    except (OSError, EOFError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read as records ({error}): restore the file, or pack its runs again"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not isinstance(line, dict) or not {"kind", "study", "variant"} <= line.keys():
            raise StorageError(
                f"{path}, line {number}, is no record: expected an object with kind, study and variant"
            )
    return lines


def write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a record file in place of what was there; equal lines make equal bytes."""
    text = "".join(
        json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"
        for line in lines
    )
    data = gzip.compress(text.encode(), 9, mtime=0)
    write_atomically(path, lambda file: file.write(data))


def add(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    """Add lines to a record file, without those that it has; returns how many were new."""
    known = read(path) if path.exists() else []
    seen = {json.dumps(line, sort_keys=True) for line in known}
    new = [line for line in lines if json.dumps(line, sort_keys=True) not in seen]
    write(path, [*known, *new])
    return len(new)


def flat(line: Mapping[str, Any]) -> Line:
    """A line as one dictionary of its variant, config, environment, result and logs."""
    parts = (line.get(key, {}) for key in ("config", "environment", "result", "logs"))
    return {"variant": line["variant"], **{k: v for part in parts for k, v in part.items()}}


# --- runs of polarstep --------------------------------------------------------------------------


def split_path(path: Path) -> tuple[Path, str] | None:
    """The archive and the name of a run in it, where ``path`` leads into an archive."""
    for parent in path.parents:
        if parent.name == ARCHIVE and parent.is_file():
            return parent, path.relative_to(parent).as_posix()
    return None


def archived_runs(archive: Path) -> list[Path]:
    """The paths of all runs of polarstep in an archive, sorted by name."""
    return [archive / name for name in sorted(_runs(archive))]


def read_archived(archive: Path, name: str) -> dict[str, Any]:
    """The files of one run, as they were in its directory."""
    runs = _runs(archive)
    if name not in runs:
        raise StorageError(f"{archive} holds no run {name!r}: `polarstep list {archive}`")
    line = runs[name]
    documents = {f"{key}.json": line[key] for key in _DOCUMENTS if key in line}
    return documents | {f"{name}.jsonl": rows for name, rows in line.get("logs", {}).items()}


def write_archive(archive: Path, runs: Mapping[str, Files]) -> None:
    """Make ``runs`` (name → files) the runs of an archive; its other lines stay."""
    others = [line for line in read(archive) if "name" not in line] if archive.exists() else []
    study = archive.resolve().parent.name
    write(archive, [*others, *(_line(study, name, runs[name]) for name in sorted(runs))])


def _line(study: str, name: str, files: Files) -> Line:
    part, *middle = name.split("/")
    documents = {key: files[f"{key}.json"] for key in _DOCUMENTS if f"{key}.json" in files}
    logs = {file.removesuffix(".jsonl"): files[file] for file in files if file.endswith(".jsonl")}
    variant = "/".join(middle[:-1]) or part
    named = {"kind": "run", "study": study, "part": part, "variant": variant, "name": name}
    return named | documents | {"logs": logs}


def _runs(archive: Path) -> dict[str, Line]:
    state = archive.stat()
    return _parsed(archive, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=8)
def _parsed(archive: Path, _mtime: int, _size: int) -> dict[str, Line]:
    return {line["name"]: line for line in read(archive) if "name" in line}
