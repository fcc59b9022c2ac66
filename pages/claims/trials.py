"""How the package is tried beyond its tests, and what a large parameter needs."""

from __future__ import annotations

from pages.claims.words import claim
from pages.records import read_json
from polarstep.optim.stepping.large import peak
from polarstep.products.in_place import LARGE

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


@claim
def large_parameter() -> str:
    """The size of a matrix from which it is updated in place on a CPU."""
    return f"{LARGE // 2**20} MiB"


@claim
def memory_of_a_large_step() -> str:
    """What a step in place needs above X, G and C, by the formula, and the least for a square."""
    wide, square = (8192, 32768), (16384, 16384)
    told = " and ".join(f"{peak(m, n):.3g} times for {m}×{n}" for m, n in (wide, square))
    return (
        f"{told}. These are M itself, half of its Gram matrix, and a few rows. A square parameter "
        f"cannot need less than {peak(2**40, 2**40):.1f} times its memory in this way"
    )
