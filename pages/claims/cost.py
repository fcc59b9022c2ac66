"""What a step costs on a GPU, against AdamW's and against other libraries'."""

from __future__ import annotations

import math

from frontier import WIDTH
from pages import ROOT
from pages.claims.long_run import long_gap, one_rate
from pages.claims.scaling import widest
from pages.claims.words import claim
from pages.records import best_rates, read_json
from pages.records import long_run as study
from pages.records.costs import (
    AUTO,
    BETWEEN,
    EIGHTH,
    FULL_SPACE,
    HELD,
    INNER,
    MAPS,
    MAPS_AGAIN,
    SIXTH,
    STEP_COST,
    TWELFTH,
    WITH_AN_RMS,
    columns_of_auto,
    on_hosts,
    steps,
)
from pages.records.maps import Weighed, peers, timed_with_less
from polarstep import Deflated
from step_optimizers import RMS, WITH_RMS, forced
from step_workloads import BETWEEN as WIDTHS
from step_workloads import WORKLOADS


def ratio(optimizer: str, workload: str) -> str:
    """The time of a step over AdamW's."""
    return f"{steps()[optimizer, workload]['ratio']:.1f}"


@claim
def deflated_price() -> str:
    """What the map of ``auto`` costs and saves, at which ranks, and how a rank that small trains."""
    small, large = (
        f"{ratio(AUTO, load)} instead of {ratio(FULL_SPACE, load)} times" for load in HELD
    )
    ells = columns_of_auto()
    gap = best_rates.gap(study.MAP_OF_AUTO).told(unit="%")
    return (
        f"{small} AdamW's step on nanoGPT's matrices (ℓ = {ells[0]}, {ells[0] / 768:.0%} of the width), "
        f"and {large} on an 8B layer (ℓ = {ells[1]}, {ells[1] / 4096:.0%}). The first ended at "
        f"{gap} in test perplexity against full space after "
        f"{study.million_tokens():.1f}M tokens, each at the best of its rates over all steps. No model "
        f"of the 8B layer's width was trained; at width 768 a head of an eighth ended at "
        f"{long_gap('deflated-88')} after as many tokens, {one_rate()}, and at width {widest()}"
    )


@claim
def auto_share() -> str:
    """The part of full space's time that a step of ``auto`` takes, and at which ranks."""
    parts = [
        f"{steps()[AUTO, load]['ratio'] / steps()[FULL_SPACE, load]['ratio']:.0%}" for load in HELD
    ]
    widths = zip(HELD.values(), columns_of_auto(), strict=True)
    small, large = (f"ℓ = {ell}, {ell / d:.0%}" for d, ell in widths)
    return (
        f"{parts[0]} of full space's time on nanoGPT's matrices ({small} of the width), and {parts[1]} "
        f"on a layer of an 8B model ({large}, a width at which nothing was trained)"
    )


@claim
def narrow_share() -> str:
    """The part of full space's time that a deflated map takes on narrower matrices."""
    rows = steps(BETWEEN)
    whole, device = (
        [
            f"{rows[SIXTH, load][ms] / rows[FULL_SPACE, load][ms]:.0%} at {d}"
            for load, d in _narrow().items()
        ]
        for ms in ("ms", "device_ms")
    )
    return (
        f"{', '.join(whole[:-1])} and {whole[-1]} rows, and of its time on the device alone "
        f"{', '.join(device[:-1])} and {device[-1]} (48 square matrices and 24 of four times the length)"
    )


def _narrow() -> dict[str, str]:
    """The workloads of narrow matrices, and their rows."""
    return {load: load.removeprefix("width ") for load in WIDTHS}


def _on_device(optimizer: str, load: str) -> float:
    """The ms of a step on the device, in the record of narrow matrices."""
    return float(steps(BETWEEN)[optimizer, load]["device_ms"])


@claim
def waits_for_host() -> str:
    """The short steps that took much longer than their work on the device."""
    told = [
        f"{words} at {rows} rows spent {share:.0%}"
        for name, words in (("LowRank, ℓ = a quarter", "`LowRank`"), (SIXTH, "`Deflated`"))
        for load, rows in _narrow().items()
        if (share := _on_device(name, load) / steps(BETWEEN)[name, load]["ms"]) < 0.9
    ]
    return f"{', '.join(told)} of its time on the device"


