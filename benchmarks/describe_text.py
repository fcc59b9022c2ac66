"""What a set of token shards holds, so that others can build it and know that they have it.

    python benchmarks/describe_text.py data/wiki_*.bin --vocab r50k_base.tiktoken --month 2014-03 \\
        > results/gpt/text.json

For each shard: its tokens, its documents (each begins with the end-of-text token), the lengths of the
documents in tokens, and the SHA-256 sum of the tokens as little-endian uint16, without the header. With
``--vocab`` also the lengths in characters, which show a filter by length. With ``--month`` also the
number of documents that name each day of that month, as "4 March 2014" or "March 4, 2014". Where the
counts fall is the day of the dump.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from calendar import month_name, monthrange
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from polarstep_lab.data.shards import open_shard
from polarstep_lab.data.tokenizer import Gpt2

END_OF_TEXT = 50256


def described(path: Path, encoding: tiktoken.Encoding | None, month: str | None) -> dict[str, Any]:
    """The facts about one shard."""
    tokens = np.ascontiguousarray(open_shard(path), dtype="<u2")
    starts = np.flatnonzero(tokens == END_OF_TEXT)
    found: dict[str, Any] = {
        "shard": path.name,
        "tokens": len(tokens),
        "documents": len(starts),
        **summary(np.diff(np.append(starts, len(tokens)))),
        "sha256": hashlib.sha256(tokens.tobytes()).hexdigest(),
    }
    if encoding is not None:
        characters, days = [], Counter[int]()
        for text in texts(tokens, starts, encoding):
            characters.append(len(text))
            days.update(days_named(text, month) if month else ())
        found["characters"] = summary(np.array(characters))
        if month:
            last = monthrange(*map(int, month.split("-")))[1]
            found["days"] = {"month": month, "documents": [days[day + 1] for day in range(last)]}
    return found


def summary(lengths: np.ndarray) -> dict[str, int]:
    """The shortest, the median and the longest."""
    return {
        "shortest": int(lengths.min()),
        "median": int(np.median(lengths)),
        "longest": int(lengths.max()),
    }


def texts(tokens: np.ndarray, starts: np.ndarray, encoding: tiktoken.Encoding) -> Iterator[str]:
    """The documents, without their end-of-text token."""
    for document in np.split(tokens, starts)[1:]:
        yield encoding.decode(document[1:].tolist())


def days_named(text: str, month: str) -> set[int]:
    """The days of a month like ``"2014-03"`` that a text names."""
    year, number = month.split("-")
    name = month_name[int(number)]
    pattern = rf"\b(\d{{1,2}}) {name} {year}\b|\b{name} (\d{{1,2}}), {year}\b"
    return {int(first or second) for first, second in re.findall(pattern, text)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shards", type=Path, nargs="+")
    parser.add_argument("--vocab", type=Path, help="r50k_base.tiktoken, to count characters")
    parser.add_argument("--month", help="with --vocab: the month whose days are counted")
    given = parser.parse_args()
    encoding = Gpt2(given.vocab).encoding if given.vocab else None
    shards = [described(path, encoding, given.month) for path in given.shards]
    print(json.dumps({"end_of_text": END_OF_TEXT, "shards": shards}, indent=2))
