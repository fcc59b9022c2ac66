"""How fast does the token loader deliver batches, against the 20 million tokens/s it promises?

    python benchmarks/loader.py                         # on a shard written for the occasion
    python benchmarks/loader.py 'data/fineweb_train_*.bin'

Reads memory-mapped shards in shuffled order, converts to int64 and checks the vocabulary, as a
training run does, but without a model. The disk limits the first pass over a file, so each setting
is timed after a warm-up pass, when the operating system has cached the file.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from polarstep_lab.data.shards import write_shard
from polarstep_lab.data.tokens import TokenWindows, load_tokens

PROMISE = 20e6
SECONDS = 1.0


def rate(windows: TokenWindows, count: int) -> float:
    """Tokens per second for batches of ``count`` windows."""
    windows.train(0, 0, count)
    position = 0
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SECONDS:
        windows.train(0, position, count)
        position += count
    return position * windows.length / elapsed


def main() -> None:
    """Time batches of several lengths, and exit with 1 below the promise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("shards", nargs="*", help="patterns; without any, a shard is written")
    patterns = parser.parse_args().shards
    with tempfile.TemporaryDirectory() as folder:
        if not patterns:
            tokens = np.random.default_rng(0).integers(0, 50257, size=50_000_000, dtype=np.uint16)
            write_shard(Path(folder) / "shard.bin", tokens)
            patterns = [f"{folder}/*.bin"]
        shards = tuple(load_tokens(patterns))
        total = sum(len(shard) for shard in shards)
        print(f"{len(shards)} shard(s), {total:,} tokens, {os.cpu_count()} cores")
        print(f"{'sequence':>9} {'per batch':>10} {'million tokens/s':>18}")
        slowest = float("inf")
        for length, count in [(2048, 192), (2048, 64), (1024, 32), (256, 64), (128, 64)]:
            measured = rate(TokenWindows(shards, length, vocab_size=50257), count)
            slowest = min(slowest, measured)
            print(f"{length:>9} {count:>10} {measured / 1e6:>18.1f}")
    print(f"slowest {slowest / 1e6:.1f}, promised {PROMISE / 1e6:.0f}")
    sys.exit(slowest < PROMISE)


if __name__ == "__main__":
    main()
