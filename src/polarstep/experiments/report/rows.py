"""From run directories to rows: which runs belong together, and what they say together.

A *row* is a set of runs that differ in their seed alone: same recipe, same method, same complete
config. A *section* is a recipe with its rows, the ablations apart. Runs that diverged, failed, were
stopped or have not ended never enter a mean, and never disappear either: every row counts them.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from polarstep.experiments.ablations import AXES
from polarstep.experiments.records.archive import ARCHIVE
from polarstep.experiments.records.record import RunRecord, find_runs
from polarstep.experiments.report.published import (
    METHODS,
    Published,
    Setting,
    keeps_setting,
    published,
    published_ablation,
)
from polarstep.storage import StorageError

__all__ = [
    "AblationSet",
    "Difference",
    "Estimate",
    "Row",
    "Runs",
    "Section",
    "at_a_time",
    "collect",
    "ran_alone",
    "sections_of",
]

_SEEDS_TO_LIST = 4  # more commands than this are easier to read as a loop
STATUSES = ("finished", "diverged", "failed", "stopped", "unfinished")


@dataclass(frozen=True)
class Estimate:
    """Mean and standard deviation (n − 1 in the denominator) of ``n`` finite values."""

    mean: float
    std: float | None
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate | None:
        """The estimate of the finite ones among ``values``; ``None`` where there are none.

        >>> Estimate.of([1.0, 2.0, 3.0])
        Estimate(mean=2.0, std=1.0, n=3)
        """
        finite = [float(value) for value in values if math.isfinite(value)]
        if not finite:
            return None
        std = statistics.stdev(finite) if len(finite) > 1 else None
        return cls(statistics.fmean(finite), std, len(finite))

    def minus(self, other: Estimate) -> Difference:
        """The difference of two means with its standard error, (s₁²/n₁ + s₂²/n₂)^½.

        >>> Estimate(3.0, 0.6, 9).minus(Estimate(2.0, 0.8, 16)).error
        0.28284271247461906
        """
        error = None
        if self.std is not None and other.std is not None:
            error = math.sqrt(self.std**2 / self.n + other.std**2 / other.n)
        return Difference(self.mean - other.mean, error)


@dataclass(frozen=True)
class Difference:
    """A difference of means; its standard error is unknown where a side has a single value."""

    value: float
    error: float | None

    @property
    def clear(self) -> bool:
        """Whether the difference is more than two standard errors."""
        return self.error is not None and abs(self.value) > 2 * self.error


@dataclass(frozen=True)
class Row:
    """Runs that differ in their seed alone.

    Times are those of the runs that had their device to themselves (``alone``), where there are any.
    """

    label: str
    method: str
    runs: tuple[RunRecord, ...]
    paper: Published | None = None
    alone: tuple[RunRecord, ...] = ()

    @property
    def finished(self) -> tuple[RunRecord, ...]:
        """The runs whose metric counts."""
        return tuple(run for run in self.runs if run.status == "finished")

    @property
    def counts(self) -> dict[str, int]:
        """How many runs ended in which way, the ways that occur only."""
        counter: Counter[str] = Counter(run.status for run in self.runs)
        return {status: counter[status] for status in STATUSES if counter[status]}

    @property
    def metric(self) -> Estimate | None:
        """The final metric over the seeds that finished."""
        return Estimate.of(run.result.value for run in self.finished if run.result)

    @property
    def gflops(self) -> float | None:
        """Optimizer GFLOPs of one step, from the ledger; a function of the config alone."""
        estimate = self._over_results("optimizer_gflops_per_step")
        return estimate.mean if estimate else None

    @property
    def optimizer_ms(self) -> Estimate | None:
        """Measured milliseconds of one optimizer step; ``None`` across different devices."""
        return self._timing("optimizer_ms_per_step")

    @property
    def step_ms(self) -> Estimate | None:
        """Measured milliseconds of one whole training step; ``None`` across different devices."""
        return self._timing("step_ms")

    @property
    def seconds(self) -> Estimate | None:
        """Measured wall-clock seconds of a whole run; ``None`` across different devices."""
        if len(self.devices) != 1:
            return None
        return Estimate.of(run.seconds for run in self.alone or self.finished)

    @property
    def config(self) -> Mapping[str, Any]:
        """The config that all runs of the row share, but for the seed."""
        return self.runs[0].identity.config

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices these runs were measured on."""
        return tuple(sorted({device_of(run) for run in self.runs}))

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that repeat these runs, in order of seed, each once.

        Many seeds of one command become a loop over them.
        """
        commands = [run.identity.command for run in self.runs if run.identity.command]
        seeds = [str(run.identity.seed) for run in self.runs if run.identity.command]
        looped = {
            re.sub(rf"--seed {seed}(?= |$)", "--seed $seed", command)
            for seed, command in zip(seeds, commands, strict=True)
        }
        if len(commands) > _SEEDS_TO_LIST and len(looped) == 1:
            first, last = self.runs[0].identity.seed, self.runs[-1].identity.seed
            gapless = [str(seed) for seed in range(first, last + 1)] == seeds
            listed = f"$(seq {first} {last})" if gapless else " ".join(seeds)
            return (f"for seed in {listed}; do {looped.pop()}; done",)
        return tuple(dict.fromkeys(commands))

    def _timing(self, name: str) -> Estimate | None:
        return self._over_results(name, self.alone) if len(self.devices) == 1 else None

    def _over_results(self, name: str, chosen: Sequence[RunRecord] = ()) -> Estimate | None:
        """Over the chosen or the finished runs, or those that at least ended where none finished."""
        runs = chosen or self.finished or self.runs
        return Estimate.of(getattr(run.result, name) for run in runs if run.result)


@dataclass(frozen=True)
class AblationSet:
    """One setting varied and all else held: a row for each of its values.

    ``base`` is the row with nothing varied, what the others are compared with: one of ``rows``, or
    the method's row of the comparison where no value of this axis is the recipe's own.
    """

    axis: str
    method: str
    rows: tuple[Row, ...]
    values: tuple[int | float | str, ...]
    base: Row | None = None

    def difference(self, row: Row) -> Difference | None:
        """How far the metric of a row is from that of the base."""
        if self.base is None or row is self.base or not row.metric or not self.base.metric:
            return None
        return row.metric.minus(self.base.metric)

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers, to be drawn on an axis."""
        return are_numbers(self.values)


