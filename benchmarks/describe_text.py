"""What a set of token shards holds, so that others can build it and know that they have it.

    python benchmarks/describe_text.py data/wiki_*.bin > results/gpt/text.json

For each shard: its tokens, its documents (each begins with the end-of-text token), the lengths of the
documents in tokens, and the SHA-256 sum of the tokens as little-endian uint16, without the header.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from polarstep_lab.data.shards import open_shard

END_OF_TEXT = 50256


def described(path: Path) -> dict[str, Any]:
    """The facts about one shard."""
    tokens = np.ascontiguousarray(open_shard(path), dtype="<u2")
    starts = np.flatnonzero(tokens == END_OF_TEXT)
    lengths = np.diff(np.append(starts, len(tokens)))
    return {
        "shard": path.name,
        "tokens": len(tokens),
        "documents": len(starts),
        "shortest": int(lengths.min()),
        "median": int(np.median(lengths)),
        "longest": int(lengths.max()),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }


if __name__ == "__main__":
    shards = [described(Path(name)) for name in sys.argv[1:]]
    print(json.dumps({"end_of_text": END_OF_TEXT, "shards": shards}, indent=2))
