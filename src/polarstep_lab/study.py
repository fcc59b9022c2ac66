"""A study is data: variants of a recipe, the seeds they run with, and what they are compared with.

A file that defines a :class:`Study` is run by ``polarstep study FILE.py``::

    study = Study(
        name="wide-head", recipe="nanogpt-toy", against="full space",
        variants=[
            Variant("full space", "muon"),
            Variant("rank 16", "rand-muon", {"optimizer.polar.rank": 16}),
            Variant("my idea", "muon", {"optimizer.polar.map": "mine"}),
        ],
        maps={"mine": MyMap}, rates=Rates((0.02, 0.03, 0.04), seed=3), seeds=(0, 1, 2),
    )

The study, the variant and what chose its rate are in the record of each run, and so is the text of the
file. ``polarstep compare`` and ``ablate`` make a study of their arguments.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import extract_tb
from typing import TYPE_CHECKING, Any

from polarstep_lab.axes import apply_axis, find_axis
from polarstep_lab.config import ConfigError
from polarstep_lab.methods import Method
from polarstep_lab.recipes import resolve

if TYPE_CHECKING:
    import polarstep as ps

__all__ = ["MAPS", "Rates", "Study", "Variant", "ablation", "comparison", "load_study", "named_map"]

MAPS: dict[str, Callable[[], ps.PolarMap]] = {}
"""The maps of the study files that were loaded, by the name that ``optimizer.polar.map`` gives."""


@dataclass(frozen=True)
class Variant:
    """One of the things that a study compares: a method with some settings changed.

    ``rates`` are learning rates of its own to choose from, ``against`` is what it is compared with where
    that is not the study's. ``axis`` is the setting that an ablation varies, with its value. ``folder``
    is the name of the folder of its runs, by default made of ``name``.
    """

    name: str
    method: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    against: str | None = None
    axis: tuple[str, Any] | None = None
    folder: str = ""

    @property
    def place(self) -> str:
        """The folder of its runs.

        >>> Variant("Muon, rank 1/2", "muon").place
        'muon-rank-1-2'
        """
        return self.folder or re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-")


@dataclass(frozen=True)
class Rates:
    """Learning rates to choose from for each variant, by the validation of one run each.

    A single rate is taken without a run.

    The runs that choose have a seed of their own, and no table counts them.
    """

    values: tuple[float, ...]
    seed: int = 3
    setting: str = "optimizer.lr"


@dataclass(frozen=True)
class Study:
    """Variants of a recipe, each run with all seeds.

    ``against`` names the variant that the others are compared with. ``overrides`` are settings of all
    variants. ``maps`` are polar maps, or functions that return one, by the name that variants give in
    ``optimizer.polar.map``.
    """

    name: str
    recipe: str
    variants: Sequence[Variant]
    against: str | None = None
    seeds: Sequence[int] = (0,)
    overrides: Mapping[str, Any] = field(default_factory=dict)
    maps: Mapping[str, Callable[[], ps.PolarMap]] = field(default_factory=dict)
    rates: Rates | None = None

    def __post_init__(self) -> None:
        names = [variant.name for variant in self.variants]
        places = [variant.place for variant in self.variants]
        if not names:
            raise ConfigError(f"study {self.name!r} has no variants: expected at least one")
        if len(set(names)) < len(names) or len(set(places)) < len(places):
            raise ConfigError(
                f"study {self.name!r} has variants {', '.join(names)}: expected names and folders "
                "that differ"
            )
        for against in (self.against, *(variant.against for variant in self.variants)):
            if against is not None and against not in names:
                raise ConfigError(
                    f"against={against!r} in the study {self.name!r}: expected one of its variants, "
                    f"{', '.join(names)}"
                )
        if self.rates is not None and self.rates.seed in self.seeds:
            raise ConfigError(
                f"rates are chosen on seed {self.rates.seed} in the study {self.name!r}, which is among "
                f"its seeds {list(self.seeds)}: expected another, so that no run counts by which a rate "
                "was chosen"
            )

    def rates_of(self, variant: Variant) -> tuple[float, ...]:
        """The rates from which that of a variant is chosen; none where it has the recipe's."""
        return variant.rates or (self.rates.values if self.rates is not None else ())


def comparison(
    recipe: str, methods: Sequence[Method], seeds: Iterable[int], overrides: Mapping[str, Any]
) -> Study:
    """The study of ``polarstep compare``: methods of a recipe, against AdamW where it is among them."""
    variants = []
    for method in methods:
        polar = resolve(recipe, method, 0, overrides).optimizer.polar
        name = method.named(polar.sketch, polar.auto)
        variants.append(Variant(name, method.slug, folder=method.folder))
    names = [variant.name for variant in variants]
    against = "AdamW" if "AdamW" in names else names[0]
    return Study("compare", recipe, variants, against, tuple(seeds), dict(overrides))


def ablation(
    recipe: str,
    method: Method,
    axis: str,
    values: Sequence[Any],
    seeds: Iterable[int],
    overrides: Mapping[str, Any],
) -> Study:
    """The study of ``polarstep ablate``: one method with one setting at several values.

    Without ``values`` they are those of the axis. A value that is given twice is one variant.
    """
    base = resolve(recipe, method, 0, overrides)
    values = list(values) or list(find_axis(axis).values(base))
    values = [value for place, value in enumerate(values) if value not in values[:place]]
    if not values:
        raise ConfigError(
            f"the paper has no ablation of {axis} on {base.benchmark}: give the values yourself, "
            "as in --values 8,16,32"
        )
    for value in values:
        apply_axis(base, axis, value)  # a bad value is found before the first run is made
    variants = [
        Variant(
            f"{axis}={value}",
            method.slug,
            axis=(axis, value),
            folder=f"{method.folder}/{axis}-{value}",
        )
        for value in values
    ]
    return Study("ablate", recipe, variants, None, tuple(seeds), dict(overrides))


def load_study(path: Path) -> Study:
    """The study that a file defines; its maps can be built from then on."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: expected a Python file that defines a Study")
    name = f"polarstep_study_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: expected a Python file, whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for the module that they are defined in
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [
            frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)
        ]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else 1
        raise ConfigError(f"{path}, line {line}: {type(error).__name__}: {error}") from error
    found = [value for value in vars(module).values() if isinstance(value, Study)]
    if len(found) != 1:
        raise ConfigError(
            f"{path} defines {len(found)} studies: expected one, as study = Study(name=…, recipe=…, "
            "variants=[…])"
        )
    MAPS.update(found[0].maps)
    return found[0]


def named_map(name: str) -> ps.PolarMap:
    """The map that a study file gives this name."""
    if name not in MAPS:
        known = f"one of {', '.join(MAPS)}" if MAPS else "a name in maps= of a study"
        raise ConfigError(
            f"optimizer.polar.map={name!r}: expected {known}; the map of a study file is known to "
            "`polarstep study FILE.py`"
        )
    return MAPS[name]()
