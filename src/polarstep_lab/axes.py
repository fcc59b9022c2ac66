"""Ablations: one setting varied, everything else as in the recipe.

Rank s, inner steps q, solver and sketch are settings of the polar map (Figures 1b, 1d and 2, and
the appendix). For batch size and sequence length the amount of data stays the same, so that longer
sequences or larger batches mean fewer steps, as in the paper's appendix. The paper leaves the
number of power iterations h open. Two settings are ours: what becomes of the rest that a sketch leaves
out, and the choice of a map for each shape ("auto"). The learning rate can be varied because another map
may need another rate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from operator import attrgetter
from typing import Any, get_args

import torch

from polarstep.checked_values import is_integer
from polarstep_lab.config import (
    AutoBudget,
    ConfigError,
    ImageData,
    PolarConfig,
    RunConfig,
    SketchName,
    Stage,
    TextData,
    with_overrides,
)
from polarstep_lab.flops.workload import workload_named
from polarstep_lab.models.convnet import ConvNet, ConvNetConfig
from polarstep_lab.models.gpt import GPT, GPTConfig

__all__ = ["AXES", "Axis", "apply_axis", "find_axis", "longest_short_side"]


@dataclass(frozen=True)
class Axis:
    """A setting to vary: how it is applied, and the values the paper tries on each benchmark.

    ``own`` reads the value that a config has: to apply it again changes nothing. It gives ``None`` where
    no value of the axis makes this config. With ``relative``, another recipe varies the setting in the
    same proportions as the paper varies its own. With ``around``, the values go from half to twice the
    recipe's own. ``also`` are further values that can be given and are not the paper's. ``ours`` says
    that no value is the paper's.
    """

    name: str
    symbol: str
    apply: Callable[[RunConfig, Any], RunConfig]
    own: Callable[[RunConfig], Any] = lambda config: None
    nanogpt: tuple[int | str, ...] = ()
    cifar10: tuple[int | str, ...] = ()
    relative: Callable[[RunConfig], Fraction] | None = None
    around: bool = False
    also: tuple[str, ...] = ()
    ours: bool = False

    def values(self, config: RunConfig) -> tuple[int | float | str, ...]:
        """The values to try for a recipe, the paper's or near ones; none for some benchmarks."""
        if self.around:
            own = self.own(config)
            return tuple(
                own if k == 0 else float(f"{own * 2 ** (k / 2):.2g}") for k in range(-2, 3)
            )
        found = self.nanogpt if config.benchmark == "nanogpt" else self.cifar10
        if self.relative is None or not found:
            return found
        share = self.relative(config)
        near = (max(1, round(value * share)) for value in found if isinstance(value, int))
        return tuple(dict.fromkeys(near))


def _set(path: str) -> Callable[[RunConfig, Any], RunConfig]:
    return lambda config, value: with_overrides(config, {path: value})


def _rank(config: RunConfig, value: Any) -> RunConfig:
    """Set the rank s. A rank at which no matrix is sketched is refused: all such ranks run the same."""
    ablated = with_overrides(config, {"optimizer.polar.rank": value})
    polar = ablated.optimizer.polar
    if polar.rank is None:
        raise ConfigError(f"rank={value}: expected a whole number ≥ 1; {_FULL_SPACE}")
    ell, side = polar.rank + polar.oversample, longest_short_side(ablated.model)
    if ell >= side:
        sketching = side - polar.oversample - 1
        raise ConfigError(
            f"rank={value}: no matrix would be sketched, since ℓ = {polar.rank} + {polar.oversample} ≥ "
            f"{side}, the largest min(m, n); "
            + (f"expected 1 to {sketching}" if sketching > 0 else "lower the oversampling")
            + f"; {_FULL_SPACE}"
        )
    return ablated


_FULL_SPACE = "full space is `polarstep run … --set optimizer.polar.rank=null`"


@functools.lru_cache
def longest_short_side(model: GPTConfig | ConvNetConfig) -> int:
    """The largest min(m, n) of the matrices that are Muon's."""
    with torch.device("meta"):
        built = GPT(model) if isinstance(model, GPTConfig) else ConvNet(model)
    return max(min(m, n) for m, n in built.matrix_shapes())


