"""Recipes: functions that return the complete config of a run for a method.

A recipe knows its benchmark at one size. :func:`resolve` is what commands call: a recipe by name,
or a recipe file as the tuning command writes it, a method, a seed, overrides, and possibly a
setting varied by an ablation.

Where learning rates of a recipe were tuned, the values are in ``tuned/RECIPE.json`` beside this
file, written by ``polarstep tune``, and the recipe takes them from there: ``{"methods": {SLUG:
{"overrides": {"optimizer.lr": …}}}}``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polarstep.experiments.ablations import apply_axis
from polarstep.experiments.config import (
    Benchmark,
    ConfigError,
    EvaluationConfig,
    ImageData,
    OptimizerConfig,
    PolarConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    Stage,
    TextData,
    with_overrides,
)
from polarstep.experiments.methods import Method, find_method
from polarstep.models.convnet import ConvNetConfig
from polarstep.models.gpt import GPTConfig
from polarstep.storage import read_json

__all__ = [
    "RECIPES",
    "Range",
    "Recipe",
    "find_recipe",
    "read_recipe_file",
    "resolve",
    "search_space",
    "tuned",
]


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


def _recipe(
    name: str,
    benchmark: Benchmark,
    summary: str,
    needs: str,
    search: Mapping[str, Mapping[str, Range]],
) -> Callable[[Callable[[Method], RunConfig]], Callable[[Method], RunConfig]]:
    """Register a recipe function under ``name``."""

    def register(build: Callable[[Method], RunConfig]) -> Callable[[Method], RunConfig]:
        RECIPES[name] = Recipe(name, benchmark, summary, build, needs, search)
        return build

    return register


def _polar(method: Method, rank: int, oversample: int, power: float, steps: int = 7) -> PolarConfig:
    """The paper's polar map: quintic with q = 7, sketched for the randomized methods."""
    if method.sketch is None:
        return PolarConfig(steps=steps)
    return PolarConfig(
        steps=steps, rank=rank, oversample=oversample, power=power, sketch=method.sketch
    )


# --- nanoGPT -------------------------------------------------------------------------------------

PADDED_GPT2 = 50304
"""GPT-2's 50,257 tokens padded to a multiple of 128: a GPU multiplies aligned matrices faster."""

GPT_SEARCH = {
    "adamw": {"optimizer.lr": Range(3e-4, 3e-2, log=True)},
    "sgd": {"optimizer.lr": Range(1e-2, 10.0, log=True)},
    "muon": {"optimizer.lr": Range(3e-3, 0.3, log=True)},
}

# Every method has a rate for the matrices and one for the embedding, whose rows are so seldom met
# that no rate is right for both.
SMALL_SEARCH = {
    "adamw": {
        "optimizer.lr": Range(5e-4, 3e-3, log=True),
        "optimizer.embedding_lr": Range(0.2, 1.0, log=True),
    },
    "sgd": {
        "optimizer.lr": Range(0.05, 1.0, log=True),
        "optimizer.embedding_lr": Range(100.0, 3000.0, log=True),
    },
    "muon": {
        "optimizer.lr": Range(0.01, 0.1, log=True),
        "optimizer.embedding_lr": Range(0.05, 2.0, log=True),
    },
}


@_recipe(
    "nanogpt-toy",
    "nanogpt",
    "a 4-layer GPT on the characters of the shipped text; half a minute on one core",
    "nothing: the text is in the package",
    GPT_SEARCH,
)
def nanogpt_toy(method: Method) -> RunConfig:
    """A laptop-sized GPT over characters: 0.8M parameters, 164 thousand characters."""
    lr, momentum = {"adamw": (5e-3, 0.9), "sgd": (0.1, 0.9), "muon": (0.03, 0.95)}[method.algorithm]
    muon = method.algorithm == "muon"
    return RunConfig(
        recipe="nanogpt-toy",
        benchmark="nanogpt",
        method=method.name,
        seed=0,
        model=GPTConfig(vocab_size=65, width=128, layers=4, heads=4, context=128),
        data=TextData(
            train=("corpus:tinyshakespeare",),
            val=("corpus:tinyshakespeare",),
            stages=(Stage(steps=160, sequences=8, sequence_length=128),),
        ),
        optimizer=OptimizerConfig(
            lr=lr,
            momentum=momentum,
            polar=_polar(method, rank=32, oversample=8, power=1),
            embedding_lr=1e-2 if muon else 0.0,
            head_lr=1e-2 if muon else 0.0,
        ),
        schedule=ScheduleConfig(cooldown=0.6, final=0.05),
        evaluation=EvaluationConfig(every=32, tokens=16_384, batch=32),
        runtime=RuntimeConfig(log_every=5),
    )


