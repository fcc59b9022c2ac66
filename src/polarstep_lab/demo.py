"""The demonstration: all seven methods on a small GPT, at learning rates tuned with equal budgets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from polarstep_lab.methods import METHODS
from polarstep_lab.storage import read_json
from polarstep_lab.suites.suite import PlannedRun, comparison_runs

__all__ = ["RECIPE", "SEEDS", "Tuning", "demo_runs", "tuning_budget"]

RECIPE = "nanogpt-toy"
SEEDS = (1, 2)
"""Not the seed of the tuning, which is 0: the comparison is on runs that no rate was chosen by."""


@dataclass(frozen=True)
class Tuning:
    """How the learning rates of the demonstration were found."""

    trials: int
    command: str


def demo_runs(folder: Path) -> list[PlannedRun]:
    """All runs of the demonstration, seed by seed, with γ and ν of every twentieth step."""
    return comparison_runs(RECIPE, METHODS, SEEDS, {"runtime.monitor_every": 20}, folder)


def tuning_budget() -> Tuning | None:
    """The budget that every method was tuned with; ``None`` where the budgets were not equal."""
    path = Path(__file__).parent / "tuned" / f"{RECIPE}.json"
    if not path.exists():
        return None
    methods = read_json(path)["methods"]
    entries = [methods.get(method.slug, {}).get("tuned", {}) for method in METHODS]
    budgets = {(entry.get("trials"), entry.get("command")) for entry in entries}
    if len(budgets) != 1:
        return None
    ((trials, command),) = budgets
    return Tuning(trials, command) if trials else None