@dataclass(frozen=True)
class Section:
    """All runs of one recipe."""

    recipe: str
    benchmark: str
    rows: tuple[Row, ...]
    ablations: tuple[AblationSet, ...]
    paper: Setting | None

    @property
    def slug(self) -> str:
        """A name for files and anchors."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.benchmark}-{self.recipe}".lower()).strip("-")

    @property
    def metric_name(self) -> str:
        """What the final metric is called."""
        return "Test accuracy" if self.benchmark == "cifar10" else "Validation perplexity"

    @property
    def higher_is_better(self) -> bool:
        """Which way the final metric improves."""
        return self.benchmark == "cifar10"

    @property
    def all_rows(self) -> tuple[Row, ...]:
        """The rows of the comparison, then those of the ablations."""
        return (*self.rows, *(row for ablation in self.ablations for row in ablation.rows))

    def best(self, rows: Sequence[Row]) -> Row | None:
        """The row with the best mean metric."""
        scored = [(row.metric.mean, row) for row in rows if row.metric]
        choose = max if self.higher_is_better else min
        return choose(scored, key=lambda pair: pair[0])[1] if scored else None


@dataclass(frozen=True)
class Runs:
    """The records found, and what kept others from being used."""

    records: tuple[RunRecord, ...]
    names: Mapping[Path, str]
    notices: tuple[str, ...] = field(default=())


def collect(paths: Sequence[Path | str]) -> Runs:
    """Read every run at or below ``paths``, from directories and archives alike.

    A directory that cannot be read becomes a notice: the other runs still deserve their report.
    Names are relative to the path that was asked for, so that a report moves between machines.
    """
    records, names, notices = [], {}, []
    for root in map(Path, paths):
        for directory in find_runs([root]):
            if directory in names:
                continue
            top = root.parent if root.name == ARCHIVE else root
            parts = (top.name, *directory.relative_to(root).parts)
            name = "/".join(part for part in parts if part and part != ARCHIVE)
            try:
                record = RunRecord.load(directory)
            except (StorageError, TypeError, KeyError) as error:
                reason = str(error).replace(str(directory), name)
                notices.append(f"{name} is left out: {reason}")
                continue
            records.append(record)
            names[directory] = name
    order = sorted(records, key=lambda run: (run.identity.seed, names[run.directory]))
    return Runs(tuple(order), names, tuple(notices))


def sections_of(runs: Runs) -> tuple[tuple[Section, ...], tuple[str, ...]]:
    """Group the runs into sections, and say what had to be left out on the way."""
    notices: list[str] = []
    alone = ran_alone(runs.records)
    sections = []
    for (benchmark, recipe), members in _grouped(
        runs.records, lambda run: (run.identity.benchmark, run.identity.recipe)
    ):
        setting = published(recipe, benchmark)
        plain = [run for run in members if run.identity.ablation is None]
        rows = _rows(plain, runs, notices, setting, alone)
        ablations = [
            _ablation(axis, method, group, runs, notices, alone)
            for (axis, method), group in _grouped(
                [run for run in members if run.identity.ablation is not None],
                lambda run: (run.identity.ablation.axis, run.identity.method),
            )
        ]
        ablations = sorted(_with_bases(rows, ablations), key=_place_of_axis)
        sections.append(Section(recipe, benchmark, rows, tuple(ablations), setting))
    # The language model first, as in the paper.
    sections.sort(key=lambda section: (section.benchmark != "nanogpt", section.recipe))
    return tuple(sections), tuple(notices)


def are_numbers(values: Iterable[object]) -> bool:
    """Whether all of ``values`` can be put on an axis."""
    return all(isinstance(value, int | float) for value in values)


def device_of(run: RunRecord) -> str:
    """What a run was measured on; on a CPU that includes how many threads it had."""
    environment = run.environment
    name = str(environment.get("device_name") or environment.get("device") or "unknown device")
    threads = environment.get("threads")
    on_cpu = str(environment.get("device", "")).startswith("cpu")
    return f"{name}, {threads} thread{'s' * (threads != 1)}" if on_cpu and threads else name


def at_a_time(runs: Iterable[RunRecord]) -> int:
    """How many of ``runs`` were under way at once."""
    spans = [span for run in runs if (span := _span(run))]
    moments = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return max(1, most)


def ran_alone(runs: Iterable[RunRecord]) -> frozenset[Path]:
    """The directories of the runs during which no other was under way on the same device."""
    alone = set()
    latest: dict[str, tuple[float, Path]] = {}  # where a device's runs end so far, and the last one
    spans = [(span, run) for run in runs if (span := _span(run))]
    for (start, end), run in sorted(spans, key=lambda item: (item[0], str(item[1].directory))):
        until, last = latest.get(device_of(run), (-math.inf, run.directory))
        if start < until:
            alone.discard(last)
        else:
            alone.add(run.directory)
        latest[device_of(run)] = max((until, last), (end, run.directory))
    return frozenset(alone)


def _span(run: RunRecord) -> tuple[float, float] | None:
    """When a run was under way, without its first second: starts are recorded to the second."""
    try:
        began = datetime.fromisoformat(str(run.environment.get("started"))).timestamp()
    except ValueError:
        return None
    return (began + 1, began + run.seconds) if run.seconds > 1 else None


def setting_of(run: RunRecord) -> str:
    """What determines a run apart from its seed, as a string to compare.

    On which device and how often it logged is not part of it; times are kept apart by device.
    """
    config = {key: value for key, value in run.identity.config.items() if key != "seed"}
    runtime = config.get("runtime")
    if isinstance(runtime, Mapping):
        config["runtime"] = {key: runtime.get(key) for key in ("precision", "compile")}
    return json.dumps(config, sort_keys=True, default=str)


def _rows(
    members: Sequence[RunRecord],
    runs: Runs,
    notices: list[str],
    setting: Setting | None,
    alone: Set[Path],
) -> tuple[Row, ...]:
    groups = _grouped(members, lambda run: (run.identity.method, setting_of(run)))
    times = Counter(method for (method, _), _ in groups)
    rows = []
    for (method, _), group in groups:
        label = method
        if times[method] > 1:  # the same method twice: say by which overrides it differs
            label = f"{method}, {_overrides(group[0].identity.overrides)}"
        same = all(keeps_setting(run.identity.overrides) for run in group)
        paper = setting.rows.get(method) if setting and same else None
        rows.append(_row(label, method, _one_per_seed(group, label, runs, notices), paper, alone))
    rank = {method: index for index, method in enumerate(METHODS)}
    rows.sort(key=lambda row: (rank.get(row.method, len(rank)), row.label))
    return tuple(rows)


def _row(
    label: str,
    method: str,
    seeds: tuple[RunRecord, ...],
    paper: Published | None,
    alone: Set[Path],
) -> Row:
    timed = tuple(run for run in seeds if run.status == "finished" and run.directory in alone)
    return Row(label, method, seeds, paper, timed)


def _ablation(
    axis: str,
    method: str,
    members: Sequence[RunRecord],
    runs: Runs,
    notices: list[str],
    alone: Set[Path],
) -> AblationSet:
    values = {run.identity.ablation.value for run in members if run.identity.ablation}
    known = [str(value) for a in AXES if a.name == axis for value in (*a.cifar10, *a.nanogpt)]
    ordered = (
        sorted(values)
        if are_numbers(values)
        else sorted(values, key=lambda value: (_place(str(value), known), str(value)))
    )
    rows, kept = [], []
    for value in ordered:
        group = [r for r in members if r.identity.ablation and r.identity.ablation.value == value]
        for number, (_, same) in enumerate(_grouped(group, setting_of)):
            label = f"{axis} = {value}" + (f" ({number + 1})" if number else "")
            paper = published_ablation(group[0].identity.recipe, method, axis, value)
            if not keeps_setting(group[0].identity.overrides):
                paper = None
            seeds = _one_per_seed(same, label, runs, notices)
            rows.append(_row(label, method, seeds, paper, alone))
            kept.append(value)
    return AblationSet(axis, method, tuple(rows), tuple(kept))


def _place_of_axis(ablation: AblationSet) -> tuple[int, str, str]:
    """The order in which ``polarstep list`` has the axes."""
    place = _place(ablation.axis, [axis.name for axis in AXES])
    return place, ablation.axis, ablation.method


def _place(item: str, items: Sequence[str]) -> int:
    return items.index(item) if item in items else len(items)


def _with_bases(rows: Sequence[Row], ablations: Sequence[AblationSet]) -> list[AblationSet]:
    """Find the base of each ablation: the config in which the axes and the comparison meet.

    With the recipe's own value on it, every axis runs the same config. No list of defaults is
    needed, and none can be wrong.
    """
    based = []
    for ablation in ablations:
        plain = [row for row in rows if row.method == ablation.method]
        others = [o for o in ablations if o is not ablation and o.method == ablation.method]
        elsewhere = Counter(
            setting_of(row.runs[0]) for group in (plain, *(o.rows for o in others)) for row in group
        )
        own = [row for row in ablation.rows if setting_of(row.runs[0]) in elsewhere]
        base = own[0] if len(own) == 1 else None
        if base is None and not own and plain:
            most = max(plain, key=lambda row: elsewhere[setting_of(row.runs[0])])
            only = len(plain) == 1 or elsewhere[setting_of(most.runs[0])] > 1
            base = most if only else None
        based.append(replace(ablation, base=base))
    return based


def _one_per_seed(
    group: Sequence[RunRecord], label: str, runs: Runs, notices: list[str]
) -> tuple[RunRecord, ...]:
    """One run for each seed, finished ones first: counting a seed twice would shrink the spread."""
    kept: dict[int, RunRecord] = {}
    for run in sorted(group, key=lambda run: (run.identity.seed, run.status != "finished")):
        other = kept.setdefault(run.identity.seed, run)
        if other is not run:
            notices.append(
                f"{label}: seed {run.identity.seed} was run twice with the same config; "
                f"{runs.names[run.directory]} is left out for {runs.names[other.directory]}"
            )
    return tuple(kept.values())


def _overrides(overrides: Mapping[str, Any]) -> str:
    shown = [f"{key}={value}" for key, value in sorted(overrides.items()) if key != "seed"]
    return ", ".join(shown) or "recipe's own settings"


def _grouped(items: Iterable[RunRecord], key: Any) -> list[tuple[Any, list[RunRecord]]]:
    """Items by key, keys in sorted order, items in the order given."""
    groups: dict[Any, list[RunRecord]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return sorted(groups.items())
