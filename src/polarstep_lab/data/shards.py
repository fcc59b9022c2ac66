"""Token shards on disk, in the format of nanoGPT's FineWeb files.

A shard is 256 little-endian int32 (magic number 20240520, version 1, number of tokens, zeros), then
the tokens as uint16. Shards are memory-mapped, so that opening one is fast, whatever its size.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from polarstep.storage import write_atomically

__all__ = ["ShardError", "find_shards", "open_shard", "write_shard"]

MAGIC = 20240520
VERSION = 1
HEADER = 256
HEADER_BYTES = HEADER * 4
TOKEN_BYTES = 2
MAX_TOKENS = 2**31 - 1


class ShardError(ValueError):
    """A token shard is missing or damaged; the message says which, how and what to do."""


def open_shard(path: Path) -> NDArray[np.uint16]:
    """The tokens of a shard as a read-only memory map, after checking its header and its length."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ShardError(f"the token shard {path} does not exist") from None
    if size == 0:
        raise ShardError(f"{path} is empty (0 bytes): download or tokenize it again")
    if size < HEADER_BYTES:
        raise ShardError(
            f"{path} has {size} bytes, less than the header of {HEADER_BYTES}: it is truncated or "
            "not a token shard; download or tokenize it again"
        )
    header = np.fromfile(path, dtype="<i4", count=HEADER)
    magic, version, count = (int(value) for value in header[:3])
    if magic != MAGIC:
        raise ShardError(
            f"{path} starts with {magic}, not with the magic number {MAGIC}: it is not a token "
            "shard; make one from text with `polarstep tokenize`"
        )
    if version != VERSION:
        raise ShardError(f"{path} has version {version}; only version {VERSION} can be read")
    if count <= 0:
        raise ShardError(
            f"the header of {path} promises {count} tokens, expected 1 or more: tokenize it again"
        )
    expected = HEADER_BYTES + TOKEN_BYTES * count
    if size != expected:
        state = "truncated" if size < expected else "too long"
        raise ShardError(
            f"{path} is {state}: its header promises {count:,} tokens, {expected:,} bytes, but it "
            f"has {size:,}; download or tokenize it again"
        )
    mapped = np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))
    return np.asarray(mapped)  # the same map without memmap's slow indexing


def write_shard(path: Path, tokens: NDArray[np.integer]) -> None:
    """Write ``tokens`` to ``path`` as one shard, atomically."""
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"expected a non-empty vector of tokens, got shape {tokens.shape}")
    if tokens.size > MAX_TOKENS:
        raise ValueError(f"{tokens.size:,} tokens do not fit one shard (at most {MAX_TOKENS:,})")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > 0xFFFF:
        raise ValueError(f"tokens run from {low} to {high}: a shard holds 0 to 65535 (uint16)")
    header = np.zeros(HEADER, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens.size

    def fill(file: IO[bytes]) -> None:
        header.tofile(file)
        tokens.astype("<u2", copy=False).tofile(file)

    write_atomically(path, fill)


def find_shards(patterns: str | Sequence[str]) -> list[Path]:
    """The files that match one or several glob patterns, sorted; a ``ShardError`` if none does."""
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    found = sorted({Path(name) for pattern in patterns for name in glob.glob(pattern)})
    if not found:
        listed = ", ".join(repr(pattern) for pattern in patterns)
        raise ShardError(
            f"no token shard matches {listed} (looked from {Path.cwd()}). Make shards from text "
            "files with `polarstep tokenize TEXT… --out DIR`, or point data.train and data.val at "
            "yours with --set data.train='DIR/*_train_*.bin'"
        )
    return found
