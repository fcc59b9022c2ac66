"""Which runs the published figures of :mod:`polarstep_lab.paper` may stand beside."""

from __future__ import annotations

from collections.abc import Mapping

from polarstep_lab.paper import ABLATED_METHOD, ABLATIONS, TABLE_2, Published, Setting
from polarstep_lab.records.record import RunIdentity

__all__ = ["in_table_2", "keeps_setting", "published"]

_SCALED = ("nanogpt-small", "nanogpt-wiki")
"""Recipes that ask the paper's question of another model: rankings can be compared, digits cannot."""

_HARMLESS = ("seed", "runtime.", "data.root", "evaluation.every")
"""Overrides that say where and how to run, not what: the setting is still the paper's."""


def in_table_2(recipe: str, benchmark: str) -> Setting | None:
    """Table 2 for a recipe that asks the paper's question, at the paper's size or at another."""
    return TABLE_2[benchmark] if recipe == benchmark or recipe in _SCALED else None


def published(run: RunIdentity) -> Published | None:
    """The figure for a run in exactly the setting of Table 2 or of the authors' ablations."""
    if run.recipe != run.benchmark or not keeps_setting(run.overrides):
        return None
    if run.ablation is None:
        return TABLE_2[run.benchmark].rows.get(run.method)
    if (run.benchmark, run.method) != ("cifar10", ABLATED_METHOD):
        return None
    axis, value = run.ablation.axis, run.ablation.value
    return ABLATIONS.get(axis, {}).get(value) if isinstance(value, int | str) else None


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
