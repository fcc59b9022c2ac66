"""What became of each mutant: ``record.jsonl``, to which a run adds and from which it goes on."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests.mutants.operators import Mutant

__all__ = ["RECORD", "Reason", "Verdict", "digest", "load", "reasons", "save"]

RECORD = Path(__file__).with_name("record.jsonl")
Name = tuple[str, str, str, str, int]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    room: str
    file: str
    line: int
    where: str
    was: str
    now: str
    nth: int
    killed_by: str | None  # the test that noticed it, or that it took too long or crashed
    ran: int  # how many tests ran, the last of which noticed it
    source: str  # digest of the file that was changed
    tests: str  # digest of the room's tests
    seed: int  # by which it was drawn
    possible: int  # all mutants of its room

    @property
    def name(self) -> Name:
        """The mutant's name."""
        return self.file, self.where, self.was, self.now, self.nth

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.where or 'the module'}: {self.was}  →  {self.now}"

    def holds(self, source: str, tests: str) -> bool:
        """Whether the verdict is that of the files as they are.

        New tests do not let a mutant live that others have killed.
        """
        return self.source == source and (self.killed_by is not None or self.tests == tests)


def name_of(file: Path, its: Mutant) -> Name:
    """The name under which the verdict of a mutant is kept."""
    return str(file), its.where, its.was, its.now, its.nth


def load() -> dict[Name, Verdict]:
    """The verdicts of earlier runs."""
    if not RECORD.exists():
        return {}
    found = (Verdict(**json.loads(line)) for line in RECORD.read_text().splitlines())
    return {verdict.name: verdict for verdict in found}


def save(verdicts: Iterable[Verdict]) -> None:
    """Write the record anew, sorted."""
    lines = [
        json.dumps(asdict(each), ensure_ascii=False)
        for each in sorted(verdicts, key=lambda each: (each.room, each.file, each.line, each.name))
    ]
    unfinished = RECORD.with_suffix(".unfinished")
    unfinished.write_text("\n".join(lines) + "\n")
    unfinished.replace(RECORD)


def digest(files: Iterable[Path]) -> str:
    """A short digest of the contents of files."""
    found = hashlib.blake2b(digest_size=6)
    for file in sorted(files):
        found.update(file.read_bytes())
    return found.hexdigest()


@dataclass(frozen=True)
class Reason:
    """Why a mutant may survive."""

    text: str
    changes_nothing: bool  # but speed or memory; otherwise no test can be written here


@cache
def reasons() -> dict[Name, Reason]:
    """The reasons of ``survivors.toml``, by the name of the mutant."""
    listed = tomllib.loads(Path(__file__).with_name("survivors.toml").read_text())["survivor"]
    return {
        (s["file"], s["where"], s["was"], s["now"], s.get("nth", 0)): Reason(
            s["reason"], not s.get("untested", False)
        )
        for s in listed
    }
