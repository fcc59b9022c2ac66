"""How long runs of 24.6 million tokens take, and when each reaches a perplexity.

The runs are those of ``results/frontier/curves.jsonl``, one of each optimizer of ours and of other
libraries, under the names that the figure gives them. Perplexity is that of validation text.
"""

from __future__ import annotations

import math

from frontier import FULL, LENGTH, SEQUENCES, STEPS, reported
from pages.claims.words import claim
from pages.records.costs import steps
from pages.records.curves import LIBRARY, Line, curves, recorded
from pages.records.maps import peers
from pages.records.quality import BASE, VALIDATION, million_tokens, perplexities

AUTO = "lift-120-warm"
"""The map of ``auto`` at width 768."""


def runs_of_curves() -> set[tuple[str, float]]:
    """Map and rate of the runs."""
    return {(run["map"], run["lr"]) for run in recorded()}


def _step_ms(line: Line) -> float:
    """The time of a whole training step."""
    return 1000 * line.seconds / STEPS


@claim
def time_of_a_run() -> str:
    """The time of all steps with AdamW, with maps of ours, and with optimizers of other libraries."""
    runs = curves()
    shown = [
        line
        for name, line in runs.items()
        if name in (AUTO, FULL) or name.startswith("adamw") or line.kind == LIBRARY
    ]
    told = [
        f"{line.name} {line.seconds:.1f} s ({_step_ms(line):.1f} ms a step)"
        for line in sorted(shown, key=lambda line: line.seconds)
    ]
    return (
        f"The {STEPS} steps, {million_tokens():.1f}M tokens, took (one run of each, n = 1): "
        f"{'; '.join(told)}"
    )


@claim
def whole_step() -> str:
    """What is left of the saving in a whole training step, of the model and the optimizer."""
    runs = {name.removesuffix("+warmup"): line for name, line in curves().items()}
    ours, full, adamw = (runs[name] for name in (AUTO, FULL, "adamw"))
    (others,) = (
        perplexities(VALIDATION)[name, lr]
        for name, lr in runs_of_curves()
        if name.startswith("adamw")
    )
    assert adamw.end > sorted(reported(others).values())[-2], "leave out: the highest"
    return (
        f"{_step_ms(ours):.1f} ms a step with the map of `auto`, {_step_ms(full):.1f} in full space and "
        f"{_step_ms(adamw):.1f} with AdamW, in batches of {SEQUENCES * LENGTH / 1000:.0f} thousand "
        f"tokens. After {million_tokens():.1f}M tokens validation perplexity was {ours.end:.1f}, "
        f"{full.end:.1f} and {adamw.end:.1f} (one run each; AdamW's is the highest of three seeds)"
    )


@claim
def soap_step() -> str:
    """The time of SOAP in a step of the loop, over steps with a decomposition and without."""
    (soap,) = (run for run in recorded() if run["map"].startswith("peer:soap"))
    more = soap["step_ms"] - _step_ms(curves()[FULL])
    return (
        f"a whole training step takes {soap['step_ms']:.0f} ms in the mean, {more:.0f} more than with "
        f"full space, and the optimizer {soap['ms']:.0f} ms of a step with a decomposition (one run)"
    )


@claim
def second_of_perplexity() -> str:
    """What a second and a percent of perplexity are worth at the end of a run."""
    runs = curves()
    (before, high), (end, low) = runs[FULL].points[-2:]
    fall = 100 * (high / low - 1) / (end - before)
    seeds = reported(perplexities(VALIDATION)[BASE]).values()
    apart = 100 * (max(seeds) / min(seeds) - 1)
    same = [_step_ms(line) for name, line in runs.items() if name.startswith(AUTO)]
    return (
        f"Near its end full space falls by {fall:.1f}% a second (one seed, {million_tokens():.1f}M "
        f"tokens), and {len(same)} runs of `Deflated` with ℓ = a sixth took {min(same):.2f} to "
        f"{max(same):.2f} ms a step. {len(seeds)} seeds of full space end "
        f"{apart:.1f}% apart, which is {apart / fall:.1f} s"
    )


@claim
def time_to_full_space() -> str:
    """When each run reaches the perplexity that full space ends with."""
    runs = curves()
    full = runs.pop(FULL)
    return (
        f"Full space ends at {full.end:.1f} after {full.seconds:.1f} s (one seed of each, "
        f"{million_tokens():.1f}M tokens). {_reached(runs, full.end)}"
    )


@claim
def time_to_a_perplexity() -> str:
    """When each run reaches a perplexity that most of them reach."""
    runs = curves()
    level = common_level(runs)
    return (
        f"Most runs reach {level:g} (one seed of each, "
        f"{million_tokens():.1f}M tokens). {_reached(runs, level)}"
    )


UNIT, MOST = 5, 0.8


def common_level(runs: dict[str, Line]) -> float:
    """The lowest multiple of :data:`UNIT` that a part :data:`MOST` of the runs reach, or more."""
    ends = sorted(line.end for line in runs.values())
    return UNIT * math.ceil(ends[math.ceil(MOST * len(ends)) - 1] / UNIT)


def _reached(runs: dict[str, Line], level: float) -> str:
    """The runs that reach a perplexity, in the order of time, and those that end above it."""
    times = [(at, line.name) for line in runs.values() if (at := line.reaches(level)) is not None]
    above = [line.name for line in runs.values() if line.end > level]
    told = [f"{at:.1f} s by {name}" for at, name in sorted(times)]
    parts = [f"This perplexity is reached after {'; '.join(told)}"] if told else []
    parts += [f"These end above it: {'; '.join(above)}"] if above else []
    return ". ".join(parts)


@claim
def graph_of_dion() -> str:
    """What dion's CUDA graph saves of a step, where it was timed with and without."""
    times = {name: row["ms"] for (name, load), row in steps().items() if load == "nanoGPT"}
    told = [
        f"{times[each.title] - times[graph]:.1f} of {times[each.title]:.1f} ms with {each.title}"
        for each in peers()
        if (graph := f"{each.title}, CUDA graph") in times and each.title in times
    ]
    return f"{', '.join(told)}, on nanoGPT's 64 matrices"


@claim
def curves_beside_the_table() -> str:
    """How far the runs of the figure end from those of the table with the same rate and seed."""
    lines, table = curves(), perplexities()
    apart = {
        lines[run["map"]].name: 100
        * (run["perplexity"] / table[run["map"], run["lr"]][run["seed"]] - 1)
        for run in recorded()
    }
    farthest = max(apart, key=lambda name: abs(apart[name]))
    rms = math.hypot(*apart.values()) / math.sqrt(len(apart))
    return (
        f"these {len(apart)} runs ended {rms:.1f}% from the runs of the table with the same rate and "
        f"seed in the root mean square, and {abs(apart[farthest]):.1f}% at most ({farthest}), in the "
        f"perplexity of all held-out text after {million_tokens():.1f}M tokens (one seed each)"
    )
