"""What a step costs: times against AdamW's, memory, and whole training steps."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch

import polarstep as ps
from pages.numbers.number import Number, plain, span
from pages.records import lines, rows

LOADS = {"nanogpt": "nanoGPT", "8b": "8B layer"}
"""The matrices that were timed on a GPU: 64 of a GPT of width 768, and one layer of 8B parameters."""
WIDTHS = (384, 512, 576, 640, 704)
"""The widths between them."""
MAPS = {
    "full": "full space, PolarExpress 5",
    "full-rows": "full space, PolarExpress 5, rows normalized",
    "auto": "auto",
    "auto-rows": "auto, rows normalized",
    "auto-rows-fan": "auto, rows normalized",
    "low-rank": "LowRank, Gaussian h=0",
    "paper": "LowRank, the paper's (h=1, q=7)",
}
"""Our maps: the name of a number, and of the row in the record. A factor of the rate costs nothing."""
PEERS = {
    "adamw": "AdamW, fused",
    "torch-muon": "torch.optim.Muon",
    "jordan": "Muon of K. Jordan",
    "dion": "Muon of dion",
    "normuon": "NorMuon of dion",
    "dion2": "Dion2 (a quarter of the rows)",
    "dion3": "Dion3 (a quarter of the rows)",
    "soap": "SOAP of pytorch_optimizer",
}
"""Other optimizers. A peer that was timed with a CUDA graph too is taken as the faster of both."""
HOSTS = ("h200", "h200-deflated", "h200-peers")
"""Records of three hosts. ``torch.optim.Muon`` waits for the CPU: the fastest of them counts."""
STEP_COST = "results/step-cost"


@cache
def steps(part: str) -> dict[tuple[str, str], dict[str, Any]]:
    """The timed steps of a record, by optimizer and workload."""
    found = {}
    for line in lines("step-cost", part, "time"):
        if "workload" in line["config"]:
            found[line["variant"], line["config"]["workload"]] = line["result"]
    return found


def timed(slug: str, load: str) -> dict[str, Any] | None:
    """The row of a map or a peer on a workload: our maps were timed again after the peers."""
    title = {**MAPS, **PEERS}[slug]
    forms = [title, f"{title}, CUDA graph"]
    for part in ("h200-maps", "h200-peers"):
        found = [steps(part)[form, load] for form in forms if (form, load) in steps(part)]
        if found:
            return min(found, key=lambda row: row["ms"])
    return None


def numbers() -> Iterator[tuple[str, Number]]:
    """All numbers of this file."""
    yield from _steps()
    yield from _shares()
    yield from _between()
    yield from _on_cpus()
    yield from _whole_steps()
    yield from _counted()


def _steps() -> Iterator[tuple[str, Number]]:
    """Time, price and memory of a step; the price is in steps of fused AdamW in the same run."""
    for slug in (*MAPS, *PEERS):
        for load, workload in LOADS.items():
            row = timed(slug, workload)
            if row is None:
                continue
            if slug == "torch-muon":
                hosts = [steps(part)[PEERS[slug], workload] for part in HOSTS]
                row = min(hosts, key=lambda host: host["ratio"])
                on_all = span([host["ratio"] for host in hosts], STEP_COST, "×", 0)
                yield f"{slug}.step-on-hosts.{load}", on_all
            yield f"{slug}.step.{load}", plain(row["ratio"], STEP_COST, "×")
            yield f"{slug}.ms.{load}", plain(row["ms"], STEP_COST, " ms", 2)
            yield f"{slug}.state.{load}", plain(row["state_mib"], STEP_COST, " MiB", 0)
            yield f"{slug}.extra.{load}", plain(row["extra_mib"], STEP_COST, " MiB", 0)


def _shares() -> Iterator[tuple[str, Number]]:
    """Parts of full space's time, and what options add to a step."""
    first, again, rms = (steps(part) for part in ("h200-maps", "h200-again", "h200-rms"))
    for load, workload in LOADS.items():
        full, auto = (first[MAPS[slug], workload]["ratio"] for slug in ("full", "auto"))
        yield f"auto.share.{load}", plain(100 * auto / full, STEP_COST, "%", 0)
    for slug, title in (
        ("full", MAPS["full"]),
        ("deflated", "Deflated 120, warm, one step"),
        ("low-rank", MAPS["low-rank"]),
    ):
        with_it, without = (
            rms[name, "nanoGPT"]["ms"] for name in (f"{title}, update RMS of 0.2", title)
        )
        more = max(0.0, 100 * (with_it / without - 1))
        yield f"{slug}.rms.nanogpt", plain(more, STEP_COST, "%", 0)
    both = [row for row in again if row in first and row[0] != PEERS["adamw"]]
    apart = [again[row]["ms"] / first[row]["ms"] for row in both]
    yield "steps.timed-again", span(apart, STEP_COST, "", 2)