def _share_of_the_papers_rank(config: RunConfig) -> Fraction:
    paper = workload_named(config.benchmark).rank
    return Fraction(config.optimizer.polar.rank or paper, paper)


_FAST = {"solver": "polar-express-sketch", "steps": 4}
# Sketches with the inner map that makes them fastest; fresh sketches are without power iterations.
_FAST_SKETCHES: dict[str, dict[str, Any]] = {
    "gaussian-fast": {"sketch": "gaussian", "power": 0, **_FAST},
    "warm-fast": {"sketch": "warm", **_FAST},
}


def _sketch(config: RunConfig, value: Any) -> RunConfig:
    """Set the sketch: the name of Ω's distribution, or of one of the fast maps above."""
    if value not in (known := (*get_args(SketchName), *_FAST_SKETCHES)):
        raise ConfigError(f"sketch={value!r}: expected one of {', '.join(known)}")
    settings = _FAST_SKETCHES.get(value, {"sketch": value})
    return with_overrides(config, {f"optimizer.polar.{key}": v for key, v in settings.items()})


def _rest(config: RunConfig, value: Any) -> RunConfig:
    """Set what becomes of the rest; ``float8`` stays on only where the rest is lifted."""
    eight_bits = config.optimizer.polar.float8 and value == "lifted"
    settings = {"optimizer.polar.rest": value, "optimizer.polar.float8": eight_bits}
    return with_overrides(config, settings)


def _auto(config: RunConfig, value: Any) -> RunConfig:
    """Replace the method's map by one that is chosen for each shape under a budget."""
    if value not in (known := get_args(AutoBudget)):
        raise ConfigError(f"auto={value!r}: expected one of {', '.join(known)}")
    optimizer = replace(config.optimizer, polar=PolarConfig(auto=value))
    return replace(config, optimizer=optimizer)


def _batch(config: RunConfig, value: Any) -> RunConfig:
    """Set images per batch, or sequences per batch with the same number of tokens in every stage."""
    if isinstance(config.data, ImageData):
        return with_overrides(config, {"data.batch_size": value})
    _whole("batch", value)
    first = config.data.stages[0].sequences
    stages = [
        replace(
            stage,
            sequences=max(1, round(stage.sequences * value / first)),
            steps=max(1, round(stage.steps * first / value)),
        )
        for stage in config.data.stages
    ]
    return _shortened(config, stages)


def _sequence_length(config: RunConfig, value: Any) -> RunConfig:
    """Set the longest sequence; shorter stages scale with it, and the number of tokens stays."""
    if not isinstance(config.data, TextData) or not isinstance(config.model, GPTConfig):
        raise ConfigError("sequence-length is an ablation of nanogpt: images have no sequences")
    _whole("sequence-length", value)
    scale = value / config.data.window
    stages = [
        replace(
            stage,
            sequence_length=max(1, round(stage.sequence_length * scale)),
            steps=max(1, round(stage.steps / scale)),
        )
        for stage in config.data.stages
    ]
    longer = with_overrides(config, {"model.context": max(config.model.context, value)})
    return _shortened(longer, stages)


def _share_of_the_papers_batch(config: RunConfig) -> Fraction:
    if isinstance(config.data, ImageData):
        return Fraction(1)
    return Fraction(config.data.stages[0].sequences, 144)


def _share_of_the_papers_length(config: RunConfig) -> Fraction:
    assert isinstance(config.data, TextData)
    return Fraction(config.data.window, 2048)


def _shortened(config: RunConfig, stages: list[Stage]) -> RunConfig:
    """``config`` with new stages; every setting that is a number of steps is scaled alike."""
    assert isinstance(config.data, TextData)
    ratio = sum(stage.steps for stage in stages) / config.data.steps
    schedule = config.schedule
    return with_overrides(
        config,
        {
            "data.stages": [asdict(stage) for stage in stages],
            "schedule.warmup": round(schedule.warmup * ratio),
            "schedule.extension": round(schedule.extension * ratio),
            "schedule.momentum_cooldown": round(schedule.momentum_cooldown * ratio),
            "evaluation.every": max(1, round(config.evaluation.every * ratio)),
        },
    )


