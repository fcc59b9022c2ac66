"""Several runs in one command: methods × seeds, or the values of an ablation × seeds.

Each run has a directory of its own. A suite started again goes on where it stopped: finished runs
are left alone, interrupted ones resumed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polarstep_lab.axes import apply_axis, find_axis
from polarstep_lab.config import ConfigError, RunConfig
from polarstep_lab.methods import Method
from polarstep_lab.recipes import read_recipe_file, resolve
from polarstep_lab.records.directory import state_of
from polarstep_lab.records.mark import CONFIG
from polarstep_lab.records.record import Ablation, RunIdentity
from polarstep_lab.storage import StorageError, refuse_unwritable

__all__ = ["PlannedRun", "ablation_runs", "comparison_runs", "pending", "plan_run"]


@dataclass(frozen=True)
class PlannedRun:
    """A run to be made: its config, its identity for the record, and where it goes."""

    config: RunConfig
    identity: RunIdentity
    directory: Path
    label: str


def plan_run(
    recipe: str,
    method: Method | str | None,
    seed: int,
    overrides: Mapping[str, Any],
    out: Path | None = None,
    axis: tuple[str, Any] | None = None,
    group: str = "run",
) -> PlannedRun:
    """One run, by default in ``runs/RECIPE/METHOD[-AXIS-VALUE]/seed-N``.

    What a recipe file says becomes part of the overrides: the record and the command in it do not
    depend on the file.
    """
    if recipe.endswith(".json"):
        recipe, method, from_file = read_recipe_file(Path(recipe), method)
        overrides = from_file | dict(overrides)
    config = resolve(recipe, method, seed, overrides, axis)
    slug = config.rule.slug
    folder = config.rule.folder
    name = folder if axis is None else f"{folder}-{axis[0]}-{axis[1]}"
    directory = out or Path("runs") / config.recipe / name / f"seed-{seed}"
    identity = RunIdentity(
        recipe=config.recipe,
        benchmark=config.benchmark,
        method=config.method,
        seed=seed,
        config=config.to_dict(),
        overrides=dict(overrides),
        group=group,
        ablation=None if axis is None else Ablation(*axis),
        command=_command(recipe, slug, seed, overrides, axis),
    )
    setting = "" if axis is None else f", {axis[0]}={axis[1]}"
    polar = config.optimizer.polar
    name = config.rule.named(polar.sketch, polar.auto)
    return PlannedRun(config, identity, directory, f"{name}{setting}, seed {seed}")


def _command(
    recipe: str,
    slug: str,
    seed: int,
    overrides: Mapping[str, Any],
    axis: tuple[str, Any] | None,
) -> str:
    """The command that makes this run again."""
    parts = ["polarstep", "run", recipe, "--method", slug, "--seed", str(seed)]
    if axis is not None:
        parts += ["--vary", f"{axis[0]}={axis[1]}"]
    for key, value in overrides.items():
        parts += ["--set", f"{key}={_as_argument(value)}"]
    return shlex.join(parts)


def _as_argument(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def comparison_runs(
    recipe: str,
    methods: Sequence[Method],
    seeds: Iterable[int],
    overrides: Mapping[str, Any],
    out: Path,
) -> list[PlannedRun]:
    """All methods with all seeds; seed by seed, so that an early look shows every method."""
    return [
        plan_run(
            recipe, method, seed, overrides, out / method.folder / f"seed-{seed}", group="compare"
        )
        for seed in seeds
        for method in methods
    ]


def ablation_runs(
    recipe: str,
    method: Method,
    axis: str,
    values: Sequence[Any],
    seeds: Iterable[int],
    overrides: Mapping[str, Any],
    out: Path,
) -> list[PlannedRun]:
    """One method with one setting at several values, everything else as in the recipe.

    A value that is given twice is one run: a second would count as another seed.
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
    return [
        plan_run(
            recipe,
            method,
            seed,
            overrides,
            out / method.folder / f"{axis}-{value}" / f"seed-{seed}",
            axis=(axis, value),
            group=f"ablate:{axis}={value}",
        )
        for seed in seeds
        for value in values
    ]


def pending(runs: Sequence[PlannedRun], force: bool = False) -> list[PlannedRun]:
    """The runs that are still to be made or to be resumed; all of them with ``force``.

    A finished run with another config in its place is an error: its results are not this suite's. So is
    a folder that cannot hold the runs.
    """
    for run in runs:
        refuse_unwritable(run.directory / CONFIG, "--out")
    if force:
        return list(runs)
    todo = []
    for run in runs:
        state = state_of(run.directory)
        if state != "empty":
            found = RunIdentity.load(run.directory)
            if found.config != run.identity.config:
                raise StorageError(
                    f"{run.directory} holds a run with other settings (`{found.command}`): give "
                    "another --out, or --force to replace the runs there"
                )
        if state != "finished":
            todo.append(run)
    return todo
