"""The runs of a study: what each of them is, and where it goes.

Each run has a directory of its own. A study started again goes on where it stopped: finished runs are
left alone, interrupted ones resumed.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polarstep_lab.config import ConfigError, RunConfig
from polarstep_lab.methods import Method
from polarstep_lab.recipes import read_recipe_file, resolve
from polarstep_lab.records.directory import state_of
from polarstep_lab.records.record import CONFIG, Ablation, Result, RunSpec
from polarstep_lab.storage import StorageError, refuse_unwritable
from polarstep_lab.study import Study, Variant

__all__ = ["Job", "chosen_rate", "jobs_of", "plan_run", "rate_jobs", "unfinished"]


@dataclass(frozen=True)
class Job:
    """A run to be made: its config, its spec for the record, and where it goes.

    A process that makes it loads ``program`` first, the file of the study, for the maps it defines.
    """

    config: RunConfig
    spec: RunSpec
    directory: Path
    label: str
    program: Path | None = None


def plan_run(
    recipe: str,
    method: Method | str | None,
    seed: int,
    overrides: Mapping[str, Any],
    out: Path | None = None,
    axis: tuple[str, Any] | None = None,
) -> Job:
    """One run, by default in ``runs/RECIPE/METHOD[-AXIS-VALUE]/seed-N``.

    What a recipe file says becomes part of the overrides: the record and the command in it do not
    depend on the file.
    """
    if recipe.endswith(".json"):
        recipe, method, from_file = read_recipe_file(Path(recipe), method)
        overrides = from_file | dict(overrides)
    config = resolve(recipe, method, seed, overrides, axis)
    folder = config.rule.folder
    name = folder if axis is None else f"{folder}-{axis[0]}-{axis[1]}"
    directory = out or Path("runs") / config.recipe / name / f"seed-{seed}"
    spec = RunSpec(
        recipe=config.recipe,
        benchmark=config.benchmark,
        method=config.method,
        seed=seed,
        config=config.to_dict(),
        overrides=dict(overrides),
        ablation=None if axis is None else Ablation(*axis),
        command=_command(recipe, config.rule.slug, seed, overrides, axis),
    )
    setting = "" if axis is None else f", {axis[0]}={axis[1]}"
    polar = config.optimizer.polar
    name = config.rule.named(polar.sketch, polar.auto)
    return Job(config, spec, directory, f"{name}{setting}, seed {seed}")


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
        parts += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(parts)


def jobs_of(
    study: Study,
    out: Path,
    program: Path | None = None,
    rates: Mapping[str, tuple[float, str]] | None = None,
) -> list[Job]:
    """All variants with all seeds; seed by seed, so that an early look shows every variant.

    ``rates`` gives the chosen rate of each variant by its name, and what chose it.
    """
    found = []
    for seed in study.seeds:
        for variant in study.variants:
            own, why = {}, ""
            if rates is not None and study.rates is not None and variant.name in rates:
                rate, why = rates[variant.name]
                own = {study.rates.setting: rate}
            place = out / variant.place / f"seed-{seed}"
            found.append(_job(study, variant, seed, own, place, program, why))
    return found


def rate_jobs(study: Study, out: Path, program: Path | None = None) -> list[Job]:
    """The runs that choose the rate of each variant; none for a study that chooses none."""
    if study.rates is None:
        return []
    return [
        _job(
            study,
            variant,
            study.rates.seed,
            {study.rates.setting: rate},
            out / "rates" / variant.place / f"{rate:g}",
            program,
            "chooses",
        )
        for variant in study.variants
        if len(study.rates_of(variant)) > 1
        for rate in study.rates_of(variant)
    ]


def chosen_rate(study: Study, variant: Variant, out: Path) -> tuple[float, str]:
    """The rate of a variant with the best validation, and a few words on what chose it."""
    assert study.rates is not None
    rates = study.rates_of(variant)
    if len(rates) == 1:
        return rates[0], "given"
    found, ended = {}, []
    for rate in rates:
        result = Result.load(out / "rates" / variant.place / f"{rate:g}")
        validation = None if result is None else result.validation
        if result is None:
            ended.append(f"{rate:g} was not made")
        elif result.status != "finished" or validation is None or not math.isfinite(validation):
            ended.append(f"{rate:g} {result.status}: {result.message}".rstrip(": "))
        else:
            found[rate] = validation * (-1 if result.metric == "test_accuracy" else 1)
    if not found:
        raise ConfigError(
            f"no rate of {variant.name!r} trains ({'; '.join(ended)}): give others in rates=, or mend "
            "what failed, and run the study again"
        )
    tried = ", ".join(f"{rate:g}" for rate in rates)
    return min(found, key=found.__getitem__), f"best of {tried} on seed {study.rates.seed}"


def _job(
    study: Study,
    variant: Variant,
    seed: int,
    own: Mapping[str, Any],
    directory: Path,
    program: Path | None,
    rate: str,
) -> Job:
    overrides = {**study.overrides, **variant.overrides, **own}
    planned = plan_run(study.recipe, variant.method, seed, overrides, directory, variant.axis)
    place = {
        "name": study.name,
        "variant": variant.name,
        "against": variant.against or study.against,
        "rate": rate,
        "program": program.read_text(encoding="utf-8") if program is not None else None,
    }
    command = planned.spec.command
    if program is not None:
        command = shlex.join(["polarstep", "study", program.name])
    tried = "".join(f", {key.split('.')[-1]}={value:g}" for key, value in own.items())
    return replace(
        planned,
        spec=replace(planned.spec, study=place, command=command),
        label=f"{variant.name}{tried}, seed {seed}",
        program=program,
    )


def unfinished(jobs: Sequence[Job], force: bool = False) -> list[Job]:
    """The runs that are still to be made or to be resumed; all of them with ``force``.

    A finished run with another config in its place is an error: its results are not this study's. So is
    a folder that cannot hold the runs.
    """
    for job in jobs:
        refuse_unwritable(job.directory / CONFIG, "--out")
    if force:
        return list(jobs)
    todo = []
    for job in jobs:
        state = state_of(job.directory)
        if state != "empty":
            found = RunSpec.load(job.directory)
            if found.config != job.spec.config:
                raise StorageError(
                    f"{job.directory} holds a run with other settings (`{found.command}`): give "
                    "another --out, or --force to replace the runs there"
                )
        if state != "finished":
            todo.append(job)
    return todo
