"""What a step costs on a CPU."""

from __future__ import annotations

import polarstep as ps
from pages.claims.words import claim
from pages.records import read_json
from pages.records.costs import FULL_SPACE, INNER, TIMES, steps

_FAST = ("LowRank, warm", "LowRank, Gaussian h=0", "LowRank, Gaussian h=0, kept 4 steps")
_SMALL = "768×768"
# With tiles FULL_SPACE is in bfloat16 in the record cpu-tiles, and in float32 in the earlier record cpu.
IN_FLOAT32 = f"{FULL_SPACE}, in float32"


@claim
def cpu_speedup() -> str:
    """How many times as fast as a loop of seven steps ``LowRank(200)`` is on a CPU."""
    found = []
    for record in ("cpu", "cpu-no-tiles"):
        times = steps(f"results/step-cost/{record}.json")
        loop = times["a loop of Newton–Schulz 7", "nanoGPT"]["ms"]
        found.append(loop / times["LowRank, the paper's (h=1, q=7)", "nanoGPT"]["ms"])
    return (
        f"{found[1]:.1f} times as fast as a float32 loop of seven Newton–Schulz steps on nanoGPT's "
        f"matrices, and {found[0]:.1f} times on a CPU with bfloat16 tiles (single runs)"
    )


@claim
def cpu_beside_full_space() -> str:
    """``LowRank(200)`` beside full space on a CPU and on a GPU; the CPU's is in float32."""

    def times(record: str, load: str = "nanoGPT") -> str:
        rows = steps(record)
        ours = rows["LowRank, the paper's (h=1, q=7)", load]["ms"]
        return f"{rows[FULL_SPACE, load]['ms'] / ours:.1f}"

    plain, tiles = (times(f"results/step-cost/{name}.json") for name in ("cpu-no-tiles", "cpu"))
    rows = steps("results/step-cost/cpu-tiles.json")
    full, sixteen = (rows[name, "nanoGPT"]["ms"] for name in (IN_FLOAT32, FULL_SPACE))
    return (
        f"`LowRank(200)` is {plain} times as fast as full space on a tenth of nanoGPT's matrices on a "
        f"CPU. On a CPU with bfloat16 tiles it is {tiles} times as fast as full space in float32; in "
        f"bfloat16, the default there, full space is {full / sixteen:.1f} times as fast as in float32. "
        f"On an H200 a sketch of the same part of the width is {times(TIMES)} times as fast on "
        "nanoGPT's matrices (single runs of the benchmark)"
    )


@claim
def cpu_fast_maps() -> str:
    """The least that the maps which are fast on a GPU gain on nanoGPT's shapes, on two cores."""
    gains = []
    for record in ("cpu", "cpu-no-tiles"):
        times = steps(f"results/step-cost/{record}.json")
        gains += [
            times["a loop of Newton–Schulz 7", load]["ms"] / times[name, load]["ms"]
            for name in _FAST
            for load in ("nanoGPT", "one of each", _SMALL, "3072×768")
        ]
    return (
        f"at least {min(gains):.1f} times as fast as the loop on these shapes, on a CPU with and "
        "without tiles (single runs)"
    )


@claim
def cpu_small_matrix() -> str:
    """Why one small matrix gains less: work by the paper's count, and where a sketch's time goes."""
    record = read_json("results/step-cost/cpu.json")
    phases = record["phases"][_SMALL]
    part = sum(phases[name] for name in INNER) / sum(phases.values())
    work = ps.NewtonSchulz(7, "quintic").flops(768, 768) / ps.LowRank(200).flops(768, 768)
    times = steps("results/step-cost/cpu.json")
    loop, ours = (
        times[name, _SMALL]["ms"]
        for name in ("a loop of Newton–Schulz 7", "LowRank, the paper's (h=1, q=7)")
    )
    return (
        f"it is {loop / ours:.1f} times as fast as the loop on a CPU with tiles (a single run), "
        f"although for {_SMALL} the loop has {work:.1f} times as many FLOPs by the paper's count. Of "
        f"the phases of a warm sketch, orthonormalization and inner iteration take {part:.0%} of the "
        "time there"
    )


@claim
def cpu_auto() -> str:
    """How many times as fast as full space ``polar="auto"`` is on a CPU."""
    times = steps("results/step-cost/cpu-arm.json")
    found = [
        times[FULL_SPACE, load]["ms"] / times["auto", load]["ms"]
        for load in ("nanoGPT", "one of each")
    ]
    return (
        f'`polar="auto"` is {found[0]:.1f} times as fast as full space with PolarExpress 5 on a tenth '
        f"of nanoGPT's matrices, and {found[1]:.1f} times on one of each shape, on two ARM cores (a "
        "single run)"
    )


@claim
def cpu_auto_tiles() -> str:
    """The same with tiles, which run the step on the rest in bfloat16; and full space in bfloat16."""
    times = steps("results/step-cost/cpu-tiles.json")

    def gain(name: str, load: str = "nanoGPT", over: str = IN_FLOAT32) -> str:
        return f"{times[over, load]['ms'] / times[name, load]['ms']:.1f}"

    return (
        f'`polar="auto"` (rank 120 + 8) is {gain("auto")} times as fast as full space with '
        f"PolarExpress 5 in float32 on a tenth of nanoGPT's matrices, and "
        f"{gain('auto', 'one of each')} times on one of each shape. Rank 56 is "
        f"{gain('Deflated 56, warm, one step')} times as fast, and rank 120 with that step in float32 "
        f"{gain('Deflated 120, warm, one step, float8=False')} times. Full space in bfloat16, the "
        f"default there, is {gain(FULL_SPACE)} times as fast as in float32: beside it `auto` is "
        f"{gain('auto', over=FULL_SPACE)} times as fast, and "
        f"{gain('auto', 'one of each', FULL_SPACE)} times on one of each shape (two x86 cores, a "
        "single run)"
    )


@claim
def cpu_auto_flops() -> str:
    """The same by the paper's count of FLOPs."""
    shapes = [(768, 768)] * 4 + [(768, 3072)] * 2
    full = sum(ps.NewtonSchulz(5, "polar-express").flops(*shape) for shape in shapes)
    # By name: which map Auto takes depends on the CPU that makes the page.
    head = ps.LowRank(120, 8, sketch=ps.Warm(), inner=ps.NewtonSchulz(4, "polar-express-sketch"))
    deflated = ps.Deflated(head, ps.NewtonSchulz(1, "flat"))
    auto = sum(deflated.flops(*shape) for shape in shapes)
    return f"{full / auto:.1f}"


@claim
def bare_products() -> str:
    """What the products of a step alone allow on a CPU."""
    record = read_json("results/step-cost/cpu-bare.json")
    rows = {row["map"]: row for row in record["maps"]}
    told = []
    for rank in (56, 120):
        row = rows[f"Deflated {rank}, warm, one step"]
        told.append(
            f"{row['bare_faster']:.2f} with rank {rank}, where whole steps have {row['faster']:.2f}"
        )
    return f"the bare products of both steps have a ratio of {' and '.join(told)}"


@claim
def price_of_fixes_on_a_cpu() -> str:
    """Steps of today's package over those of the version before, timed in turn."""
    record = read_json("results/step-cost/cpu-arm-before.json")
    rows = [row for row in record["beside"] if "AdamW" not in row["optimizer"]]
    ratios = [row["ms_ratio"] for row in rows]
    return (
        f"steps of {len(rows)} maps take {min(ratios):.2f} to {max(ratios):.2f} times as long as before "
        f"(medians of {record['rounds']} rounds)"
    )