def _own_batch(config: RunConfig) -> int:
    data = config.data
    return data.batch_size if isinstance(data, ImageData) else data.stages[0].sequences


def _own_length(config: RunConfig) -> int | None:
    return config.data.window if isinstance(config.data, TextData) else None


def _whole(name: str, value: Any) -> None:
    if not is_integer(value) or value < 1:
        raise ConfigError(f"{name}={value!r}: expected a whole number ≥ 1, as 512")


AXES: tuple[Axis, ...] = (
    Axis(
        "rank",
        "s",
        _rank,
        attrgetter("optimizer.polar.rank"),
        nanogpt=(50, 100, 200, 400),
        cifar10=(16, 32, 64, 128),
        relative=_share_of_the_papers_rank,
    ),
    Axis(
        "power",
        "h",
        _set("optimizer.polar.power"),
        attrgetter("optimizer.polar.power"),
        nanogpt=(0, 1, 2),
        cifar10=(0, 1, 2),
        ours=True,
    ),
    Axis(
        "steps",
        "q",
        _set("optimizer.polar.steps"),
        attrgetter("optimizer.polar.steps"),
        nanogpt=(1, 3, 5, 7, 9),
        cifar10=(1, 3, 5, 7, 9),
    ),
    Axis(
        "solver",
        "φ",
        _set("optimizer.polar.solver"),
        attrgetter("optimizer.polar.solver"),
        nanogpt=("cubic", "quintic", "empirical", "polar-express"),
        cifar10=("cubic", "quintic", "empirical", "polar-express"),
        also=("quintic-2", "polar-express-default", "polar-express-sketch", "exact"),
    ),
    Axis(
        "sketch",
        "Ω",
        _sketch,
        attrgetter("optimizer.polar.sketch"),
        nanogpt=("gaussian", "kaczmarz"),
        cifar10=("gaussian", "kaczmarz"),
        also=("warm", "kaczmarz-filled", *_FAST_SKETCHES),
    ),
    Axis(
        "rest",
        "R",
        _rest,
        attrgetter("optimizer.polar.rest"),
        nanogpt=("dropped", "lifted"),
        cifar10=("dropped", "lifted"),
        ours=True,
    ),
    Axis(
        "auto",
        "T(M)",
        _auto,
        attrgetter("optimizer.polar.auto"),
        nanogpt=get_args(AutoBudget),
        cifar10=get_args(AutoBudget),
        ours=True,
    ),
    # What the paper calls the sequence length, 1024 to 4096, is a factor of the batch in the authors'
    # code: sequences keep their lengths.
    Axis(
        "batch",
        "B",
        _batch,
        _own_batch,
        nanogpt=(72, 144, 288),
        cifar10=(500, 1000, 2000, 3000, 4000),
        relative=_share_of_the_papers_batch,
    ),
    Axis(
        "sequence-length",
        "T",
        _sequence_length,
        _own_length,
        nanogpt=(1024, 2048, 4096),
        relative=_share_of_the_papers_length,
        ours=True,
    ),
    Axis(
        "lr",
        "η",
        _set("optimizer.lr"),
        attrgetter("optimizer.lr"),
        around=True,
        ours=True,
    ),
)


def find_axis(name: str) -> Axis:
    """The axis of this name."""
    for axis in AXES:
        if axis.name == name:
            return axis
    names = ", ".join(axis.name for axis in AXES)
    raise ConfigError(f"ablation axis {name!r}: expected one of {names}")


def apply_axis(config: RunConfig, name: str, value: Any) -> RunConfig:
    """``config`` with one setting at ``value``."""
    sketched = ("rank", "power", "sketch", "rest")
    if name in (*sketched, "steps", "solver", "auto") and not config.rule.has_map:
        raise ConfigError(
            f"{name}={value}: {config.method} has no polar map; ablate a Muon method, as rand-muon"
        )
    if name in sketched and not config.rule.randomized:
        raise ConfigError(
            f"{name}={value}: {config.method} does not sketch; ablate a randomized one, as rand-muon"
        )
    return find_axis(name).apply(config, value)
