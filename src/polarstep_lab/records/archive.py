"""Many run directories in one text file, small enough to be committed.

``records.jsonl`` holds the JSON files of each run (:mod:`polarstep_lab.records.record`);
what many runs have in common is kept once::

    {"format": "polarstep-records", "version": 1}
    {"shared": "5f0c1e9ab3d2", "value": {"recipe": "cifar10", …, "seed": null, …}}
    {"shared": "b81d22f07c44", "value": [10, 20, 30, …]}
    {"run": "muon/seed-3", "config.json": {"base": "#5f0c1e9ab3d2", "seed": 3, …}, …}

A run in an archive has a path like any other: ``results/x/records.jsonl/muon/seed-3``.

Nothing is rounded. Configs and environments are a shared base with the few entries of the run's own
filled in. A log is stored by columns, one table for each set of keys its rows have. A column whose
numbers are all float32 (a loss, a time between CUDA events) is marked ``f4`` and has as many digits as
make up a float32; reading gives back the float64 that was logged. The file is a function of the runs
it holds: neither the order in which they came nor the machine enters it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarstep_lab.storage import StorageError, read_lines, write_atomically

__all__ = ["ARCHIVE", "archived_runs", "read_archived", "split_path", "write_archive"]

ARCHIVE = "records.jsonl"
FORMAT, VERSION = "polarstep-records", 1

Files = Mapping[str, Any]
"""What a run directory holds: an object for each ``.json``, a list of rows for each ``.jsonl``."""

_OWN = {
    "config.json": ("seed", "config.seed", "command"),
    "environment.json": ("started",),
}
"""Entries that tell apart the runs of a suite: the rest of these files is worth sharing."""
_WORTH_SHARING = 40  # characters of JSON


# --- reading ------------------------------------------------------------------------------------


def split_path(path: Path) -> tuple[Path, str] | None:
    """The archive and the name of a run in it, where ``path`` leads into an archive."""
    for parent in path.parents:
        if parent.name == ARCHIVE and parent.is_file():
            return parent, path.relative_to(parent).as_posix()
    return None


def archived_runs(archive: Path) -> list[Path]:
    """The paths of all runs in an archive, sorted by name."""
    return [archive / name for name in sorted(_read(archive)[0])]


def read_archived(archive: Path, name: str) -> dict[str, Any]:
    """The files of one run, as they were in its directory."""
    runs, shared = _read(archive)
    if name not in runs:
        raise StorageError(f"{archive} holds no run {name!r}: `polarstep list {archive}`")
    try:
        return {
            file: _decode(content, file, shared)
            for file, content in runs[name].items()
            if file != "run"
        }
    except (AttributeError, LookupError, StopIteration, TypeError, ValueError) as error:
        raise StorageError(
            f"{archive}: run {name!r} is damaged ({error!r}); restore the file, or pack it again"
        ) from error


def _read(archive: Path) -> tuple[dict[str, Files], dict[str, Any]]:
    """The runs by name, not yet decoded, and the shared values."""
    state = archive.stat()
    return _parse(archive, state.st_mtime_ns, state.st_size)


@functools.lru_cache(maxsize=8)
def _parse(archive: Path, _mtime: int, _size: int) -> tuple[dict[str, Files], dict[str, Any]]:
    lines = read_lines(archive)
    head = lines[0] if lines else {}
    if head.get("format") != FORMAT:
        raise StorageError(f"{archive} is not an archive of runs: make one with `polarstep pack`")
    if head.get("version") != VERSION:
        raise StorageError(
            f"{archive} has version {head.get('version')}, this polarstep reads {VERSION}: update it"
        )
    counts = head.get("shared"), head.get("runs")
    if not all(type(count) is int and count >= 0 for count in counts):
        raise StorageError(
            f"{archive} has a damaged first line: shared={counts[0]!r} and runs={counts[1]!r}, "
            "expected how many shared values and runs follow; restore it, or pack its runs again"
        )
    expected = head["shared"] + head["runs"]
    if len(lines) != 1 + expected:
        raise StorageError(
            f"{archive} is incomplete: {len(lines) - 1} lines of {expected}; restore it, or pack "
            "its runs again"
        )
    runs: dict[str, Files] = {}
    shared: dict[str, Any] = {}
    for number, line in enumerate(lines[1:], start=2):
        if isinstance(line.get("run"), str):
            runs[line["run"]] = line
        elif isinstance(line.get("shared"), str) and "value" in line:
            shared[f"#{line['shared']}"] = line["value"]
        else:
            raise StorageError(
                f"{archive}, line {number}, is neither a run nor a shared value: restore the file, "
                "or pack its runs again"
            )
    return runs, shared


def _decode(content: Any, file: str, shared: Mapping[str, Any]) -> Any:
    if file.endswith(".jsonl"):
        return _rows(content, shared)
    if file not in _OWN:
        return content
    document = copy.deepcopy(_resolved(content["base"], shared))
    for path in _OWN[file]:
        if path in content:
            _put(document, path, content[path])
    return document


def _rows(log: Mapping[str, Any], shared: Mapping[str, Any]) -> list[dict[str, Any]]:
    tables = [
        {key: _numbers(_resolved(column, shared)) for key, column in table.items()}
        for table in log["tables"]
    ]
    rows = [
        iter([dict(zip(table, line, strict=True)) for line in zip(*table.values(), strict=True)])
        for table in tables
    ]
    return [next(rows[number]) for number in _resolved(log["order"], shared)]


def _numbers(column: Any) -> Any:
    if isinstance(column, Mapping):
        return [None if value is None else float(np.float32(value)) for value in column["f4"]]
    return column


def _resolved(value: Any, shared: Mapping[str, Any]) -> Any:
    return shared[value] if isinstance(value, str) else value


# --- writing ------------------------------------------------------------------------------------


def write_archive(archive: Path, runs: Mapping[str, Files]) -> None:
    """Write an archive of ``runs`` (name → files), in place of what was there."""
    encoded = {name: _encode(runs[name]) for name in sorted(runs)}
    seen = Counter(text for files in encoded.values() for text in _shareable(files))
    common = {text: _key(text) for text, count in seen.items() if count > 1}
    assert len(set(common.values())) == len(common), "two shared values with one key"
    lines: list[dict[str, Any]] = [
        {"format": FORMAT, "version": VERSION, "shared": len(common), "runs": len(runs)}
    ]
    lines += [
        {"shared": key, "value": json.loads(text)}
        for text, key in sorted(common.items(), key=lambda item: item[1])
    ]
    lines += [{"run": name, **_with_references(encoded[name], common)} for name in encoded]
    text = "".join(_json(line) + "\n" for line in lines)
    write_atomically(archive, lambda file: file.write(text.encode()))


def _encode(files: Files) -> dict[str, Any]:
    encoded = {}
    for file in sorted(files):
        content = files[file]
        if file.endswith(".jsonl"):
            encoded[file] = _columns(content)
        elif file in _OWN:
            encoded[file] = _based(content, _OWN[file])
        else:
            encoded[file] = content
    return encoded


def _based(document: Any, paths: Iterable[str]) -> dict[str, Any]:
    """A document as a base, with null where the run's own entries belong, and these entries."""
    base, own = copy.deepcopy(document), {}
    for path in paths:
        value = _take(base, path)
        if value is not None:
            own[path] = value
    return {"base": base, **own}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rows as columns: a table for each set of keys, and which table each row came from."""
    kinds: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    order = []
    for row in rows:
        keys = tuple(row)
        kinds.setdefault(keys, []).append(row)
        order.append(list(kinds).index(keys))
    tables = [{key: _short([row[key] for row in kinds[keys]]) for key in keys} for keys in kinds]
    return {"order": order, "tables": tables}


def _short(column: list[Any]) -> Any:
    """A column in the digits of a float32, if they are shorter and give back every value."""
    if not all(value is None or type(value) is float for value in column):
        return column
    with np.errstate(over="ignore"):
        short = [None if value is None else float(str(np.float32(value))) for value in column]
    same = all(
        brief is None or (math.isfinite(brief) and float(np.float32(brief)) == value)
        for value, brief in zip(column, short, strict=True)
    )
    return {"f4": short} if same and len(_json(short)) < len(_json(column)) else column


def _shareable(files: Mapping[str, Any]) -> list[str]:
    """The parts of a run that other runs may have too, as JSON; each once."""
    parts = []
    for file, content in files.items():
        if file.endswith(".jsonl"):
            columns = [column for table in content["tables"] for column in table.values()]
            parts += [content["order"], *columns]
        elif file in _OWN:
            parts.append(content["base"])
    texts = {_json(part) for part in parts}
    return sorted(text for text in texts if len(text) >= _WORTH_SHARING)


def _with_references(files: Mapping[str, Any], common: Mapping[str, str]) -> dict[str, Any]:
    def reference(part: Any) -> Any:
        key = common.get(_json(part))
        return part if key is None else f"#{key}"

    placed: dict[str, Any] = {}
    for file, content in files.items():
        if file.endswith(".jsonl"):
            tables = [{k: reference(v) for k, v in table.items()} for table in content["tables"]]
            placed[file] = {"order": reference(content["order"]), "tables": tables}
        elif file in _OWN:
            placed[file] = {**content, "base": reference(content["base"])}
        else:
            placed[file] = content
    return placed


def _take(document: Any, path: str) -> Any:
    """Remove what is at a dotted path, leaving null in its place; null where there is nothing."""
    *inner, last = path.split(".")
    for key in inner:
        document = document.get(key) if isinstance(document, dict) else None
    if not isinstance(document, dict) or last not in document:
        return None
    value, document[last] = document[last], None
    return value


def _put(document: Any, path: str, value: Any) -> None:
    *inner, last = path.split(".")
    for key in inner:
        document = document[key]
    document[last] = value


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
