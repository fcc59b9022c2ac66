"""The folder a report is written to, and which files in it are the report's own.

A manifest lists the files of the last report with their checksums. A report does not replace a file
that is not in the manifest or was edited since: it then stops before it writes anything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from polarstep_lab.storage import (
    StorageError,
    read_json,
    refuse_unwritable,
    write_atomically,
    write_json,
)

__all__ = ["MANIFEST", "write_folder"]

MANIFEST = ".polarstep-report.json"


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write ``files`` (path within the folder → content), each atomically.

    Files of an earlier report that the new report does not have are removed. The manifest first gets
    the checksums of the new files, so that a report that was killed half-way can be repeated.
    """
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; --out expects a folder, new or made by a report")
    if folder.suffix.lower() in (".html", ".htm") and not folder.exists():
        raise StorageError(
            f"{folder} has the name of a page: --out expects a folder, as --out "
            f"{folder.with_suffix('')}, in which the page is index.html"
        )
    manifest = folder / MANIFEST
    refuse_unwritable(manifest, "--out")
    owned: dict[str, list[str]] = read_json(manifest).get("files", {}) if manifest.exists() else {}
    found = {name: _checksum(folder / name) for name in {*files, *owned}}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    known = {name: [*owned.get(name, []), *filter(None, [sums.get(name)])] for name in found}
    foreign = [name for name in files if found[name] and found[name] not in known[name]]
    if foreign:
        shown = ", ".join(foreign[:4]) + (f" and {len(foreign) - 4} more" if foreign[4:] else "")
        raise StorageError(
            f"{folder} holds files that no report wrote, or that were edited since: {shown}. "
            "Nothing was changed; choose another --out, or move these files away"
        )
    write_json(manifest, {"files": dict(sorted(known.items()))})
    for name, content in files.items():
        if found[name] != sums[name]:
            write_atomically(folder / name, lambda file, content=content: file.write(content))  # type: ignore[misc]
    for name in sorted(set(owned) - set(files)):
        if found[name] in owned[name]:
            (folder / name).unlink()
    write_json(manifest, {"files": {name: [sums[name]] for name in sorted(sums)}})


def _checksum(path: Path) -> str | None:
    """The checksum of a file; ``None`` where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
