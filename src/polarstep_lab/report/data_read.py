"""What data runs read, as far as their records tell, and which of them read the same.

A config has the patterns of files, or a folder of images; other data may lie under the same names. A
record has more. All but the oldest have the names and numbers of tokens of the training files, or the
numbers of images. Later ones also describe the held-out data, and have digests of the content of both.
Equal digests are equal data, whatever the files are called.

Where a record says less, it is taken at its word: it counts as having read what the others of the same
patterns read, if nothing that it says speaks against it and if they all read the same. If they did not,
what it read is unknown, which is another text than any that is known. An unknown text is no other text
than an unknown one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from polarstep_lab.records.record import RunRecord

__all__ = ["HELD_OUT", "TRAINING", "Read", "reads_of"]

TRAINING, HELD_OUT = "the training data read", "the held-out data read"
"""What two runs may differ in, in words."""

_KEYS = {TRAINING: "data", HELD_OUT: "held_out"}
_PATTERNS = {TRAINING: "train", HELD_OUT: "val"}


class Read(NamedTuple):
    """What a run read of one kind, :data:`TRAINING` or :data:`HELD_OUT`.

    ``key`` is equal for runs that read the same. ``words`` is how the record describes it, empty where
    it does not, and ``digest`` the beginning of its digest.
    """

    key: str
    words: str
    digest: str

    @property
    def how_much(self) -> int:
        """How much the record says: nothing, words, or words and a digest."""
        return bool(self.words) + bool(self.digest)

    @property
    def told(self) -> str:
        """The data in words, to tell it from other data."""
        words = self.words or "data that is not recorded"
        return f"{words} (digest {self.digest[:8]})" if self.digest else words


def reads_of(runs: Sequence[RunRecord]) -> list[dict[str, Read]]:
    """For each run, what it read of each kind."""
    found: list[dict[str, Read]] = [{} for _ in runs]
    for kind in (TRAINING, HELD_OUT):
        noted = [_noted(run, kind) for run in runs]
        scopes = [_scope(run, kind) for run in runs]
        digests: dict[Hashable, set[str]] = defaultdict(set)
        keys: dict[Hashable, set[str]] = defaultdict(set)
        for scope, (words, digest) in zip(scopes, noted, strict=True):
            if words and digest:
                digests[scope, words].add(digest)
        for scope, (words, digest) in zip(scopes, noted, strict=True):
            if key := digest or _only(digests[scope, words]) or words:
                keys[scope].add(key)
        for read, scope, (words, digest) in zip(found, scopes, noted, strict=True):
            key = digest or _only(digests[scope, words]) or words or _only(keys[scope])
            read[kind] = Read(key, words, digest)
    return found


def _noted(run: RunRecord, kind: str) -> tuple[str, str]:
    """How a record describes what was read, and its digest; empty where it does not.

    A run that went on with other data than it began with has read both.
    """
    words, digest = (
        ", then ".join(dict.fromkeys(str(each[key]) for each in run.sessions if each.get(key)))
        for key in (_KEYS[kind], f"{_KEYS[kind]}_digest")
    )
    return words, digest


def _scope(run: RunRecord, kind: str) -> Hashable:
    """The recipe of a run and the files that its config names."""
    data: Any = run.identity.config.get("data")
    files = data.get(_PATTERNS[kind]) if isinstance(data, Mapping) else None
    return run.identity.recipe, json.dumps(files, sort_keys=True, default=str)


def _only(found: set[str]) -> str:
    """The only one of these; empty where there is none, or more than one."""
    return next(iter(found)) if len(found) == 1 else ""