@claim
def full_space_again() -> str:
    """What full space costs in every record of an H200 that has both sets of matrices."""
    found = []
    for path in sorted((ROOT / STEP_COST).glob("h200*.json")):
        rows = [row for row in read_json(path).get("steps", ()) if isinstance(row, dict)]
        ratios = {row["workload"]: row["ratio"] for row in rows if row["optimizer"] == FULL_SPACE}
        if ratios.keys() >= HELD.keys():
            found.append(ratios)
    ends = {
        load: (min(each[load] for each in found), max(each[load] for each in found))
        for load in HELD
    }
    told = [
        f"{ends[load][0]:.2f} to {ends[load][1]:.2f} times AdamW's on {words}"
        for load, words in (("nanoGPT", "nanoGPT's matrices"), ("8B layer", "the 8B layer"))
    ]
    shown = steps()[FULL_SPACE, "nanoGPT"]["ratio"]
    highest = ", the highest of them" if shown == ends["nanoGPT"][1] else ""
    return (
        f"in {len(found)} records, of several hosts and commits, a step of full space takes "
        f"{' and '.join(told)}; the record of these tables has {shown:.2f} on nanoGPT's "
        f"matrices{highest}"
    )


@claim
def head_prices() -> str:
    """What heads of three widths cost on an 8B layer."""
    told = []
    for name in (SIXTH, EIGHTH, TWELFTH):
        part, ell = name.partition("ℓ = ")[2], _columns_at_4096(name)
        of_auto = ell == columns_of_auto()[-1]
        price = steps()[AUTO if of_auto else name, "8B layer"]["ratio"]
        which = ", `auto` itself" if of_auto else ""
        told.append(f"{price:.2f} with the head of {part} (ℓ = {ell}{which})")
    return f"{told[0]}, {told[1]} and {told[2]}"


def _columns_at_4096(name: str) -> int:
    """ℓ of a deflated map on matrices whose short side is 4096."""
    polar = forced(4096)[name]()
    assert isinstance(polar, Deflated)
    return polar.head.width


@claim
def price_of_rms() -> str:
    """What ``shape_scale="rms"`` adds to a step, for three maps on two sets of matrices."""
    words = dict(zip(WITH_RMS, ("in full space", "with `Deflated`", "with `LowRank`"), strict=True))
    told = []
    for load in ("nanoGPT", "8B layer"):
        rows = steps(WITH_AN_RMS)
        more = [
            f"{rows[name + RMS, load]['ms'] / rows[name, load]['ms'] - 1:z.0%}" for name in words
        ]
        parts = [f"{part} {which}" for part, which in zip(more, words.values(), strict=True)]
        told.append(f"{', '.join(parts)} on {'an ' if load[0] == '8' else ''}{load}")
    return f"{told[0]}, and by {told[1]}"


@claim
def timed_again() -> str:
    """Rows of the table of all maps in another run."""
    first, again = steps(MAPS), steps(MAPS_AGAIN)
    both = [row for row in again if row in first and row[0] != "AdamW, fused"]
    apart = [again[row]["ms"] / first[row]["ms"] for row in both]
    prices = [
        f"{again[name, '8B layer']['ratio']:.2f} after {first[name, '8B layer']['ratio']:.2f} {words}"
        for name, words in (
            ("auto", "with `auto`"),
            ("auto, rows normalized", "with normalized rows"),
        )
    ]
    return (
        f"In another run, at a later commit, {len(both)} of these times are {min(apart):.2f} to "
        f"{max(apart):.2f} of those in the table; on the 8B layer a step takes {' and '.join(prices)} "
        "times AdamW's"
    )


