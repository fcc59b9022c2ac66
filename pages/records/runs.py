"""The finished runs of ``polarstep`` below a folder, and the figure of each seed."""

from __future__ import annotations

from functools import cache
from typing import Any

from pages import ROOT
from polarstep_lab.config import Stage, TextData
from polarstep_lab.recipes import resolve
from polarstep_lab.records.record import RunRecord, find_runs

FULL, SKETCHED = "Muon (Nesterov)", "Rand Muon (Nes.-Gaussian)"


@cache
def runs(folder: str) -> tuple[RunRecord, ...]:
    """The finished runs below a folder of the repository."""
    records = map(RunRecord.load, find_runs([ROOT / folder]))
    return tuple(run for run in records if run.result and run.result.status == "finished")


def values(
    folder: str, recipe: str, method: str, axis: str | None = None, value: Any = None, **polar: Any
) -> dict[int, float]:
    """The figure of each seed: of a method, or of one point of an ablation of it.

    Where runs of several lengths were recorded, those are of the longest. ``polar`` are settings of
    the polar map that the runs must have.
    """
    lengths: dict[int, dict[int, float]] = {}
    for run in runs(folder):
        who, point = run.identity, run.identity.ablation
        at = (point.axis, point.value) if point else (None, None)
        if (who.recipe, who.method, *at) != (recipe, method, axis, value):
            continue
        settings = who.config["optimizer"]["polar"]
        if all(settings[key] == wanted for key, wanted in polar.items()):
            assert run.result is not None
            lengths.setdefault(run.result.steps, {})[who.seed] = run.result.value
    if not lengths:
        raise SystemExit(f"{folder} has no runs of {method} on {recipe} with {axis}={value}")
    return lengths[max(lengths)]


def tokens_of(recipe: str) -> int:
    """The tokens that a recipe trains on."""
    return sum(stage.steps * stage.sequences * stage.sequence_length for stage in stages_of(recipe))


def stages_of(recipe: str) -> tuple[Stage, ...]:
    """The stages of the training on text that a recipe describes."""
    data = resolve(recipe, "muon").data
    assert isinstance(data, TextData)
    return data.stages


def tokens_of_run(run: RunRecord) -> int:
    """The tokens that a run of a GPT trained on."""
    return sum(
        stage["steps"] * stage["sequences"] * stage["sequence_length"]
        for stage in run.identity.config["data"]["stages"]
    )


def accuracy(method: str, axis: str | None = None, value: Any = None) -> dict[int, float]:
    """Test accuracy on CIFAR-10 by seed, in percent, of a method or of one point of its ablation."""
    found = values("results/cifar10", "cifar10", method, axis, value)
    return {seed: 100 * share for seed, share in found.items()}
