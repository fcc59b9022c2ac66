"""Write files atomically: after a crash a file is the old version or the new, never half a file.

A file is written beside its target, forced to disk and renamed over the target. A rename within a
folder is atomic, so a process killed at any moment leaves a complete file. Logs are the exception:
lines are appended one by one.
"""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

__all__ = [
    "JsonLines",
    "StorageError",
    "read_json",
    "read_lines",
    "read_object",
    "refuse_unwritable",
    "to_json",
    "write_atomically",
    "write_json",
]

AGAIN = (
    "then run the same command again; where a run has begun, `polarstep run` goes on with --resume"
)


class StorageError(RuntimeError):
    """Something on disk could not be written or read; the message says what to do about it."""


def write_atomically(
    path: Path, write: Callable[[IO[bytes]], object], *, keep: Path | None = None
) -> None:
    """Let ``write`` fill a temporary file, then rename it to ``path``.

    If anything fails, a full disk included, the previous ``path`` stays as it was. With ``keep``,
    the previous ``path`` is renamed to ``keep`` just before; a process killed between the two
    renames leaves ``keep`` and no ``path``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.parent / f".{path.name}.{secrets.token_hex(4)}.part"
    # mkstemp's files are readable by their owner only, but results are to be shared.
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        with _explaining_lack_of_room(path), os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(name, path)
    except BaseException:
        name.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def _explaining_lack_of_room(path: Path) -> Iterator[None]:
    """Raise a :class:`StorageError` if a write to ``path`` in this block finds no room."""
    try:
        yield
    except Exception as error:
        if (reason := _no_room(path, error)) is not None:
            raise reason from error
        raise


def _no_room(path: Path, error: BaseException) -> StorageError | None:
    """The error to raise if a write to ``path`` failed for lack of room; else ``None``."""
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        told = f"no space left to write {path}: free some disk space"
    elif number == errno.EFBIG:
        told = (
            f"{path} would be larger than a file may be here: raise the limit of the shell "
            "(`ulimit -f unlimited`), or write to a file system that takes larger files"
        )
    else:
        # torch.save turns a short write into a RuntimeError and keeps the OSError as its context.
        context = error.__cause__ or error.__context__
        return None if context is None else _no_room(path, context)
    return StorageError(f"{told}, {AGAIN}; everything written before is intact")


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable (POSIX; Windows has no handle on a folder to sync)."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_json(value: Any) -> Any:
    """``value`` in standard JSON: tuples become lists, paths strings, NaN and ±inf ``None``.

    >>> to_json({"loss": float("nan"), "shape": (2, 3)})
    {'loss': None, 'shape': [2, 3]}
    """
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, without an incomplete last line; empty if there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    complete = lines[:-1]  # after the last newline: nothing, or a line cut short by a kill
    rows = []
    for number, line in enumerate(complete, start=1):
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise StorageError(
                f"{path}, line {number}, is not valid JSON: {error}; restore the file, or delete that "
                "line"
            ) from error
        if not isinstance(row, dict):
            found = line[:40].decode(errors="replace")
            raise StorageError(
                f"{path}, line {number}, is {found}, expected a JSON object: restore the file, or "
                "delete that line"
            )
        rows.append(row)
    return rows


def refuse_unwritable(path: Path, option: str) -> None:
    """Raise if :func:`write_atomically` could not write to ``path``, which ``option`` gave.

    For programs that run long before they write. This writes nothing, so it does not see a full disk.
    """
    folder = next(place for place in path.parents if place.exists())
    if path.is_dir():
        reason = f"{path} is a folder, expected a file"
    elif not folder.is_dir():
        reason = f"{folder} is a file, expected a folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = f"{folder} is a folder that cannot be written to"
    else:
        return
    raise StorageError(f"{path} cannot be written, {reason}: choose another {option}")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` as indented JSON, atomically."""
    text = json.dumps(to_json(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> Any:
    """The content of a JSON file, or an error that names the file and the place of the fault."""
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except FileNotFoundError:
        raise StorageError(f"{path} does not exist: give the path of another file") from None
    except (ValueError, RecursionError) as error:
        raise StorageError(
            f"{path} is not valid JSON: {error}; restore or mend the file"
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no such file or something else in it."""
    try:
        content = read_json(path)
    except (StorageError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def _finite(number: str) -> float:
    """The value of a number in a JSON text, which must be finite, as in all settings and results."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value


class JsonLines:
    """A log of one JSON object per line; each line is handed to the operating system at once.

    An existing log is cut back to its first ``length`` bytes.
    """

    def __init__(self, path: Path, length: int = 0) -> None:
        """Open ``path`` for appending after its first ``length`` bytes."""
        self.path = path
        # Unbuffered: a buffer would repeat a failed write when the log is closed, and the second
        # error would hide the first.
        self._file = path.open("r+b" if path.exists() else "w+b", buffering=0)
        self._file.truncate(length)
        self._file.seek(length)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line."""
        text = json.dumps(to_json(row), ensure_ascii=False, allow_nan=False) + "\n"
        line = memoryview(text.encode())
        with _explaining_lack_of_room(self.path):
            while line:  # near a size limit, the system may take only part of a line
                line = line[self._file.write(line) :]

    def sync(self) -> int:
        """Force all lines to disk and return the length of the log in bytes."""
        with _explaining_lack_of_room(self.path):
            os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the log."""
        self._file.close()
