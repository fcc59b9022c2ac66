"""The first shards of FineWeb as GPT-2 tokens, which the paper's authors train on.

They are those of kjj0/fineweb10B-gpt2, 100 million tokens (200 MB) each: ``fineweb_val_000000.bin`` and
``fineweb_train_000001.bin`` to ``…_000103.bin``. A shard takes its name when its SHA-256 is the one that
the server has for it, and its header is a shard's.
"""

from __future__ import annotations

from pathlib import Path

from polarstep_lab.data.download import DatasetError, Progress, announced, download
from polarstep_lab.data.shards import ShardError, open_shard

__all__ = ["SHARDS", "download_fineweb", "fineweb_names"]

URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"
SHARDS = 5
"""Training shards by default: five have the 404 million tokens that a run of ``nanogpt`` reads."""
LAST = 103


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
    """Download the shards that are not in ``folder``; returns the paths of all of them."""
    found = [folder / name for name in fineweb_names(shards)]
    for path in found:
        if not path.exists():
            _download_shard(f"{url}/{path.name}", path, progress)
    return found


def _download_shard(url: str, path: Path, progress: Progress) -> None:
    told = announced(url)
    size, digest = told.get("X-Linked-Size"), told.get("X-Linked-ETag", "").strip('"')
    if size is None or len(digest) != 64:
        raise DatasetError(f"{url} comes without a SHA-256, so that it cannot be checked")
    part = download(url, path, int(size), "sha256", digest, progress)
    try:
        open_shard(part)
    except ShardError as error:
        part.unlink()
        raise DatasetError(f"{url} is no shard of tokens: {error}") from error
    part.replace(path)
