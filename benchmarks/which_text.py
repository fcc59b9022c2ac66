"""Which text a run read, as its record names it, so that only runs of one text are compared.

A record has a digest of the training text and one of the held-out text. Both are made as
``polarstep run`` makes those of its ``environment.json``. Earlier records have none: nothing speaks
against comparing them, and they are taken to be of the text that the others name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polarstep_lab.data.shards import digest_of, short_digest

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_one_text", "text_of_shards", "text_of_tokens"]

TRAINING, HELD_OUT = "data_digest", "held_out_digest"
WORDS = {TRAINING: "training", HELD_OUT: "held-out"}


def text_of_shards(train: Path, val: Path) -> dict[str, str]:
    """What a record says of the text in these two shards. Of large shards only samples are read."""
    return {TRAINING: digest_of([train]), HELD_OUT: digest_of([val])}


def text_of_tokens(train: Tensor, val: Tensor) -> dict[str, str]:
    """What a record says of a short text, whose tokens are in memory."""
    digests = (short_digest(part.numpy().astype("<u2").tobytes()) for part in (train, val))
    return dict(zip((TRAINING, HELD_OUT), digests, strict=True))


def check_one_text(records: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if two records name different texts, for training or held out."""
    named: dict[str, dict[str, Mapping[str, Any]]] = {TRAINING: {}, HELD_OUT: {}}
    for record in records:
        for key, found in named.items():
            if digest := record.get(key):
                found.setdefault(digest, record)
    for key, found in named.items():
        if len(found) > 1:
            runs = ", ".join(
                f"{record['map']}, seed {record['seed']} ({key} {digest[:8]}…)"
                for digest, record in found.items()
            )
            raise ValueError(
                f"runs on {len(found)} {WORDS[key]} texts: {runs}; expected one, as perplexities on "
                "different texts do not compare: keep the records of each text in a file of its own"
            )
