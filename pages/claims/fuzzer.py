"""The recorded run of the fuzzer: how the package is tried beyond its tests."""

from __future__ import annotations

from pages.claims.words import claim
from pages.records import read_json

FUZZED = "results/fuzz/cpu.json"


@claim
def fuzzed() -> str:
    """What the recorded run of the fuzzer tried and found."""
    record = read_json(FUZZED)
    tried, where = record["tried"], record["environment"]
    found = len(record["violations"])
    told = ", ".join(
        f"{tried[name]:,} {words}"
        for name, words in {
            "matrices": "matrices",
            "maps": "maps",
            "configurations": "configurations",
            "checkpoints": "copies of runs",
            "kills": "kills",
            "damaged files": "damaged files",
        }.items()
    )
    return (
        f"{record['cases']:,} cases of seed {record['seed']}, from case {record['first']} on, tried "
        f"{told} in {record['seconds'] / 60:.0f} minutes on one core ({where['device_name']}, torch "
        f"{where['packages']['torch']}, commit `{where['git_commit'][:7]}`). Violations: {found}"
    )