@_recipe(
    "nanogpt-small",
    "nanogpt",
    "a 5-layer GPT with the paper's matrices on GPT-2 tokens; ten seconds on an H200",
    "token shards data/*_train_*.bin and data/*_val_*.bin (polarstep tokenize)",
    SMALL_SEARCH,
)
def nanogpt_small(method: Method) -> RunConfig:
    """The nanoGPT columns of Table 2 for 6.6 million tokens and one GPU.

    Matrices, polar map, routing and the shape of the schedule are the paper's; depth, batch and
    length of the run are cut. 35.4M parameters in hidden matrices, 77.3M in embedding and head.
    """
    lr, embedding_lr, momentum = {
        "adamw": (1e-3, 0.4, 0.9),
        "sgd": (0.1, 2000.0, 0.9),
        "muon": (0.03, 0.3, 0.95),
    }[method.algorithm]
    muon = method.algorithm == "muon"
    return RunConfig(
        recipe="nanogpt-small",
        benchmark="nanogpt",
        method=method.name,
        seed=0,
        model=GPTConfig(vocab_size=PADDED_GPT2, width=768, layers=5, heads=6, context=1024),
        data=TextData(
            train=("data/*_train_*.bin",),
            val=("data/*_val_*.bin",),
            stages=(Stage(steps=400, sequences=16, sequence_length=1024),),
        ),
        optimizer=OptimizerConfig(
            lr=lr,
            momentum=momentum,
            polar=_polar(method, rank=200, oversample=10, power=1),
            embedding_lr=embedding_lr,
            head_lr=0.004 if muon else 0.0,
        ),
        schedule=ScheduleConfig(
            # The baselines start gently, without which SGD is unstable; Muon's step has one size anyway.
            warmup=0 if muon else 40,
            cooldown=0.6,
            final=0.05,
            momentum_start=0.85 if muon else None,
            momentum_warmup=0.2,
            momentum_cooldown=20,
        ),
        # As many sequences as in a training batch: one compiled shape serves both.
        evaluation=EvaluationConfig(every=80, tokens=327_680, batch=16),
        runtime=RuntimeConfig(micro_batch=16, compile=None),
    )


