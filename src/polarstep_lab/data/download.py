"""Files from the network: resumed where they stopped, checked, and in their place only when whole."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

__all__ = ["DatasetError", "Progress", "announced", "download"]

ATTEMPTS = 5
BLOCK = 1 << 20

Progress = Callable[[str, int, int], object]
"""Called with the name of a file, the bytes there are and the bytes there will be."""


class DatasetError(ValueError):
    """Data is missing or damaged; the message says what to put where."""


def announced(url: str) -> Message:
    """What the server says of a file, before it redirects to the file itself."""
    request = urllib.request.Request(url, method="HEAD")
    headers: Message
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=60) as reply:
            headers = reply.headers
    except urllib.error.HTTPError as reply:
        if not 300 <= reply.code < 400:
            raise DatasetError(f"{url}: {reply}; is the address right?") from reply
        headers = reply.headers
    except OSError as error:
        raise DatasetError(
            f"could not reach {url}: {error}. Without a network, copy the file by other means"
        ) from error
    return headers


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def download(
    url: str, path: Path, size: int, algorithm: str, digest: str, progress: Progress
) -> Path:
    """Download a file of ``size`` bytes; returns its path beside ``path``, for the caller to move there.

    What came of it before is kept, and the download goes on from there. A file whose ``digest`` is
    another is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    for attempt in range(ATTEMPTS):
        try:
            _fetch(url, part, size, lambda there: progress(path.name, there, size))
            break
        except (OSError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS - 1:
                raise DatasetError(
                    f"could not download {url}: {error}. {part.name} has what came; the same command "
                    f"goes on from there. Without a network, copy the file to {path} by other means"
                ) from error
    with part.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != digest:
        part.unlink()
        raise DatasetError(
            f"{url} came with {algorithm} {found[:12]}…, expected {digest[:12]}…: it was damaged on "
            "the way and is removed; run the same command again"
        )
    return part


def _fetch(url: str, part: Path, size: int, progress: Callable[[int], object]) -> None:
    """Append to ``part`` what it does not have of ``size`` bytes."""
    there = part.stat().st_size if part.exists() else 0
    if there > size:
        part.unlink()
        there = 0
    progress(there)
    if there == size:
        return
    request = urllib.request.Request(url, headers={"Range": f"bytes={there}-"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        whole = reply.status != 206  # a server that does not know ranges sends all of it
        with part.open("wb" if whole else "ab") as file:
            there = 0 if whole else there
            while block := reply.read(BLOCK):
                file.write(block)
                there += len(block)
                progress(there)
    if there < size:
        raise OSError(f"the connection ended after {there:,} of {size:,} bytes")
