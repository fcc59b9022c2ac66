"""What a step costs in each case of the first table of ``docs/which.md``."""

from __future__ import annotations

import torch

import polarstep as ps
from pages.claims.ranks import MIB
from pages.claims.scaling import widest
from pages.claims.words import claim
from pages.records.costs import AUTO, BETWEEN, FULL_SPACE, SIXTH, steps
from pages.records.maps import at_chosen
from pages.records.quality import BASE, million_tokens, quality
from polarstep.ranks import plans
from polarstep.transforms import followed

RANKS = 8
LAYERS, D = 16, 2048
GPT = ((4 * LAYERS, D, D), (LAYERS, 4 * D, D), (LAYERS, D, 4 * D))
"""(count, m, n) of the hidden matrices of a GPT: with embedding and head it has a billion parameters."""
FULL = ps.NewtonSchulz(5, "polar-express")
NARROW = ps.LowRank(120, power=0)
"""A low-rank map whose sums on shards are fewer bytes than M and T, on all matrices of :data:`GPT`."""
ADAPTED, ADAPTER_RANK = 4096, 16


def _price(load: str, *, rows: bool = False) -> str:
    """The time of a step of ``auto`` on a workload, over AdamW's."""
    return f"{steps()[AUTO + ', rows normalized' * rows, load]['ratio']:.1f}"


def _full(load: str) -> str:
    """The same of full space."""
    return f"{steps()[FULL_SPACE, load]['ratio']:.1f}"


@claim
def case_of_small_models() -> str:
    """What full space costs on matrices that are too narrow for a sketch."""
    at = {width: steps(BETWEEN)[FULL_SPACE, f"width {width}"]["ratio"] for width in (384, 512)}
    prices = " and ".join(f"{price:.1f}" for price in at.values())
    return f"{prices} times AdamW's step at widths {' and '.join(map(str, at))} on one H200"


@claim
def case_of_middle_widths() -> str:
    """What the map of ``auto`` costs on widths between those that were trained."""
    widths = [
        int(load.removeprefix("width "))
        for name, load in steps(BETWEEN)
        if name == FULL_SPACE and load.startswith("width ") and int(load.split()[1]) > 512
    ]
    full, sixth = (
        [steps(BETWEEN)[name, f"width {d}"]["ratio"] for d in widths]
        for name in (FULL_SPACE, SIXTH)
    )
    return (
        f"{min(sixth):.1f} to {max(sixth):.1f} times AdamW's step at widths {min(widths)} to "
        f"{max(widths)} on one H200, where full space takes {min(full):.1f} to {max(full):.1f}"
    )


@claim
def case_of_cpus() -> str:
    """What full space and ``auto`` cost on a CPU."""
    times = steps("results/step-cost/cpu-arm.json")
    full, auto = (times[name, "nanoGPT"]["ratio"] for name in (FULL_SPACE, AUTO))
    return (
        f"{auto:.0f} times AdamW's step on a tenth of nanoGPT's matrices, on two ARM cores, where full "
        f"space takes {full:.0f} (single runs)"
    )


@claim
def case_of_one_gpu() -> str:
    """What ``auto`` costs and loses on the matrices of a GPT of width 768."""
    alone, rows = (
        quality(at_chosen(name)).told(unit="%") for name in ("lift-120-warm", "lift-120-warm+rows")
    )
    return (
        f"{_price('nanoGPT')} times AdamW's step on nanoGPT's matrices, where full space takes "
        f"{_full('nanoGPT')}; {_price('nanoGPT', rows=True)} with normalized rows. Test perplexity "
        f"against full space at {BASE[1]:g} without such rows, after {million_tokens():.1f}M tokens: "
        f"{alone}, and with normalized rows {rows}; without them at width {widest()}"
    )


@claim
def case_of_wide_matrices() -> str:
    """What ``auto`` costs on the matrices of an 8B model."""
    load = "8B layer"
    return (
        f"{_price(load)} times AdamW's step on the matrices of one layer, where full space takes "
        f"{_full(load)}; {_price(load, rows=True)} with normalized rows"
    )


@claim
def case_of_adapters() -> str:
    """The products of full space on two factors of LoRA, over those on the layer."""
    d, rank = ADAPTED, ADAPTER_RANK
    share = (FULL.flops(rank, d) + FULL.flops(d, rank)) / FULL.flops(d, d)
    return (
        f"with rank {rank} on a {d}×{d} layer the two factors take {share:.3%} of the FLOPs of full "
        "space on the layer"
    )


def mebibytes(polar: ps.PolarMap, transform: ps.Transform | None = None) -> float:
    """What a rank receives for :data:`GPT` in a step: rows cut, by the plan of owners."""
    received = 0.0
    for count, m, n in GPT:
        its = followed(polar.on(m, n, torch.device("cuda")), transform)
        shared = plans.SharedMatrices(m, n, count, RANKS)
        received += plans.bytes_received("owner", shared, its)
    return received / MIB


@claim
def case_of_many_ranks() -> str:
    """What a rank of eight receives in a step, by formulas, and how much a gathering of weights is."""
    hidden = sum(count * m * n for count, m, n in GPT)
    weights = (RANKS - 1) / RANKS * hidden * 2 / MIB
    return (
        f'each GPU receives {mebibytes(ps.Auto()):.0f} MiB in a step with `"auto"` and '
        f"{mebibytes(FULL):.0f} MiB in full space, where gathering the same weights once in bfloat16 "
        f"is {weights:.0f} MiB (by formulas, for {LAYERS} layers with {hidden / 1e6:.0f}M hidden "
        "weights)"
    )


@claim
def rows_on_many_ranks() -> str:
    """What normalized rows add to the bytes of a low-rank map, whose T goes back as two factors."""
    without, with_rows = (mebibytes(NARROW, rows) for rows in (None, ps.NormalizedRows()))
    return (
        f"for the hidden matrices of a GPT of {LAYERS} layers × {D} on {RANKS} ranks a rank then "
        f"receives {with_rows:.0f} MiB in a step in place of {without:.0f}, with "
        "`ps.LowRank(120, power=0)`"
    )