@_recipe(
    "nanogpt",
    "nanogpt",
    "the paper's nanoGPT benchmark: 11 layers, 768 wide, 1490 steps in three stages",
    "FineWeb shards data/fineweb10B/fineweb_{train,val}_*.bin (or any, with --set data.train=…)",
    GPT_SEARCH | {"muon": GPT_SEARCH["muon"] | {"optimizer.momentum": Range(0.9, 0.99)}},
)
def nanogpt(method: Method) -> RunConfig:
    """The nanoGPT columns of Table 2.

    Learning rates and momentum are the paper's (Appendix, "Hyperparameters and parameter
    routing"). Its SGD rate of 1e-4 belongs to a loss summed over the 16,384 tokens of one of eight
    parts of the first stage's batch, as modded-nanogpt sums it; for the mean that is 1e-4 · 16,384.
    Stages, cool-down and momentum warm-up are those of the modded-nanogpt configuration it builds
    on; the first stage sees sequences of 896 tokens, as many as make up its number of tokens.
    """
    lr, momentum = {
        "adamw": (0.0018, 0.9),
        "sgd": (1e-4 * 16_384, 0.9),
        "muon": (0.032463575100400426, 0.9664542176931918),
    }[method.algorithm]
    third = 1450 // 3
    muon = method.algorithm == "muon"
    return RunConfig(
        recipe="nanogpt",
        benchmark="nanogpt",
        method=method.name,
        seed=0,
        model=GPTConfig(
            vocab_size=PADDED_GPT2,
            width=768,
            layers=11,
            heads=6,
            context=2048,
            attention_free=(6,),
            spare_mlps=1,
        ),
        data=TextData(
            train=("data/fineweb10B/fineweb_train_*.bin",),
            val=("data/fineweb10B/fineweb_val_*.bin",),
            stages=(
                Stage(steps=third, sequences=146, sequence_length=896, lr=1.0),
                Stage(steps=third, sequences=16 * 8, sequence_length=2048, lr=1.52),
                Stage(steps=1490 - 2 * third, sequences=24 * 8, sequence_length=2048, lr=1.73),
            ),
        ),
        optimizer=OptimizerConfig(
            lr=lr,
            momentum=momentum,
            polar=_polar(method, rank=200, oversample=10, power=1),
            embedding_lr=0.008 if muon else 0.0,
            head_lr=0.008 if muon else 0.0,
        ),
        schedule=ScheduleConfig(
            cooldown=0.6,
            final=0.15,
            extension=40,
            momentum_start=0.85 if muon else None,
            momentum_warmup=0.2,
            momentum_cooldown=50,
        ),
        evaluation=EvaluationConfig(every=125, tokens=10_485_760, batch=16),
        runtime=RuntimeConfig(micro_batch=16, compile=None),
    )


@_recipe(
    "nanogpt-wiki",
    "nanogpt",
    "the paper's model and settings, one pass over 73 million tokens; two minutes on an H200",
    "token shards data/*_train_*.bin and data/*_val_*.bin (polarstep tokenize)",
    GPT_SEARCH,
)
def nanogpt_wiki(method: Method) -> RunConfig:
    """The ``nanogpt`` recipe at an eighth of its batch, and three quarters of its steps.

    The three stages keep their proportions (8 : 16 : 24) and learning-rate multipliers. All
    sequences are 2048 long, so that every pass, 16 of them, has one shape.
    """
    config = nanogpt(method)
    assert isinstance(config.data, TextData)
    data = TextData(
        train=("data/*_train_*.bin",),
        val=("data/*_val_*.bin",),
        stages=tuple(
            Stage(steps=370, sequences=16 * (number + 1), sequence_length=2048, lr=stage.lr)
            for number, stage in enumerate(config.data.stages)
        ),
    )
    return replace(
        config,
        recipe="nanogpt-wiki",
        data=data,
        schedule=replace(config.schedule, extension=30, momentum_cooldown=37),
        evaluation=EvaluationConfig(every=185, tokens=327_680, batch=16),
    )


# --- CIFAR-10 ------------------------------------------------------------------------------------

CIFAR_SEARCH = {
    "adamw": {
        "optimizer.lr": Range(3e-4, 3e-2, log=True),
        "optimizer.momentum": Range(0.7, 0.95),
    },
    "sgd": {
        "optimizer.lr": Range(1e-3, 0.3, log=True),
        "optimizer.momentum": Range(0.5, 0.95),
    },
    "muon": {
        "optimizer.lr": Range(0.02, 0.5, log=True),
        "optimizer.momentum": Range(0.3, 0.9),
    },
}

# From the scripts in the authors' repository (muon-randomized-svd/cifar10): tuned by them for each
# method. The Kaczmarz row has no script of its own; of twelve trials (results/cifar10-tuning) none was
# better than the Gaussian row's values.
CIFAR_TUNED = {
    "adamw": (0.0032280803645816005, 0.8604272479139393),
    "sgd": (0.017051314712312846, 0.7061487457292506),
    "muon-polyak": (0.10106037719322686, 0.4813818321663787),
    "rand-muon-polyak": (0.17997642487590804, 0.33019364041128824),
    "muon": (0.07422449878121241, 0.7832493821887699),
    "rand-muon": (0.10471931304418906, 0.7098608967968731),
    "rand-muon-kaczmarz": (0.10471931304418906, 0.7098608967968731),
}