@claim
def rank_price() -> str:
    """What a sketch costs where ℓ is a larger part of the width."""
    sweeps = read_json("results/step-cost/h200.json")["sweeps"]
    adamw = {row["x"]: row for row in sweeps["width"]}[4096]
    wide = {row["x"]: row for row in sweeps["rank"]}[1024]["LowRank, warm"]
    return (
        f"With ℓ = 1024 on four 4096×4096 matrices, 25% of the width, a warm sketch costs "
        f"{wide / adamw['AdamW, fused']:.1f}× AdamW's step, and full space "
        f"{adamw[FULL_SPACE] / adamw['AdamW, fused']:.1f}×"
    )


@claim
def rank_shares() -> str:
    """Which part of the width the timed sketches have."""
    parts = []
    for load, d in (("nanoGPT", 768), ("8B layer", 4096)):
        ell = WORKLOADS[load].width
        parts.append(f"ℓ = {ell} is {ell / d:.0%} of the short side")
    return f"on nanoGPT {parts[0]}, on the 8B layer {parts[1]}"


def _parts_apart() -> tuple[list[Weighed], str, str]:
    """Maps of which the sketch on the 8B layer is not what was trained, and both parts of the width."""
    found = timed_with_less("8B layer")
    timed = {(each.columns_on("8B layer") or 0) / HELD["8B layer"] for each in found}
    trained = {f"{(each.trained_columns or 0) / WIDTH:.0%}" for each in found}
    (part,), (of_runs,) = timed, trained
    return found, f"{part:.0%}", of_runs


@claim
def small_sketches() -> str:
    """What the sketches cost on the 8B layer that are too narrow there to have a perplexity."""
    found, timed, trained = _parts_apart()
    ends = sorted(found, key=lambda each: steps()[each.timed or "", "8B layer"]["ratio"])
    told = [f"{ratio(each.timed or '', '8B layer')} ({each.title})" for each in (ends[0], ends[-1])]
    return (
        f"On the 8B layer sketches with {timed} of the width take from {told[0]} to {told[1]} times "
        f"AdamW's step. They were trained with {trained} of the width and none with {timed}, so they "
        "have no row there."
    )


@claim
def parts_of_low_rank() -> str:
    """That the price on the 8B layer and the perplexity of ``LowRank`` are of different sketches."""
    found, timed, trained = _parts_apart()
    assert {"`LowRank`, h = 0", "`LowRank`, the paper's"} <= {each.title for each in found}
    return (
        f"on the 8B layer `LowRank` was timed with a sketch of {timed} of the width, and it was trained "
        f"with {trained} only, so how well it trains at that price is not known"
    )


@claim
def goals() -> str:
    """The prices against the goals that were set for them."""
    rows = steps("results/step-cost/h200.json")

    def both(name: str, digits: int = 2) -> str:
        told = [f"{rows[name, load]['ratio']:.{digits}f}×" for load in ("nanoGPT", "8B layer")]
        return f"{told[0]} on nanoGPT and {told[1]} on the 8B layer"

    return (
        f"The warm sketch costs {both('LowRank, warm')}, and full space {both(FULL_SPACE, 1)}. A fresh "
        f"sketch without power iterations, which needs no state, costs "
        f"{both('LowRank, Gaussian h=0')}; with its basis kept for four steps it costs "
        f"{both('LowRank, Gaussian h=0, kept 4 steps')}, as a mean over steps that make a basis and "
        "steps that do not."
    )


@claim
def growth_with_width() -> str:
    """The exponents of the time of a step in the width."""
    width = read_json("results/step-cost/h200.json")["sweeps"]["width"]
    ends = [row for row in width if row["x"] in (1024, 8192)]

    def power(name: str) -> float:
        return math.log(ends[1][name] / ends[0][name]) / math.log(ends[1]["x"] / ends[0]["x"])

    return (
        f"From 1024 to 8192 the time of the randomized step grows as the width to the power of "
        f"{power('LowRank, warm'):.2f}, and that of the full-space step as {power(FULL_SPACE):.2f}"
    )


@claim
def kaczmarz_time() -> str:
    """Whether column sampling saves time."""
    rows = steps("results/step-cost/h200.json")
    ours, gaussian = (
        rows[f"LowRank, {sketch} h=½", "nanoGPT"]["ms"] for sketch in ("Kaczmarz", "Gaussian")
    )
    return f"{ours:.2f} ms where a Gaussian sketch of the same width takes {gaussian:.2f}"


