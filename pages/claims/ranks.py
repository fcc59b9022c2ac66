"""What a step on many ranks sends and computes, by formulas, and where the code has limits.

Nothing here was measured: the numbers follow from the package. ``tests/ranks/test_plans.py``
counts the bytes and products of real steps against the same formulas.
"""

from __future__ import annotations

import polarstep as ps
from pages.claims.words import claim
from polarstep.engines.replay import LARGEST_BUCKET
from polarstep.ranks import plans

RANKS = 4
SHAPES = ((8, 512, 512), (4, 2048, 512), (4, 512, 2048))  # (count, m, n)
LOW_RANK = "LowRank(64, 8, power=0)"
MAPS: dict[str, ps.PolarMap] = {
    "full space": ps.NewtonSchulz(5, "polar-express"),
    LOW_RANK: ps.LowRank(64, 8, power=0),
}
MIB = 2**20


def received(polar: ps.PolarMap, count: int, m: int, n: int, itemsize: int = 2) -> float:
    """Bytes that a rank receives, by default with M and T in bfloat16."""
    shared = plans.SharedMatrices(m, n, count, RANKS)
    return plans.bytes_received("owner", shared, polar, itemsize=itemsize)


@claim
def share_of_products() -> str:
    """The products of a rank over those of one process, at most, for the table of bytes."""
    most = max(
        plans.flops_per_rank("owner", plans.SharedMatrices(m, n, count, RANKS), polar)
        / (count * polar.flops(m, n))
        for polar in MAPS.values()
        for count, m, n in SHAPES
    )
    return f"1/{1 / most:.3g} of the products of one process"


@claim
def received_in_float32() -> str:
    """What a rank receives for the wide matrices of the table where everything is in float32."""
    count, m, n = SHAPES[-1]
    nbytes = received(MAPS[LOW_RANK], count, m, n, itemsize=4)
    return f"{nbytes / MIB:.1f} MiB for {count} × {m}×{n}"


@claim
def largest_bucket() -> str:
    """The memory of a bucket up to which a rank keeps a CUDA graph of its map."""
    return f"{LARGEST_BUCKET // MIB} MiB"
