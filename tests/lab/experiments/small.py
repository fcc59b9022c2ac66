"""Configs that train in a second, for tests of the loop and not of what comes out of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polarstep_lab.config import RunConfig
from polarstep_lab.jobs.job import Job, jobs_of
from polarstep_lab.methods import Method
from polarstep_lab.recipes import resolve
from polarstep_lab.study import ablation, comparison

TINY_GPT: dict[str, Any] = {
    "model.width": 32,
    "model.layers": 2,
    "model.heads": 2,
    "model.context": 32,
    "data.stages": [{"steps": 6, "sequences": 4, "sequence_length": 32, "lr": 1.0}],
    "evaluation.every": 3,
    "evaluation.tokens": 256,
    "runtime.log_every": 1,
    "runtime.device": "cpu",
}

# Overrides of nanogpt-toy for commands that train many networks.
SMALLEST_GPT: dict[str, Any] = {
    "model.width": 16,
    "model.layers": 1,
    "model.heads": 1,
    "model.context": 16,
    "data.stages": [{"steps": 6, "sequences": 2, "sequence_length": 16}],
    "evaluation.every": 2,
    "evaluation.tokens": 128,
    "evaluation.batch": 4,
}

TINY_CNN: dict[str, Any] = {
    "model.widths": [8, 16, 16],
    "data.train_images": 80,  # convolutions of images take most of the time of a run
    "data.held_out": 40,
    "data.batch_size": 16,
    "data.epochs": 2.0,
    "evaluation.every": 5,
    "runtime.log_every": 1,
    "runtime.device": "cpu",
}


def tiny_gpt(method: str = "rand-muon", seed: int = 0, **overrides: Any) -> RunConfig:
    polar = {"optimizer.polar.rank": 6, "optimizer.polar.oversample": 2}
    own = polar if method.startswith("rand-") else {}
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve("nanogpt-toy", method, seed, TINY_GPT | own | named)


def tiny_cnn(root: Path, method: str = "rand-muon", seed: int = 0, **overrides: Any) -> RunConfig:
    polar = {"optimizer.polar.rank": 3, "optimizer.polar.oversample": 2}
    own = polar if method.startswith("rand-") else {}
    named = {key.replace("__", "."): value for key, value in overrides.items()}
    return resolve("cifar10-tiny", method, seed, TINY_CNN | {"data.root": str(root)} | own | named)


def fake_cifar10(root: Path, per_file: int = 40) -> Path:
    """The official binary files, small: ten classes that differ in brightness, plus noise."""
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        labels = np.arange(per_file, dtype=np.uint8) % 10
        images = rng.integers(0, 30, size=(per_file, 3072)) + 22 * labels[:, None]
        records = np.concatenate([labels[:, None], images.astype(np.uint8)], axis=1)
        records.tofile(folder / f"{name}.bin")
    return root


def comparison_runs(
    recipe: str, methods: Sequence[Method], seeds: Iterable[int], overrides: Any, out: Path
) -> list[Job]:
    """The runs of ``polarstep compare``."""
    return jobs_of(comparison(recipe, methods, seeds, overrides), out)


def ablation_runs(
    recipe: str,
    method: Method,
    axis: str,
    values: Sequence[Any],
    seeds: Iterable[int],
    overrides: Any,
    out: Path,
) -> list[Job]:
    """The runs of ``polarstep ablate``."""
    return jobs_of(ablation(recipe, method, axis, values, seeds, overrides), out)
