"""What a recipe is, and the list of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from polarstep_lab.config import Benchmark, ConfigError, PolarConfig, RunConfig
from polarstep_lab.methods import Method
from polarstep_lab.settings_by_name import hint

__all__ = ["MAPS", "RECIPES", "Range", "Recipe", "find_recipe", "polar_of", "register"]


@dataclass(frozen=True)
class Range:
    """The values tuning tries for one setting."""

    low: float
    high: float
    log: bool = False


@dataclass(frozen=True)
class Recipe:
    """A named recipe; ``build`` returns the config of a method with seed 0."""

    name: str
    benchmark: Benchmark
    summary: str
    build: Callable[[Method], RunConfig]
    needs: str = "nothing"
    search: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)
    """For each algorithm (``adamw``, ``sgd``, ``muon``): the settings to tune."""


RECIPES: dict[str, Recipe] = {}


def register(
    name: str,
    benchmark: Benchmark,
    summary: str,
    needs: str,
    search: Mapping[str, Mapping[str, Range]],
) -> Callable[[Callable[[Method], RunConfig]], Callable[[Method], RunConfig]]:
    """Register a recipe function under ``name``."""

    def enter(build: Callable[[Method], RunConfig]) -> Callable[[Method], RunConfig]:
        RECIPES[name] = Recipe(name, benchmark, summary, build, needs, search)
        return build

    return enter


MAPS: Mapping[str, PolarConfig] = {
    "polar-express": PolarConfig("polar-express-default", 5),
    "deflated": PolarConfig(
        "polar-express-sketch", 4, rank=56, oversample=8, sketch="warm", rest="lifted", float8=True
    ),
    "auto": PolarConfig(auto="balanced"),
    "default": PolarConfig(auto="balanced"),
}
"""The maps of our methods, the same in every recipe, by :attr:`polarstep_lab.paper.Method.polar`."""


def polar_of(
    method: Method, rank: int, oversample: int, power: float, steps: int = 7
) -> PolarConfig:
    """The polar map of a method.

    The paper's is the quintic with q = 7, sketched for the randomized methods.
    """
    if method.polar is not None:
        return MAPS[method.polar]
    if method.sketch is None:
        return PolarConfig(steps=steps)
    return PolarConfig(
        steps=steps, rank=rank, oversample=oversample, power=power, sketch=method.sketch
    )


def find_recipe(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in RECIPES:
        known = ", ".join(RECIPES)
        raise ConfigError(
            f"recipe {name!r}: {hint(name, RECIPES)}expected one of {known}, or a recipe file"
        )
    return RECIPES[name]
