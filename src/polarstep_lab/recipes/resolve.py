"""From a recipe and a method to the complete config of a run.

Where learning rates of a recipe were tuned, the values are in ``tuned/RECIPE.json``, written by
``polarstep tune``, and :func:`resolve` takes them from there: ``{"methods": {SLUG: {"overrides":
{"optimizer.lr": …}}}}``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from polarstep import muon_for
from polarstep_lab.axes import apply_axis
from polarstep_lab.config import ConfigError, OptimizerConfig, RunConfig, with_overrides
from polarstep_lab.methods import Method, find_method
from polarstep_lab.recipes.recipe import MAPS, Range, find_recipe
from polarstep_lab.storage import read_json

__all__ = ["read_recipe_file", "resolve", "search_space", "tuned"]


def tuned(recipe: str, method: Method) -> dict[str, Any]:
    """What tuning found for a recipe and a method, as overrides; empty where it was not tuned."""
    path = Path(__file__).parents[1] / "tuned" / f"{recipe}.json"
    if not path.exists():
        return {}
    entry = read_json(path)["methods"].get(method.slug, {})
    return dict(entry.get("overrides", {}))


def search_space(recipe: str, method: Method) -> Mapping[str, Range]:
    """The settings that the recipe marks for tuning, for a method."""
    return find_recipe(recipe).search.get(method.algorithm, {})


def resolve(
    recipe: str,
    method: Method | str | None = None,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
    axis: tuple[str, Any] | None = None,
) -> RunConfig:
    """The complete config: the recipe, then what was tuned, then overrides, then the ablation.

    ``recipe`` is a name or the path of a JSON file ``{"recipe": NAME, "method": SLUG, "overrides":
    {…}}``; a method given here must then be the file's.
    """
    overrides = dict(overrides or {})
    if recipe.endswith(".json"):
        recipe, method, from_file = read_recipe_file(Path(recipe), method)
        overrides = from_file | overrides
    found = find_recipe(recipe)
    if method is None:
        raise ConfigError("no method given: say which with --method, as in --method muon")
    chosen = find_method(method) if isinstance(method, str) else method
    config = replace(found.build(chosen), seed=seed)
    if chosen.polar == "default":
        config = replace(config, optimizer=_without_options())
    config = with_overrides(config, tuned(recipe, chosen) | overrides)
    return config if axis is None else apply_axis(config, *axis)


def _without_options() -> OptimizerConfig:
    """The settings of ``muon_for(model)``; rates of 0 are those that it finds for itself."""
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(muon_for).parameters.items()
    }
    return OptimizerConfig(
        lr=defaults["lr"],
        momentum=defaults["momentum"],
        weight_decay=defaults["weight_decay"],
        shape_scale=defaults["shape_scale"],
        polar=MAPS["default"],
        normalize_rows=True,
    )


def read_recipe_file(path: Path, method: Method | str | None) -> tuple[str, Method, dict[str, Any]]:
    """Recipe, method and overrides of a recipe file; ``method`` is checked against the file's."""
    content = read_json(path)
    try:
        name, slug, overrides = content["recipe"], content["method"], content["overrides"]
    except (KeyError, TypeError):
        raise ConfigError(
            f"{path} is not a recipe file: expected the keys recipe, method and overrides, as in "
            '{"recipe": "nanogpt-toy", "method": "muon", "overrides": {"optimizer.lr": 0.02}}; '
            "`polarstep tune` writes such files, and a whole config, as --show prints it, is none"
        ) from None
    for key, kind in (("recipe", str), ("method", str), ("overrides", dict)):
        if not isinstance(content[key], kind):
            expected = "settings by name" if kind is dict else "a name"
            raise ConfigError(f"{path}: {key} is {content[key]!r}, expected {expected}")
    found = find_method(slug)
    asked = find_method(method) if isinstance(method, str) else method
    if asked is not None and asked != found:
        raise ConfigError(
            f"{path} is a recipe for {found.slug}, not for {asked.slug}: leave out --method, or give "
            "the recipe's name in place of the file"
        )
    return name, found, dict(overrides)
