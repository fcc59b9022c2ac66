"""Which settings of a run determine its result, and which say only where and how it was run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from polarstep_lab.records.record import RunRecord, RunSpec

__all__ = ["NOT_TRAINING", "keeps_setting", "set_beside_axis", "setting_of", "settings_in"]

_HARMLESS = ("seed", "runtime.", "data.root", "evaluation.every")
"""Overrides that say where and how to run, not what: the setting is still the recipe's."""


NOT_TRAINING = ("runtime.compile", "data.root", "evaluation.every")
"""Settings that do not change what is trained: runs that differ in nothing else compare."""


def setting_of(run: RunRecord) -> str:
    """What determines a run apart from its seed, as a string to compare.

    The device and how often the run logged are left out; times are kept apart by device elsewhere.
    """
    return json.dumps(settings_in(run.spec.config), sort_keys=True, default=str)


def settings_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a config that determine its result, by dotted path.

    >>> settings_in({"seed": 1, "data": {"batch": 8}, "runtime": {"device": "cpu", "compile": None}})
    {'data.batch': 8, 'runtime.compile': None}
    """
    found: dict[str, Any] = {}
    for key, value in config.items():
        inner = settings_in(value) if isinstance(value, Mapping) else {}
        found |= {f"{key}.{name}": v for name, v in inner.items()} if inner else {key: value}
    kept = ("runtime.precision", "runtime.compile")
    return {
        k: v for k, v in found.items() if k in kept or not f"{k}.".startswith(("seed.", "runtime."))
    }


def keeps_setting(overrides: Mapping[str, object]) -> bool:
    """Whether a recipe with these settings overridden is still the recipe.

    Shards may lie anywhere, but must be FineWeb's: on other text a perplexity is another quantity.

    >>> keeps_setting({"data.root": "x", "runtime.device": "cpu"}), keeps_setting({"optimizer.lr": 1})
    (True, False)
    >>> keeps_setting({"data.train": ["f/fineweb_train_*.bin"]}), keeps_setting({"data.val": "w.bin"})
    (True, False)
    """

    def is_fineweb(patterns: object) -> bool:
        given = patterns if isinstance(patterns, list | tuple) else [patterns]
        return all("fineweb" in str(pattern).lower() for pattern in given)

    return all(
        key.startswith(_HARMLESS) or (key in ("data.train", "data.val") and is_fineweb(value))
        for key, value in overrides.items()
    )


def set_beside_axis(run: RunSpec) -> str:
    """The overrides of an ablation besides its axis, as text; seed and runtime settings are left out."""
    if run.ablation is None:
        return ""
    shown = [
        f"{key.removeprefix('optimizer.polar.')}={value}"
        for key, value in sorted(run.overrides.items())
        if not f"{key}.".startswith(("runtime.", "seed."))
        and key.split(".")[-1] != run.ablation.axis
    ]
    return ", ".join(shown)
