"""The records of a study in one file, ``results/STUDY/records.jsonl.gz``: a line of JSON for each.

A line is a run, a trial, a time, a certificate or whatever else was measured::

    {"kind": "run", "study": "frontier", "part": "runs", "variant": "full",
     "config": {…}, "environment": {…}, "result": {…}, "logs": {"curve": […]}}

``part`` tells apart the tables of a study, and ``variant`` what was compared. ``config`` says what was
asked for, ``environment`` where it ran, ``result`` how it ended, ``logs`` what was measured on the way.
Runs of another program than ``polarstep`` name it as ``program``. A run of ``polarstep`` has a ``name``,
its path below the folder that was packed.

A machine that makes runs appends lines to a file without ``.gz``, in the same form; :func:`add` puts
them into the study afterwards.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polarstep_lab.storage import StorageError, write_atomically

__all__ = ["RECORDS", "add", "flat", "read", "write"]

RECORDS = "records.jsonl.gz"
Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """The lines of a record file, or of the one in the folder of a study."""
    path = path / RECORDS if path.is_dir() else path
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        return [json.loads(line) for line in text.decode().splitlines() if line]
    except (OSError, EOFError, ValueError) as error:
        raise StorageError(
            f"{path} cannot be read as records ({error}): restore the file, or write it again"
        ) from error


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
