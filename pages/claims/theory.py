"""What was measured about the theory's quantities: γ, the noise of gradients, and rates."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping
from functools import cache
from typing import Any

from pages import ROOT
from pages.claims.words import claim, signed
from pages.records import read_json
from pages.records.costs import Applied, applied
from polarstep_lab.records.record import RunRecord


@claim
def eight_bits() -> str:
    """What eight bits do to the deflated step, against 16 bits."""

    def of(name: str, matrices: str = "") -> list[Applied]:
        whole = f"Deflated warm, {name}"
        return [row for row in applied() if row.name == whole and row.matrices.startswith(matrices)]

    sixteen = "one step in 16 bits"
    on_momentum = [max(row.nu for row in of(name, "recorded")) for name in ("one step", sixteen)]
    worst = max(of(sixteen), key=lambda row: row.nu)
    one, exact = (
        max(row.largest for row in of(name, "rank one")) for name in ("a sixth, one step", sixteen)
    )
    assert exact < 0
    return (
        f"{on_momentum[0]:.2f} instead of {on_momentum[1]:.2f} on the recorded momentum. On the "
        f"spectrum “{worst.matrices}” it is {worst.nu:.2f} in 16 bits too. With a head of a sixth and "
        f"in eight bits, a matrix of rank one loses up to {one:.2f} of its step, and in 16 bits nothing"
    )


@claim
def wide_heads() -> str:
    """γ of the widest heads at the worse and at the better of the two steps of which a record tells."""
    name, told = "Deflated warm, ℓ = 512, one step", []
    for what in ("sixteen spikes", "rank one"):
        for side in (2048, 4096):
            (row,) = (
                row
                for row in applied()
                if row.name == name and row.matrices == f"{what}, {side}×{side}"
            )
            better = 2 * row.median - row.largest
            told.append(f"{row.largest:.2f} and {signed(better, 2)} on {what} of {side} rows")
    return f"γ at the worse and at the better of the first and the third step is {', '.join(told)}"


@claim
def gamma_of_full_space() -> str:
    """The median γ of three full-space maps along a run."""
    folder = ROOT / "results/noise/gpt/records.jsonl"
    places = {
        "seven quintic steps": "muon-noise",
        "Jordan's coefficients": "muon/solver-empirical",
        "PolarExpress": "muon/solver-polar-express",
    }
    told = []
    for words, place in places.items():
        rows = RunRecord.load(folder / place / "seed-1").logs["gamma"]
        told.append(f"{statistics.median(row['gamma'] for row in rows):.4f} with {words}")
    return f"the median γ in full space is {', '.join(told)}"


@claim
def gamma_of_rank_64() -> str:
    """The median γ of a sketch of rank 64 on momentum of a small GPT."""
    record = read_json("results/certificates/tightness.json")
    row = next(row for row in record["maps"] if row["map"] == "LowRank(64+8, h=1)")
    return (
        f"the median γ of `LowRank(64, 8)` is {row['gamma_median']:.2f}, the largest "
        f"{row['gamma_largest']:.2f} ({record['matrices']} matrices of width 256)"
    )


@cache
def _last_noise() -> dict[str, Mapping[str, Any]]:
    """The last measurement of the noise of all hidden parameters on CIFAR-10, by its unit."""
    run = RunRecord.load(ROOT / "results/noise/cifar10/records.jsonl/muon-noise/seed-0")
    rows = run.logs["noise"]
    last = max(row["step"] for row in rows)
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["step"] == last:
            first.setdefault(row["unit"], row)
    return first


@claim
def noise_of_examples() -> str:
    """What the end of a CIFAR-10 run says about heavy tails, all of it."""
    example, batch = _last_noise()["example"], _last_noise()["batch"]
    alphas = ", ".join(f"{point['alpha']:.2f}" for point in example["growth"])
    lengths = ", ".join(str(point["examples"]) for point in example["growth"])
    tail = example["tail"]
    run = RunRecord.load(ROOT / "results/noise/cifar10/records.jsonl/muon-noise/seed-0")
    before = next(
        row for row in run.logs["noise"] if row["step"] == 453 and row["unit"] == "example"
    )
    return (
        f"At the last step the α of sums of {lengths} examples rises: {alphas}. For batches of 500 it "
        f"is {batch['growth'][0]['alpha']:.2f} ({batch['growth'][0]['low']:.2f} to "
        f"{batch['growth'][0]['high']:.2f}). Hill's estimate is {tail['alpha']:.1f} "
        f"({tail['low']:.1f} to {tail['high']:.1f}) there, and {before['tail']['alpha']:.1f} at step "
        f"{before['step']}. The mean norm is {example['noise']:.1f}, the root of the mean square "
        f"{example['moments']['2']:.2f}, the largest of {example['draws']} draws "
        f"{example['largest']:.0f}"
    )


@cache
def _rates() -> dict[str, Any]:
    return read_json("results/rates/rates.json")


@claim
def rates_of_minimum() -> str:
    """How many cases fall as fast as promised, by three measures."""
    rows, replicas = _rates()["rates"], _rates()["setup"]["replicas"]

    def steep(kind: str) -> int:
        return sum(row["fit"][kind]["low"] <= row["predicted"] for row in rows)

    below = all(row["details"]["below_bound"] for row in rows)
    assert below, "a measured value is above the theorem's bound"
    gap = statistics.median(
        100 * (1 - low / high)
        for row in rows
        for low, high in zip(
            row["fit"]["minimum"]["values"], row["fit"]["held_out"]["values"], strict=True
        )
    )
    return (
        f"The smallest mean of {replicas} replicas over a run falls at least as steeply as "
        f"−(α−1)/(3α−2), within its 95% band, in {steep('minimum')} of {len(rows)} cases. That minimum "
        f"is biased down, because it also takes the luckiest noise. With the step chosen on one half of "
        f"the replicas and its mean taken over the other half, which is biased up, values are "
        f"{gap:.0f}% higher (median), and {steep('held_out')} of {len(rows)} cases are steep enough. "
        f"The average over a run, which the theorems bound as well, is steep enough in "
        f"{steep('average')} of {len(rows)}, and too flat in {len(rows) - steep('average')}"
    )


@claim
def flat_averages() -> str:
    """Which cases have too flat an average, by α."""
    rows = _rates()["rates"]
    flat = [row for row in rows if row["fit"]["average"]["low"] > row["predicted"]]
    told = []
    for alpha in sorted({row["alpha"] for row in rows}):
        count = sum(row["alpha"] == alpha for row in flat)
        of = sum(row["alpha"] == alpha for row in rows)
        told.append(f"{count} of {of} at α = {alpha:g}")
    return ", ".join(told)


@claim
def tuned_for_variance() -> str:
    """Slopes of the example about tuning for bounded variance."""
    rows = {row["name"]: row for row in _rates()["tuning"]["rows"]}
    right, wrong = rows["theorem"], rows["bounded variance"]

    def slope(row: Mapping[str, Any], kind: str) -> str:
        return f"K^{{{signed(row['fit'][kind]['slope'], 2)}}}"

    index = re.search(r"^SkewedPareto\(index=(.*)\)$", right["details"]["noise"])
    assert index is not None
    return (
        f"under one-sided Pareto noise of index {index[1]} the average of E‖∇f‖ over a run falls like "
        f"{slope(wrong, 'average')} with the α = 2 schedule, "
        f"where bounded-variance theory promises K^{{−1/4}}; with the schedule for α = "
        f"{right['alpha']:g} it falls like {slope(right, 'average')}, where "
        f"K^{{{signed(right['predicted'], 2)}}} is promised and its band reaches "
        f"{signed(right['fit']['average']['low'], 2)}. The smallest value of a run does not "
        f"distinguish the schedules: it falls like {slope(wrong, 'minimum')} and "
        f"{slope(right, 'minimum')}, flatter than either promise"
    )


@claim
def batches_below_the_threshold() -> str:
    """How a batch far below the threshold compares with a batch at the threshold."""
    study = _rates()["batch"]
    rows = {row["details"]["batch"]: row["fit"] for row in study["rows"]}
    small, large = rows[256], rows[max(rows)]
    average, least = (
        small[kind]["values"][-1] / large[kind]["values"][-1] for kind in ("average", "minimum")
    )

    def slope(fit: Mapping[str, Any]) -> str:
        found = fit["average"]
        ends = " to ".join(signed(found[end], 2) for end in ("low", "high"))
        return f"K^{{{signed(found['slope'], 2)}}} (95% {ends})"

    return (
        f"with a batch of {max(rows):,}, the threshold, the average of E‖∇f‖ over a run falls like "
        f"{slope(large)}, where K^{{−1/4}} is promised. With B = 256 it falls like {slope(small)}, but "
        f"after {study['setup']['horizons'][-1]} steps it is {average:.1f} times as large, and the "
        f"smallest value of a run {least:.1f} times as large (means of "
        f"{study['setup']['replicas']} replicas)"
    )
