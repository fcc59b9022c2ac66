"""The first shards of FineWeb as GPT-2 tokens, which the paper's authors train on.

They are those of kjj0/fineweb10B-gpt2, 100 million tokens (200 MB) each: ``fineweb_val_000000.bin`` and
``fineweb_train_000001.bin`` to ``…_000103.bin``. A download that was interrupted goes on where it
stopped. A shard takes its name when its SHA-256 is the one that the server has for it, and its header is
a shard's.
"""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

from polarstep_lab.data.cifar10 import DatasetError
from polarstep_lab.data.shards import ShardError, open_shard

__all__ = ["SHARDS", "download_fineweb", "fineweb_names"]

URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"
SHARDS = 5
"""Training shards by default: five have the 404 million tokens that a run of ``nanogpt`` reads."""
LAST = 103
ATTEMPTS = 5
BLOCK = 1 << 20

Progress = Callable[[str, int, int], object]


def fineweb_names(shards: int = SHARDS) -> list[str]:
    """The validation shard and the first training shards."""
    if not 1 <= shards <= LAST:
        raise DatasetError(f"shards={shards}: expected 1 to {LAST}, of 100 million tokens each")
    return [
        "fineweb_val_000000.bin",
        *(f"fineweb_train_{number:06}.bin" for number in range(1, shards + 1)),
    ]


def download_fineweb(
    folder: Path, shards: int = SHARDS, progress: Progress = lambda *_: None, url: str = URL
) -> list[Path]:
    """Download the shards that are not in ``folder``; returns the paths of all of them.

    ``progress`` is called with the name of a shard, the bytes there are and the bytes there will be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name in fineweb_names(shards):
        path = folder / name
        if not path.exists():
            _download(f"{url}/{name}", path, progress)
        found.append(path)
    return found


def _download(url: str, path: Path, progress: Progress) -> None:
    part = path.with_name(f".{path.name}.part")
    size, expected = _announced(url)
    for attempt in range(ATTEMPTS):
        try:
            _fetch(url, part, size, lambda there: progress(path.name, there, size))
            break
        except (OSError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS - 1:
                raise DatasetError(
                    f"could not download {url}: {error}. {part.name} has what came; the same command "
                    f"goes on from there. Without a network, copy the shard to {path} by other means"
                ) from error
    with part.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        part.unlink()
        raise DatasetError(
            f"{url} came with SHA-256 {found[:12]}…, the server says {expected[:12]}…: it was "
            "damaged on the way and is removed; run the same command again"
        )
    try:
        open_shard(part)
    except ShardError as error:
        part.unlink()
        raise DatasetError(f"{url} is no shard of tokens: {error}") from error
    part.replace(path)


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


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _announced(url: str) -> tuple[int, str]:
    """Size and SHA-256 of a file, as the server says before it redirects to the file itself."""
    request = urllib.request.Request(url, method="HEAD")
    headers: Message
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=60) as reply:
            headers = reply.headers
    except urllib.error.HTTPError as reply:
        if not 300 <= reply.code < 400:
            raise DatasetError(f"{url}: {reply}; is the name of the data set right?") from reply
        headers = reply.headers
    except OSError as error:
        raise DatasetError(
            f"could not reach {url}: {error}. Without a network, copy the shards by other means"
        ) from error
    size, digest = headers.get("X-Linked-Size"), headers.get("X-Linked-ETag", "").strip('"')
    if size is None or len(digest) != 64:
        raise DatasetError(f"{url} comes without a SHA-256, so that it cannot be checked")
    return int(size), digest