def _between() -> Iterator[tuple[str, Number]]:
    """Matrices of other widths, and a sketch with a larger part of a large one."""
    narrow = steps("h200-between")
    for width in WIDTHS:
        full = narrow[MAPS["full"], f"width {width}"]
        sixth = narrow["Deflated, ℓ = a sixth", f"width {width}"]
        for slug, row in (("full", full), ("sixth", sixth)):
            yield f"{slug}.step.{width}", plain(row["ratio"], STEP_COST, "×")
        yield f"sixth.share.{width}", plain(100 * sixth["ms"] / full["ms"], STEP_COST, "%", 0)
    wide = {
        (line["config"]["sweep"], line["config"]["x"], line["variant"]): line["result"]["ms"]
        for line in lines("step-cost", "h200", "time")
        if "sweep" in line["config"]
    }
    adamw = wide["width", 4096, PEERS["adamw"]]
    sketch, full_space = wide["rank", 1024, "LowRank, warm"], wide["width", 4096, MAPS["full"]]
    yield "low-rank-warm.step.4096-rank-1024", plain(sketch / adamw, STEP_COST, "×")
    yield "full.step.4096", plain(full_space / adamw, STEP_COST, "×")


CPUS = {"x86": "cpu-no-tiles", "tiles": "cpu-tiles", "arm": "cpu-arm"}
FLOAT32 = f"{MAPS['full']}, in float32"


def _on_cpus() -> Iterator[tuple[str, Number]]:
    """How many times as fast as full space maps are on two cores, on a tenth of nanoGPT's matrices."""
    for cpu, part in CPUS.items():
        found = steps(part)
        full = found.get((FLOAT32, "nanoGPT")) or found[MAPS["full"], "nanoGPT"]
        for slug in ("auto", "paper", "full"):
            row = found.get((MAPS[slug], "nanoGPT"))
            if row is not None:
                name = f"{slug}.faster.{cpu}-nanogpt"
                yield name, plain(full["ms"] / row["ms"], STEP_COST, "×")
                yield f"{slug}.step.{cpu}-nanogpt", plain(row["ratio"], STEP_COST, "×", 0)


CURVES = {
    "adamw": "adamw+warmup",
    "full": "full",
    "auto": "lift-120-warm",
    "auto-rows-fan": "lift-120-warm+rows+fans",
    "torch-muon": "peer:torch-muon",
    "dion": "peer:dion-muon",
    "normuon": "peer:dion-normuon",
    "soap": "peer:soap+warmup",
}
"""Runs of 24.6M tokens, one of each optimizer and alone on the GPU, by the name of a number."""


def curve(slug: str) -> Mapping[str, Any]:
    """The run of an optimizer with its validation perplexity along the way."""
    (found,) = (row for row in rows("frontier", "curves") if row["map"] == CURVES[slug])
    return found


def seconds_to(slug: str, level: float) -> float | None:
    """When a run's validation perplexity falls to a level for good; ``None`` if it ends above."""
    run = curve(slug)
    points = [(step * run["step_ms"] / 1000, value) for step, value in run["curve"]]
    above = [k for k, (_, value) in enumerate(points) if value > level]
    if above and above[-1] + 1 == len(points):
        return None
    if not above:
        return points[0][0]
    (x0, y0), (x1, y1) = points[above[-1] : above[-1] + 2]
    return x0 + (x1 - x0) * (y0 - level) / (y0 - y1)


def _whole_steps() -> Iterator[tuple[str, Number]]:
    """The time of a whole training step of a GPT of 5 layers × 768 with 16 thousand tokens."""
    source = "results/frontier"
    ends = {other: curve(other)["curve"][-1][1] for other in ("full", "adamw")}
    for slug in CURVES:
        run = curve(slug)
        yield f"{slug}.whole-step", plain(run["step_ms"], source, " ms")
        yield f"{slug}.whole-run", plain(run["steps"] * run["step_ms"] / 1000, source, " s")
        yield f"{slug}.end", plain(run["curve"][-1][1], source)
        for other, level in ends.items():
            reached = seconds_to(slug, level)
            if reached is not None:
                yield f"{slug}.seconds-to-{other}", plain(reached, source, " s")
    table = "results/long-run"
    for slug, variant in (("full", "muon-polar-express"), ("auto", "deflated-120")):
        alone = [
            line["result"]
            for line in lines("long-run", "table")
            if line["variant"] == variant and not line["environment"].get("device_shared", False)
        ]
        optimizer = statistics.median(found["optimizer_ms_per_step"] for found in alone)
        whole = statistics.median(found["step_ms"] for found in alone)
        yield f"{slug}.optimizer-share", plain(100 * optimizer / whole, table, "%")


def _counted() -> Iterator[tuple[str, Number]]:
    """What follows from the code: ℓ of ``auto``."""
    code = "polarstep"
    for load, width in (("nanogpt", 768), ("8b", 4096)):
        polar = ps.Auto().on(width, width, torch.device("cuda"))
        assert isinstance(polar, ps.Deflated)
        ell = polar.head.width
        yield f"auto.columns.{load}", plain(ell, code, "", 0)
        yield f"auto.width-share.{load}", plain(100 * ell / width, code, "%", 0)