@_recipe(
    "cifar10",
    "cifar10",
    "the paper's CIFAR-10 benchmark: the Airbench CNN, batch 500, 8 epochs",
    "CIFAR-10 in data/ (polarstep download cifar10)",
    CIFAR_SEARCH,
)
def cifar10(method: Method) -> RunConfig:
    """The CIFAR-10 columns of Table 2."""
    lr, momentum = CIFAR_TUNED[method.slug]
    muon = method.algorithm == "muon"
    return RunConfig(
        recipe="cifar10",
        benchmark="cifar10",
        method=method.name,
        seed=0,
        model=ConvNetConfig(),
        data=ImageData(),
        optimizer=OptimizerConfig(
            lr=lr,
            momentum=momentum,
            beta2=0.996314442163105,
            lr_scale="none",
            polar=_polar(method, rank=128, oversample=10, power=2),
            head_lr=0.67,
            vector_lr=0.053,
            other_momentum=0.85,
            decay_per_image=2e-6,
            normalize_filters=muon,
        ),
        schedule=ScheduleConfig(cooldown=1.0, final=0.0),
        evaluation=EvaluationConfig(every=90, batch=1000),
        runtime=RuntimeConfig(log_every=45),
    )


@_recipe(
    "cifar10-tiny",
    "cifar10",
    "a narrow CNN on a fifth of CIFAR-10 for two epochs; a minute on two cores",
    "CIFAR-10 in data/ (polarstep download cifar10)",
    CIFAR_SEARCH,
)
def cifar10_tiny(method: Method) -> RunConfig:
    """The CIFAR-10 benchmark at a size for two CPU cores."""
    config = cifar10(method)
    assert isinstance(config.data, ImageData)
    return replace(
        config,
        recipe="cifar10-tiny",
        model=ConvNetConfig(widths=(32, 64, 64)),
        data=replace(config.data, train_images=10_000, epochs=2.0, held_out=2000),
        optimizer=replace(config.optimizer, polar=_polar(method, rank=16, oversample=4, power=2)),
        evaluation=replace(config.evaluation, every=10, test_time_augmentation=True),
        runtime=replace(config.runtime, log_every=2),
    )


# --- choosing ------------------------------------------------------------------------------------


def find_recipe(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(
            f"recipe {name!r}: {hint}expected one of {', '.join(RECIPES)}, or a recipe file"
        )
    return RECIPES[name]


def tuned(recipe: str, method: Method) -> dict[str, Any]:
    """What tuning found for a recipe and a method, as overrides; empty where it was not tuned."""
    path = Path(__file__).parent / "tuned" / f"{recipe}.json"
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
    if method is None:
        raise ConfigError("no method given: say which with --method, as in --method muon")
    chosen = find_method(method) if isinstance(method, str) else method
    config = replace(find_recipe(recipe).build(chosen), seed=seed)
    config = with_overrides(config, tuned(recipe, chosen) | overrides)
    return config if axis is None else apply_axis(config, *axis)


def read_recipe_file(path: Path, method: Method | str | None) -> tuple[str, Method, dict[str, Any]]:
    """Recipe, method and overrides of a recipe file; ``method`` is checked against the file's."""
    content = read_json(path)
    try:
        name, slug, overrides = content["recipe"], content["method"], content["overrides"]
    except (KeyError, TypeError):
        raise ConfigError(
            f"{path} is not a recipe file: expected the keys recipe, method and overrides"
        ) from None
    found = find_method(slug)
    asked = find_method(method) if isinstance(method, str) else method
    if asked is not None and asked != found:
        raise ConfigError(f"{path} is a recipe for {found.slug}, not for {asked.slug}")
    return name, found, dict(overrides)
