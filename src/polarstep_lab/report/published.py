"""What the authors published, to print beside our own figures where a recipe is theirs.

Source: S. Choudhury, X. Cheng, M. Takáč, S. Na and M. Kolar, "Muon with Nesterov Momentum:
Heavy-Tailed Noise and (Randomized) Inexact Polar Decomposition", Table 2. nanoGPT: 135M parameters,
FineWeb10B, mean ± standard deviation of 5 seeds; CIFAR-10: mean ± standard deviation of 50 seeds.

The paper shows its ablations as curves alone. For CIFAR-10 the authors' repository has the figures
behind them, or behind an earlier version of them: the rows of Table 2 in the same file are not those
that were printed, and the default setting comes out differently on each axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from polarstep_lab.flops import TABLE_2 as TABLE_2_GFLOPS

__all__ = [
    "ABLATIONS",
    "ABLATIONS_SOURCE",
    "METHODS",
    "PAPER_RECIPES",
    "SCALED_RECIPES",
    "TABLE_2",
    "Published",
    "Setting",
    "keeps_setting",
    "published",
    "published_ablation",
    "scaled",
]

METHODS = tuple(TABLE_2_GFLOPS["nanogpt"])
"""The rows of Table 2, in its order."""


@dataclass(frozen=True)
class Published:
    """The metric over ``seeds`` seeds, and for a row of Table 2 GFLOPs of one optimizer step."""

    mean: float
    std: float
    seeds: int
    gflops: float | None = None


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
    rows = {method: Published(*metric, seeds, gflops[method]) for method, metric in metrics}
    return Setting(data, seeds, rows)


TABLE_2: Mapping[str, Setting] = {
    "nanogpt": _setting("nanogpt", "FineWeb10B", 5),
    "cifar10": _setting("cifar10", "CIFAR-10", 50),
}

PAPER_RECIPES: Mapping[str, str] = {"nanogpt": "nanogpt", "cifar10": "cifar10"}
"""Recipes that run the paper's own setting, and the benchmark of Table 2 each one repeats."""

SCALED_RECIPES: Mapping[str, str] = {"nanogpt-small": "nanogpt", "nanogpt-wiki": "nanogpt"}
"""Recipes for the paper's question at another size: digits cannot be compared, rankings can."""

ABLATIONS_SOURCE = (
    "the authors' repository, cifar10/experiment_result/test_accuracy_tables.csv, 50 seeds"
)
_ABLATED = "Rand Muon (Nes.-Gaussian)"
_ABLATION_FIGURES: Mapping[str, Mapping[int | str, tuple[float, float]]] = {
    "rank": {
        16: (0.90680, 0.00139),
        32: (0.91801, 0.00141),
        64: (0.92841, 0.00145),
        128: (0.93566, 0.00142),
        256: (0.93811, 0.00141),
    },
    "steps": {
        1: (0.89396, 0.00192),
        3: (0.91648, 0.00133),
        5: (0.92955, 0.00155),
        7: (0.93620, 0.00125),
        9: (0.93857, 0.00149),
    },
    "solver": {
        "cubic": (0.93833, 0.00116),
        "quintic": (0.93845, 0.00162),
        "empirical": (0.93818, 0.00133),
        "polar-express": (0.93844, 0.00140),
    },
    "batch": {
        500: (0.93735, 0.00132),
        1000: (0.93856, 0.00164),
        2000: (0.93390, 0.00148),
        3000: (0.92724, 0.00219),
        4000: (0.91200, 0.00467),
    },
}
ABLATIONS: Mapping[str, Mapping[int | str, Published]] = {
    axis: {value: Published(*figures, seeds=50) for value, figures in values.items()}
    for axis, values in _ABLATION_FIGURES.items()
}
"""Test accuracy of the randomized Nesterov method on CIFAR-10, by axis and value."""

_HARMLESS = ("seed", "runtime.", "data.root", "evaluation.every")
"""Overrides that say where and how to run, not what: the setting is still the paper's."""


def published(recipe: str, benchmark: str) -> Setting | None:
    """The paper's figures for a recipe; ``None`` unless the recipe is the paper's setting."""
    return TABLE_2[benchmark] if PAPER_RECIPES.get(recipe) == benchmark else None


def scaled(recipe: str, benchmark: str) -> Setting | None:
    """The paper's figures for a recipe that asks its question at this or at another size."""
    known = {**PAPER_RECIPES, **SCALED_RECIPES}
    return TABLE_2[benchmark] if known.get(recipe) == benchmark else None


def published_ablation(recipe: str, method: str, axis: str, value: object) -> Published | None:
    """The authors' figure for one value of an ablation of the recipe ``cifar10``."""
    if recipe != "cifar10" or method != _ABLATED or not isinstance(value, int | str):
        return None
    return ABLATIONS.get(axis, {}).get(value)


def keeps_setting(overrides: Mapping[str, object]) -> bool:
    """Whether a recipe with these settings overridden is still the recipe.

    Shards may lie anywhere, but must be FineWeb's: on other text a perplexity is another quantity.

    >>> keeps_setting({"data.root": "x", "runtime.device": "cpu"}), keeps_setting({"optimizer.lr": 1})
    (True, False)
    >>> keeps_setting({"data.train": ["f/fineweb_train_*.bin"]}), keeps_setting({"data.val": "w.bin"})
    (True, False)
    """
    return all(
        key.startswith(_HARMLESS) or (key in ("data.train", "data.val") and _is_fineweb(value))
        for key, value in overrides.items()
    )


def _is_fineweb(patterns: object) -> bool:
    listed = [patterns] if isinstance(patterns, str) else patterns
    return isinstance(listed, list | tuple) and all("fineweb" in str(p).lower() for p in listed)
