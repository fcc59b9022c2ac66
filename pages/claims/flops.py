"""What the ledger of FLOPs leaves unexplained of the paper's Table 2, by the ledger itself."""

from __future__ import annotations

from math import ceil, floor

from pages.claims.words import claim
from polarstep_lab import flops
from polarstep_lab.flops import CIFAR10, NANOGPT, TABLE_2

RANDOMIZED = [method for method in TABLE_2["cifar10"] if method.startswith("Rand")]
PRINTED = 1e-4
"""The last digit of a figure in Table 2, in GFLOPs."""


@claim
def extra_flops() -> str:
    """The item that only the Muon rows of nanoGPT have."""
    rows = {method: flops.ledger(NANOGPT, method) for method in TABLE_2["nanogpt"]}
    extra = {items["extra"] for items in rows.values() if "extra" in items}
    (cost,) = extra

    def part(randomized: bool) -> str:
        found = [
            cost / sum(items.values())
            for method, items in rows.items()
            if "extra" in items and method.startswith("Rand") is randomized
        ]
        return " to ".join(dict.fromkeys(f"{end:.2%}" for end in (min(found), max(found))))

    return (
        f"{cost / NANOGPT.muon_parameters:.0f} FLOPs a parameter in the Muon rows of nanoGPT, "
        f"{cost / 1e9:.2f} GFLOPs: {part(randomized=False)} of the full-space rows, "
        f"{part(randomized=True)} of the randomized ones"
    )


@claim
def usual_qr() -> str:
    """How far the randomized CIFAR-10 rows would fall short with the usual count of a wide QR."""
    ell = CIFAR10.rank + CIFAR10.oversample
    fewer = sum(
        count * (flops.qr(m, ell) - (2 * ell * m**2 - 2 * m**3 / 3))
        for (m, _), count in CIFAR10.matrices
        if m < ell
    )
    ours = flops.gflops(CIFAR10)
    short = [1 - (ours[row] - fewer / 1e9) / TABLE_2["cifar10"][row] for row in RANDOMIZED]
    return " to ".join(dict.fromkeys(f"{end:.2%}" for end in (min(short), max(short)))) + " short"


@claim
def shortfall_on_cifar() -> str:
    """By how many FLOPs all randomized CIFAR-10 rows fall short of what rounds to Table 2's figures."""
    ours, theirs = flops.gflops(CIFAR10), TABLE_2["cifar10"]
    least = max(theirs[row] - PRINTED / 2 - ours[row] for row in RANDOMIZED) * 1e9
    most = min(theirs[row] + PRINTED / 2 - ours[row] for row in RANDOMIZED) * 1e9
    assert 0 < least < most, "no term would fit all rows"
    part = most / 1e9 / min(theirs[row] for row in RANDOMIZED)
    assert part < 1e-5
    return (
        f"{floor(least / 1000)},000 to {ceil(most / 1000)},000 FLOPs in the randomized rows of CIFAR-10 "
        "(below 0.001%)"
    )
