"""From run directories to an archive one can commit: which runs enter it, and what they leave behind.

A run keeps its place below the folder that was packed as its name. Packing into an archive that
exists adds to it. Where both hold a run of the same name:

- with other settings: an error, unless forced;
- a run that has ended is not replaced by one that has not;
- finished with another metric: an error, unless forced. A run made again for its times must not replace
  the accuracy that tables are made of;
- otherwise the run packed last replaces the one in the archive.

A ``.jsonl`` file in place of a folder holds lines of records, as benchmarks write them: those that the
archive does not have are added.

Records leave their machine here. An absolute path becomes its last part (``/data/me/shards`` is
``shards``), everywhere, commands included, and a message does not name the host.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarstep_lab.records import record
from polarstep_lab.records.archive import (
    ARCHIVE,
    add,
    archived_runs,
    read,
    split_path,
    write_archive,
)
from polarstep_lab.records.record import CONFIG, RunRecord, find_runs, read_files
from polarstep_lab.storage import StorageError, refuse_unwritable, to_json

__all__ = ["Packed", "pack", "without_machine"]

_ENDED = ("finished", "diverged")

_ABSOLUTE = re.compile(
    r"(?<![\w./~\\-])"  # not the middle of a relative path, of a fraction or of a URL
    r"(?:~|[A-Za-z]:)?[/\\]"
    r"(?P<folders>(?:[^\s/\\'\",;:()\[\]]+[/\\])*)"
    r"(?P<last>[^\s/\\'\",;:()\[\]]*)"
)


@dataclass(frozen=True)
class Packed:
    """What packing did: the archive, and how many runs are in it, new, replaced and kept."""

    archive: Path
    runs: int
    added: int
    replaced: int
    kept: int


def pack(folders: Sequence[Path], out: Path, *, force: bool = False) -> Packed:
    """Add all runs below ``folders`` to ``out/records.jsonl.gz``; see the module for the rules."""
    archive = out if out.name == ARCHIVE else out / ARCHIVE
    refuse_unwritable(archive, "--out")
    lines = [path for path in folders if path.is_file() and path.suffix == ".jsonl"]
    if lines:
        return _with_lines(archive, lines)
    runs: dict[str, Mapping[str, Any]] = {}
    if archive.exists():
        runs = {_name(path, archive): read_files(path) for path in archived_runs(archive)}
    before = dict(runs)
    kept = 0
    for name, path in _named(folders, archive).items():
        files = without_machine(read_files(path))
        RunRecord.from_files(path, files)  # raises where a file is damaged
        old = before.get(name)
        if old is not None and _config(old, archive / name) != _config(files, path):
            if not force:
                raise StorageError(
                    f"{archive} holds {name} with other settings: nothing was written; give another "
                    "--out, or --force to replace it"
                )
        elif old is not None and _status(old) in _ENDED and _status(files) not in _ENDED:
            kept += 1
            continue
        elif old is not None and not force and _finished_otherwise(old, files):
            raise StorageError(
                f"{archive} holds {name} with the metric {_metric(old)}, this run has {_metric(files)}: "
                "nothing was written; give another --out to runs that were made again for their times, "
                "or --force to replace the metric"
            )
        runs[name] = files
    if runs != before or not archive.exists():
        write_archive(archive, runs)
    replaced = sum(runs[name] != old for name, old in before.items())
    return Packed(archive, len(runs), len(runs) - len(before), replaced, kept)


def _with_lines(archive: Path, files: Sequence[Path]) -> Packed:
    """Add the lines of files to an archive."""
    found = [_stripped(to_json(line)) for path in files for line in read(path)]
    added = add(archive, {json.dumps(line): line for line in found}.values())
    return Packed(archive, len(read(archive)), added, 0, len(found) - added)


def without_machine(files: Mapping[str, Any]) -> dict[str, Any]:
    """The files of a run without absolute paths and without the name of this host.

    A number that is not finite becomes ``null``, as in every log that is written.
    """
    clean: dict[str, Any] = _stripped(to_json(files))
    result = clean.get(record.RESULT)
    host = platform.node()
    if host and isinstance(result, dict) and isinstance(result.get("message"), str):
        result["message"] = re.sub(rf"\b{re.escape(host)}\b", "host", result["message"])
    return clean


def _named(folders: Sequence[Path], archive: Path) -> dict[str, Path]:
    """The runs below ``folders`` by their names in ``archive``; the runs that it has are left out."""
    named: dict[str, Path] = {}
    for folder in folders:
        found = find_runs([folder])
        if not found:
            raise StorageError(
                f"no runs in {folder}: expected folders with a config.json, as `polarstep run` and "
                "`polarstep compare` make them"
            )
        for path in found:
            inside = split_path(path)
            if inside is not None and inside[0].resolve() == archive.resolve():
                continue
            name = _name(path, folder)
            other = named.setdefault(name, path)
            if other.resolve() != path.resolve():
                raise StorageError(
                    f"{other} and {path} would both be {name} in the archive: nothing was written; "
                    "pack them into two archives, or pack a folder that holds both"
                )
    return named


def _name(path: Path, folder: Path) -> str:
    """The name of a run below ``folder``; that of an archive on the way to it is left out."""
    inside = path.relative_to(folder)
    parts = [part for part in inside.parts if part != ARCHIVE]
    if parts:
        return "/".join(parts)
    archived = split_path(folder)
    return archived[1] if archived else folder.resolve().name


def _config(files: Mapping[str, Any], run: Path) -> Any:
    """The complete config of ``run``, whose files these are."""
    spec = files.get(CONFIG)
    if not isinstance(spec, Mapping) or "config" not in spec:
        raise StorageError(
            f"{run / CONFIG} is not the config of a run: nothing was written; move that "
            "folder away, or pack another one"
        )
    return spec["config"]


def _status(files: Mapping[str, Any]) -> str:
    result = files.get(record.RESULT)
    return str(result.get("status", "unfinished")) if isinstance(result, Mapping) else "unfinished"


def _finished_otherwise(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two runs finished with different metrics."""
    return _status(old) == _status(new) == "finished" and _metric(old) != _metric(new)


def _metric(files: Mapping[str, Any]) -> Any:
    return files[record.RESULT].get("value")


def _stripped(value: Any) -> Any:
    """``value`` with every absolute path in it cut down to its last part.

    >>> _stripped("polarstep run cifar10 --set data.root=/home/me/cifar --seed 1/2")
    'polarstep run cifar10 --set data.root=cifar --seed 1/2'
    """
    if isinstance(value, Mapping):
        return {key: _stripped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_stripped(item) for item in value]
    if isinstance(value, str) and ("/" in value or "\\" in value):
        return _ABSOLUTE.sub(_last_part, value)
    return value


def _last_part(path: re.Match[str]) -> str:
    parts = [part for part in re.split(r"[/\\]", path["folders"] + path["last"]) if part]
    return parts[-1] if parts else path[0]  # a lone slash is no path