@claim
def torch_muon() -> str:
    """How much of the time of torch's Muon is the host's."""
    told = [f"{row['ms']:.0f} ms" for row in on_hosts("torch.optim.Muon", "nanoGPT")]
    return f"{', '.join(told[:-1])} and {told[-1]} on {len(told)} hosts"


@claim
def peers_price() -> str:
    """What other libraries' optimizers cost, each on all hosts on which it was timed."""
    dion = {peer.title: peer for peer in peers()}["Muon of dion"]
    assert dion.timed is not None

    def times(name: str, load: str) -> str:
        ratios = [row["ratio"] for row in on_hosts(name, load)]
        return " to ".join(dict.fromkeys(f"{end:.1f}" for end in (min(ratios), max(ratios))))

    def both(name: str) -> str:
        count = len(on_hosts(name, "nanoGPT"))
        return (
            f"{times(name, 'nanoGPT')} times AdamW's step on nanoGPT's matrices and "
            f"{times(name, '8B layer')} times on an 8B layer ({count} host{'s' * (count > 1)})"
        )

    return f"`torch.optim.Muon` takes {both('torch.optim.Muon')}; {dion.timed}, {both(dion.timed)}"


@claim
def rows_price() -> str:
    """What normalized rows cost."""
    told = []
    for load, words in (("nanoGPT", "nanoGPT's matrices"), ("8B layer", "an 8B layer")):
        pairs = [
            f"{ratio(f'{name}, rows normalized', load)} instead of {ratio(name, load)}"
            for name in (FULL_SPACE, AUTO)
        ]
        told.append(
            f"{pairs[0]} times AdamW's step in full space and {pairs[1]} times with `auto` "
            f"on {words}"
        )
    return ", ".join(told)


@claim
def scaled_rest_price() -> str:
    """What ``Deflated`` without steps costs beside its head alone."""
    rows = steps()
    ratios = [
        rows["Deflated, Gaussian h=1, rest scaled", load]["ms"]
        / rows["LowRank, Gaussian h=1", load]["ms"]
        for load in ("nanoGPT", "8B layer")
    ]
    return (
        f"{ratios[0]:.2f} times the step of its `LowRank` head on nanoGPT's matrices, and "
        f"{ratios[1]:.2f} times on an 8B layer, where 1.15 was the goal"
    )


@claim
def price_of_fixes() -> str:
    """Steps of today's package over those of the version before, timed in turn."""
    record = read_json("results/step-cost/h200-before.json")
    rows = [row for row in record["beside"] if not row["optimizer"].startswith("AdamW")]
    largest = max(rows, key=lambda row: row["ms_ratio"])
    rounds = [len(row["ms_ratios"]) for row in rows]  # rows near the limit were timed again
    maps, loads = (len({row[name] for row in rows}) for name in ("optimizer", "workload"))
    whole, device = (
        f"{min(row[of] for row in rows):.3f} to {max(row[of] for row in rows):.3f} times as long"
        for of in ("ms_ratio", "device_ms_ratio")
    )
    return (
        f"of {maps} maps on {loads} sets of matrices take {whole} as before (medians of "
        f"{min(rounds)} to {max(rounds)} rounds); the largest is that of {largest['optimizer']}, on the "
        f"{largest['workload']}. The work on the GPU alone takes {device}"
    )


@claim
def where_the_time_goes() -> str:
    """Phases of a warm step on the GPU: small products beside passes over the parameters."""
    phases = read_json("results/step-cost/h200.json")["phases"]

    def ms(load: str, *names: str) -> float:
        return sum(phases[load][name] for name in names)

    told = [
        f"{ms(load, *INNER):.2f} ms on {words}, where momentum and update take "
        f"{ms(load, 'momentum', 'lift and update'):.2f}"
        for load, words in (("nanoGPT", "nanoGPT"), ("8B layer", "the 8B layer"))
    ]
    return (
        f"orthonormalization and inner iteration of a warm step take {', and '.join(told)} "
        "(phases timed one by one)"
    )
