"""Token shards on disk, in the format of nanoGPT's FineWeb files.

A shard is 256 little-endian int32 (magic number 20240520, version 1, number of tokens, zeros), then
the tokens as uint16. Shards are memory-mapped, so that opening one is fast, whatever its size.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from polarstep_lab.storage import write_atomically

__all__ = [
    "ShardError",
    "digest_of",
    "find_shards",
    "open_shard",
    "read_blocks",
    "short_digest",
    "write_shard",
]

MAGIC = 20240520
VERSION = 1
HEADER = 256
HEADER_BYTES = HEADER * 4
TOKEN_BYTES = 2
MAX_TOKENS = 2**31 - 1

WHOLE_BYTES = 1 << 24
"""A shard of at most this size is read whole for its digest."""
SAMPLES, SAMPLE_BYTES = 64, 1 << 16
"""Of a larger shard, so many blocks are read, evenly spaced from its first token to its last."""


class ShardError(ValueError):
    """A token shard is missing, damaged, or cannot hold its tokens; the message says what to do."""


def open_shard(path: Path) -> NDArray[np.uint16]:
    """The tokens of a shard as a read-only memory map, after checking its header and its length."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ShardError(
            f"the token shard {path} does not exist: give the path of another, or make it with "
            "`polarstep tokenize`"
        ) from None
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
        raise ShardError(
            f"{path} has version {version}, expected {VERSION}: make it anew with `polarstep tokenize`"
        )
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
        raise ValueError(
            f"the tokens of {path} have shape {tokens.shape}: expected a vector with at least one entry"
        )
    if tokens.size > MAX_TOKENS:
        raise ShardError(
            f"{path} would have {tokens.size:,} tokens, and a shard has at most {MAX_TOKENS:,}: divide "
            "them among more shards, as with a smaller --shard-tokens or --validation"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high > 0xFFFF:
        raise ShardError(
            f"the tokens of {path} run from {low} to {high}, and a shard holds 0 to 65535 (uint16): "
            "take a smaller vocabulary"
        )
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


def digest_of(paths: Sequence[Path]) -> str:
    """What tells the content of shards from other content: the start of a SHA-256, in hex.

    It covers the order of the shards, and of each the length, the header and the tokens: all of them up
    to :data:`WHOLE_BYTES`, and samples of a larger shard. So it finds another text under the same name,
    and need not find a few tokens that were edited in the middle of a large shard.
    """
    digests = []
    for path in paths:
        state = path.stat()
        version = (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
        digests.append(_digest(path.resolve(), version))
    return short_digest(*digests)


def short_digest(*parts: bytes) -> str:
    """The first 32 digits of the SHA-256 of these parts, one after the other."""
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


@lru_cache(maxsize=1024)
def _digest(path: Path, _version: tuple[int, ...]) -> bytes:
    digest = hashlib.sha256(path.stat().st_size.to_bytes(8, "little"))
    for block in read_blocks(path):
        digest.update(block)
    return digest.digest()


def read_blocks(path: Path) -> Iterator[bytes]:
    """The parts of a shard that its digest is made of."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= max(WHOLE_BYTES, HEADER_BYTES + SAMPLES * SAMPLE_BYTES):
            yield file.read()
            return
        yield file.read(HEADER_BYTES)
        last = size - SAMPLE_BYTES
        for number in range(SAMPLES):
            file.seek(HEADER_BYTES + (last - HEADER_BYTES) * number // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)
