"""The mark of a run directory: ``.polarstep-run.json``, the first file that a run writes.

A directory without the mark, as earlier versions made them, is known by a ``config.json`` that
describes a run. Other libraries write files of that name too, Hugging Face beside every model.
"""

from __future__ import annotations

from pathlib import Path

from polarstep_lab.storage import StorageError, read_json

__all__ = [
    "CONFIG",
    "FORMAT",
    "LOCK",
    "MARK",
    "STOP",
    "VERSION",
    "is_foreign",
    "is_run_directory",
    "read_object",
    "refuse_foreign",
    "some_of",
]

MARK = ".polarstep-run.json"
FORMAT, VERSION = "polarstep-run", 1
CONFIG = "config.json"
LOCK = ".lock"
STOP = "stop"
"""The file that asks a run to write its checkpoint and end; a text in it is the reason of its result."""


def is_run_directory(directory: Path) -> bool:
    """Whether ``directory`` has the mark of a run, or a ``config.json`` that describes a run."""
    mark = read_object(directory / MARK)
    if mark.get("format") == FORMAT:
        return True
    config = read_object(directory / CONFIG)
    return (
        isinstance(config.get("recipe"), str)
        and config.get("benchmark") in ("nanogpt", "cifar10")
        and isinstance(config.get("method"), str)
        and isinstance(config.get("seed"), int)
        and isinstance(config.get("config"), dict)
    )


def is_foreign(directory: Path) -> bool:
    """Whether a directory has no mark, and a ``config.json`` that is readable and not of a run.

    A directory whose ``config.json`` cannot be read is not foreign: it may be a damaged run's.
    """
    if read_object(directory / MARK).get("format") == FORMAT:
        return False
    try:
        config = read_json(directory / CONFIG)
    except (StorageError, OSError):
        return False
    return not isinstance(config, dict) or "recipe" not in config


def read_object(path: Path) -> dict[str, object]:
    """The JSON object in a file; an empty one where there is no such file or something else in it."""
    try:
        content = read_json(path)
    except (StorageError, OSError):
        return {}
    return content if isinstance(content, dict) else {}


def refuse_foreign(directory: Path) -> None:
    """Raise where ``directory`` exists, is not empty, and is not a run directory."""
    if not directory.exists():
        return
    if not directory.is_dir():
        raise StorageError(f"{directory} is a file, expected a folder: choose another --out")
    held = [path.name for path in directory.iterdir() if not _is_leftover(path)]
    if held and not is_run_directory(directory):
        raise StorageError(
            f"{directory} exists and is not a run directory ({some_of(held)}): nothing was changed, "
            "and --force would not remove it; choose another one with --out"
        )


def _is_leftover(path: Path) -> bool:
    """Whether a file is a lock, a request to stop, or left by a kill while it was written."""
    return path.name in (LOCK, STOP) or (path.name.startswith(".") and path.name.endswith(".part"))


def some_of(names: list[str]) -> str:
    """Up to four names, and how many there are beyond."""
    shown = ", ".join(sorted(names)[:4])
    return f"it holds {shown}" + (f" and {len(names) - 4} more" if names[4:] else "")
