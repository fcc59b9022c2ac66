"""Files of runs, written as :mod:`polarstep.storage` writes them: errors say how a run goes on."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from polarstep import storage
from polarstep.storage import NoRoomError, StorageError, read_lines, to_json

__all__ = [
    "JsonLines",
    "StorageError",
    "read_json",
    "read_lines",
    "refuse_unwritable",
    "to_json",
    "write_atomically",
    "write_json",
]

AGAIN = (
    "then run the same command again; where a run has begun, `polarstep run` goes on with --resume"
)


@contextmanager
def _saying_how_to_go_on() -> Iterator[None]:
    """Add to the error of a file that found no room how the run goes on."""
    try:
        yield
    except NoRoomError as error:
        raise StorageError(f"{error.told}, {AGAIN}; everything written before is intact") from error


def write_atomically(
    path: Path, write: Callable[[IO[bytes]], object], *, keep: Path | None = None
) -> None:
    """As :func:`polarstep.storage.write_atomically`."""
    with _saying_how_to_go_on():
        storage.write_atomically(path, write, keep=keep)


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


def _finite(number: str) -> float:
    """The value of a number in a JSON text, which must be finite, as in all settings and results."""
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is not a finite number")
    return value


class JsonLines(storage.JsonLines):
    """As :class:`polarstep.storage.JsonLines`."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line."""
        with _saying_how_to_go_on():
            super().write(row)

    def sync(self) -> int:
        """Force all lines to disk and return the length of the log in bytes."""
        with _saying_how_to_go_on():
            return super().sync()
