"""The folder a report is written to, and which files in it are the report's own.

A manifest lists the files of the last report with their checksums. A file that is not in it, or
that was edited since, is not the report's to replace: writing then stops before anything is touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from polarstep.storage import StorageError, read_json, write_atomically, write_json

__all__ = ["MANIFEST", "write_folder"]

MANIFEST = ".polarstep-report.json"


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` (path within the folder → content), each atomically.

    Figures of an earlier report that the new one does not have are removed. The manifest is first
    extended by what is about to be written, so that a run killed half-way can simply be repeated.
    """
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; --out expects a folder, new or made by a report")
    owned = _read_manifest(folder)
    _refuse_foreign(folder, files, owned)
    sums = {name: _checksum(content) for name, content in files.items()}
    pending = {
        name: sorted({*owned.get(name, []), *([sums[name]] if name in sums else [])})
        for name in {*owned, *sums}
    }
    write_json(folder / MANIFEST, {"files": dict(sorted(pending.items()))})
    for name, content in files.items():
        path = folder / name
        if not path.exists() or path.read_bytes() != content:
            write_atomically(path, lambda file, content=content: file.write(content))  # type: ignore[misc]
    for name in sorted(set(owned) - set(files)):
        path = folder / name
        if path.is_file() and _checksum(path.read_bytes()) in owned[name]:
            path.unlink()
    write_json(folder / MANIFEST, {"files": {name: [sums[name]] for name in sorted(sums)}})


def _read_manifest(folder: Path) -> dict[str, list[str]]:
    path = folder / MANIFEST
    if not path.exists():
        return {}
    files = read_json(path).get("files", {})
    return {str(name): list(sums) for name, sums in files.items()}


def _refuse_foreign(
    folder: Path, files: Mapping[str, bytes], owned: Mapping[str, list[str]]
) -> None:
    foreign = [
        name
        for name, content in files.items()
        if (folder / name).exists()
        and (folder / name).read_bytes() != content
        and _checksum((folder / name).read_bytes()) not in owned.get(name, [])
    ]
    if foreign:
        shown = ", ".join(foreign[:4]) + (f" and {len(foreign) - 4} more" if foreign[4:] else "")
        raise StorageError(
            f"{folder} holds files that no report wrote, or that were edited since: {shown}. "
            "Nothing was changed; choose another --out, or move these files away"
        )


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
