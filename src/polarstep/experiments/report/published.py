"""Table 2 of the paper, to print beside our own figures where a recipe is the paper's.

Source: S. Choudhury, X. Cheng, M. Takáč, S. Na and M. Kolar, "Muon with Nesterov Momentum:
Heavy-Tailed Noise and (Randomized) Inexact Polar Decomposition", Table 2. nanoGPT: 135M parameters,
FineWeb10B, mean ± standard deviation of 5 seeds; CIFAR-10: mean ± standard deviation of 50 seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from polarstep.flops import TABLE_2 as TABLE_2_GFLOPS

__all__ = ["METHODS", "PAPER_RECIPES", "TABLE_2", "Published", "Setting", "published"]

METHODS = tuple(TABLE_2_GFLOPS["nanogpt"])
"""The rows of Table 2, in its order."""


@dataclass(frozen=True)
class Published:
    """One cell pair of Table 2: the metric over seeds, and GFLOPs of one optimizer step."""

    mean: float
    std: float
    gflops: float


@dataclass(frozen=True)
class Setting:
    """What the paper's figures of one benchmark were measured on."""

    data: str
    seeds: int
    rows: Mapping[str, Published]

    @property
    def source(self) -> str:
        """One line for a caption."""
        return f"Table 2 of the paper, {self.data}, {self.seeds} seeds"


_METRICS = {
    "nanogpt": (
        (35.4402, 0.8650),
        (97.1136, 1.5568),
        (27.6600, 0.2075),
        (29.7155, 0.0925),
        (28.0773, 0.3372),
        (29.7168, 0.1004),
        (29.7167, 0.1404),
    ),
    "cifar10": (
        (0.9184, 0.0020),
        (0.9211, 0.0018),
        (0.9375, 0.0014),
        (0.9365, 0.0015),
        (0.9370, 0.0016),
        (0.9362, 0.0015),
        (0.9366, 0.0015),
    ),
}


def _setting(benchmark: str, data: str, seeds: int) -> Setting:
    metrics = zip(METHODS, _METRICS[benchmark], strict=True)
    gflops = TABLE_2_GFLOPS[benchmark]
    return Setting(data, seeds, {m: Published(*metric, gflops[m]) for m, metric in metrics})


TABLE_2: Mapping[str, Setting] = {
    "nanogpt": _setting("nanogpt", "FineWeb10B", 5),
    "cifar10": _setting("cifar10", "CIFAR-10", 50),
}

PAPER_RECIPES: Mapping[str, str] = {"nanogpt": "nanogpt", "cifar10": "cifar10"}
"""Recipes that run the paper's own setting, and the benchmark of Table 2 each one repeats."""

_HARMLESS = ("seed", "runtime.", "data.root", "data.train", "data.val", "evaluation.every")
"""Overrides that say where and how to run, not what: the setting is still the paper's."""


def published(recipe: str, benchmark: str) -> Setting | None:
    """The paper's figures for a recipe; ``None`` unless the recipe is the paper's setting."""
    return TABLE_2[benchmark] if PAPER_RECIPES.get(recipe) == benchmark else None


def keeps_setting(overrides: Iterable[str]) -> bool:
    """Whether a recipe with these settings overridden is still the recipe.

    >>> keeps_setting(["data.root", "runtime.device"]), keeps_setting(["optimizer.lr"])
    (True, False)
    """
    return all(key.startswith(_HARMLESS) for key in overrides)
