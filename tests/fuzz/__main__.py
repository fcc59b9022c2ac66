"""``python -m tests.fuzz --minutes 25 --seed 0``: random cases against what the package promises.

A case is a function of the seed and its number; ``--case N`` runs one case again. Each violation is
printed as a short program that shows it. The exit status is 1 if there was any. ``--cases N`` runs a
number of cases instead of a time, and ``--json FILE`` writes down what was tried and found.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tests.fuzz import checkpoints, configurations, contracts, directories
from tests.fuzz.cases import Choices, Outcome, Violation

from polarstep_lab.records.environment import describe_environment
from polarstep_lab.storage import write_json

__all__ = ["KINDS", "kind_of", "main", "run_case"]

KINDS: dict[str, Callable[[Choices], Outcome]] = {
    "maps": contracts.tried,
    "configurations": configurations.tried,
    "checkpoints": checkpoints.tried,
    "damages": directories.damages_tried,
    "kills": directories.kills_tried,
}


def kind_of(number: int) -> str:
    """What the case of this number tries; of a thousand cases one is a run with kills."""
    if number % 1000 == 500:
        return "kills"
    if number % 200 == 100:
        return "damages"
    if number % 12 == 5:
        return "maps"
    return "checkpoints" if number % 25 == 7 else "configurations"


def run_case(seed: int, number: int, kind: str | None = None) -> Outcome:
    """One case. An exception is a violation too."""
    kind = kind or kind_of(number)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return KINDS[kind](Choices(seed, kind, number))
    except Exception as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        program = (
            "from tests.fuzz.__main__ import run_case\n\n"
            f"print(run_case({seed}, {number}, {kind!r}).violations[0])\n\n# {type(error).__name__} at\n"
        )
        program += "".join(f"# {line}\n" for line in where.splitlines())
        found = f"{type(error).__name__}: {error}"
        return Outcome(Counter({kind: 1}), [Violation("no exception", found, program)])


def main(argv: list[str] | None = None) -> int:
    """Run cases until the time is over, or the given ones."""
    given = _arguments(argv)
    torch.set_num_threads(1)  # cases fork; and sums by several threads round differently
    started = told = time.monotonic()
    where = describe_environment(torch.device("cpu"))
    seen = Outcome()
    spent: Counter[str] = Counter()
    count = 0
    for number in _numbers(given, started):
        before = time.monotonic()
        outcome = run_case(given.seed, number)
        spent[kind_of(number)] += time.monotonic() - before  # type: ignore[assignment]
        count += 1
        seen.tried.update(outcome.tried)
        for violation in outcome.violations:
            seen.violations.append(violation)
            print(
                f"\n--- violation {len(seen.violations)}, seed {given.seed}, case {number}\n{violation}"
            )
        if time.monotonic() - told > given.every:
            told = time.monotonic()
            print(_summary(count, time.monotonic() - started, seen, spent), flush=True)
    print(_summary(count, time.monotonic() - started, seen, spent))
    if given.json is not None:
        record = _record(given, count, seen) | {"seconds": time.monotonic() - started}
        write_json(given.json, record | {"environment": where})
    return 1 if seen.violations else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=25, help="how long (25)")
    parser.add_argument("--seed", type=int, default=0, help="which sequence of cases (0)")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case (0)")
    parser.add_argument("--cases", type=int, help="run so many cases, however long that takes")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--only", choices=tuple(KINDS), help="cases of this kind alone")
    parser.add_argument("--every", type=float, default=10, help="seconds between lines (10)")
    parser.add_argument("--json", type=Path, help="write what was tried and found to this file")
    return parser.parse_args(argv)


def _numbers(given: argparse.Namespace, started: float) -> Iterator[int]:
    if given.case is not None:
        yield given.case
        return
    number, done = given.first, 0
    while _goes_on(given, done, started):
        if given.only in (None, kind_of(number)):
            yield number
            done += 1
        number += 1


def _goes_on(given: argparse.Namespace, done: int, started: float) -> bool:
    """Whether another case is to run, by the number of cases or else by the time."""
    if given.cases is not None:
        return done < given.cases
    return time.monotonic() - started < 60 * given.minutes


def _record(given: argparse.Namespace, count: int, seen: Outcome) -> dict[str, Any]:
    """What was tried and found; ``--seed``, ``--first`` and ``--cases`` repeat it."""
    return {
        "seed": given.seed,
        "first": given.first,
        "only": given.only,
        "cases": count,
        "tried": dict(seen.tried),
        "violations": [str(violation) for violation in seen.violations],
    }


def _summary(count: int, seconds: float, seen: Outcome, spent: Counter[str]) -> str:
    parts = [f"{number:,} {name}" for name, number in seen.tried.items()]
    rate = seen.tried["matrices"] / max(1e-9, spent["maps"])
    return (
        f"{seconds:6.0f} s, {count:,} cases: {', '.join(parts)}; {rate:,.0f} matrices a second; "
        f"{len(seen.violations)} violations"
    )


if __name__ == "__main__":
    sys.exit(main())
