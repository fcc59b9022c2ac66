"""How the perplexity gap to full space changes with the tokens of a run and the width of the model.

    python benchmarks/scaling.py plan
    python benchmarks/scaling.py run TRAIN.bin VAL.bin --out scaling.jsonl --seconds 540
    python benchmarks/scaling.py run TRAIN.bin VAL.bin --width 2048
    python benchmarks/scaling.py table results/scaling/records.jsonl.gz

The loop is that of ``frontier.py``: a GPT of 5 layers, one pass, rate 0.014, with a schedule that is
stretched to the length of the run. Runs are made in the order of ``plan``. A run whose record is in
``--out``, or in ``results/frontier``, is not made again. For a study on another text,
``--frontier`` names records of ``frontier.py`` on that text, or a file that does not exist. With
``--seconds`` no run is started that would probably end later.

ℓ is the same part of the width at every width: a sixth for the deflated map, as with ``polar="auto"``,
and 27% for the low-rank map. Both sketch at every width, although ``auto`` takes full space for narrow
matrices. In the widest model, of 2048, it is an eighth, of the deflated map alone. Deflated maps with
ℓ = a twelfth, and of rank 48 with a smaller δ, have runs and are not run again; those of rank 48 are of
before the held-out text had halves, and in no table.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from differences import change
from frontier import (
    CHOICE,
    FULL,
    LENGTH,
    RATE,
    SEQUENCES,
    STEPS,
    WIDTH,
    append,
    by_identity,
    is_recorded,
    run,
    say_left_out,
    shape_of,
    shards,
)
from polarstep_lab import records
from polarstep_lab.estimates import student
from polarstep_lab.storage import read_lines
from which_text import text_of_shards

FRONTIER = Path(__file__).resolve().parent.parent / "results/frontier/records.jsonl.gz"
LOW_RANK, DEFLATED = "low-rank", "deflated"
SIXTH, EIGHTH, TWELFTH = "deflated-sixth", "deflated-eighth", "deflated-twelfth"
NAMES = (FULL, SIXTH, LOW_RANK)
"""The maps that are run at all lengths and widths but the largest."""
AT_WIDEST = (FULL, EIGHTH)
"""The maps that are run in the widest model, where a run takes two minutes and a half."""
WORDS = {
    SIXTH: "`Deflated`, ℓ = a sixth of the width, warm",
    EIGHTH: "`Deflated`, ℓ = an eighth of the width, warm",
    TWELFTH: "`Deflated`, ℓ = a twelfth of the width, warm",
    DEFLATED: "`Deflated`, rank 48, warm",
    LOW_RANK: "`LowRank`, h = 0, ℓ = 27% of the width",
}
IN_FRONTIER = {
    "flat-48-warm": DEFLATED,
    "lift-56-warm": TWELFTH,
    "lift-88-warm": EIGHTH,
    "lift-120-warm": SIXTH,
}
"""Names of the frontier's runs at width 768 that are maps of this study."""
LENGTHS = (375, 750, STEPS, 3000, 4440)
"""Steps of 16,384 tokens: 6.1, 12.3, 24.6, 49.2 and 72.7 million tokens."""
WIDTHS = (384, WIDTH, 1152)
WIDEST = 2048
SHAPES = (
    *((steps, WIDTH) for steps in LENGTHS),
    *((STEPS, width) for width in (*WIDTHS, WIDEST) if width != WIDTH),
)
"""Steps and width of the runs that tables and fits are made of."""
MILLISECONDS = {384: 10.0, WIDTH: 20.0, 1152: 36.0, WIDEST: 95.0}
"""Of a step of training on one H200: measured at 768, in proportion to the FLOPs elsewhere."""
START = 4.0
"""Seconds that a run takes beside its steps. The first run of a width compiles for 20 seconds more."""


@dataclass(frozen=True)
class Planned:
    """A run of the study."""

    steps: int
    width: int
    map: str
    seed: int

    @property
    def seconds(self) -> float:
        """The expected time of the run on one H200."""
        return START + self.steps * MILLISECONDS[self.width] / 1000

    @property
    def row(self) -> dict[str, Any]:
        """What the record of the run begins with."""
        whole = {"map": self.map, "seed": self.seed, "lr": RATE}
        return whole | {"steps": self.steps, "width": self.width}


def plan() -> Iterator[Planned]:
    """All runs, the most telling first: one seed of every point, then the other seeds."""
    points = [(steps, WIDTH) for steps in LENGTHS] + [(STEPS, width) for width in WIDTHS]
    order = [(375, WIDTH), (750, WIDTH), (3000, WIDTH), (STEPS, 1152), (STEPS, 384), (4440, WIDTH)]
    order = list(dict.fromkeys([*order, *points]))
    cheap = [(steps, width) for steps, width in order if steps * width <= STEPS * WIDTH]
    dear = [point for point in order if point not in cheap]
    for seeds, parts in (((0,), order), ((1, 2), cheap), ((1,), dear), ((2,), dear)):
        for seed in seeds:
            for steps, width in parts:
                for name in NAMES:
                    yield Planned(steps, width, name, seed)
    for seed in (0, 1, 2):
        for name in AT_WIDEST:
            yield Planned(STEPS, WIDEST, name, seed)


def maps(width: int) -> dict[str, Any]:
    """The maps of the study for a model of this width."""
    import polarstep as ps

    inner = ps.NewtonSchulz(4, "polar-express-sketch")
    ell = 208 * width // WIDTH
    low = ps.LowRank(ell - 8, 8, power=0, inner=inner, always_sketch=True)

    def lifted(part: int) -> ps.Deflated:
        options: dict[str, Any] = {"sketch": ps.Warm(), "inner": inner, "always_sketch": True}
        return ps.Deflated(ps.LowRank(width // part - 8, 8, **options), ps.NewtonSchulz(1, "flat"))

    return {
        FULL: ps.NewtonSchulz(5, "polar-express"),
        LOW_RANK: low,
        SIXTH: lifted(6),
        EIGHTH: lifted(8),
    }


def recorded(*paths: Path) -> list[dict[str, Any]]:
    """The records of this study in files of its own and of ``frontier.py``.

    The seed that chooses rates in the frontier is left out, as in its tables.
    """
    rows = []
    for path in paths:
        for row in _rows(path):
            row = row | {"map": IN_FRONTIER.get(row["map"], row["map"])}
            row.setdefault("width", WIDTH)
            if row["map"] in (FULL, *WORDS) and row["lr"] == RATE and row["seed"] != CHOICE:
                rows.append(row)
    return rows


def _rows(path: Path) -> list[dict[str, Any]]:
    """The runs that a script wrote, or those of a study's records."""
    if path.suffix != ".gz":
        return read_lines(path)
    return [records.flat(line) for line in records.read(path) if line["part"] == "runs"]


Unit = Literal["tokens", "width"]
Text = Literal["test", "perplexity"]
Gaps = dict[str, dict[tuple[int, int], dict[int, float]]]


def gaps(records: Iterable[Mapping[str, Any]], text: Text = "test") -> Gaps:
    """Perplexity against full space in percent, by map, then by steps and width, then by seed.

    ``text`` says whether it is that of the test text or that of all held-out text, which earlier runs
    have alone. Runs of other shapes than :data:`SHAPES` are left out: no table has a row for them, and a
    fit through them would be of something else than what its table shows.
    """
    found: dict[tuple[str, int, int], dict[int, float]] = {}
    shown = (row for row in records if text in row and shape_of(row) in SHAPES)
    for (name, seed, _, steps, width), row in by_identity(shown).items():
        found.setdefault((name, steps, width), {})[seed] = row[text]
    result: Gaps = {}
    for (name, steps, width), runs in sorted(found.items()):
        full = found.get((FULL, steps, width), {})
        both = sorted(set(runs) & set(full))
        if name != FULL and both:
            of_map = result.setdefault(name, {})
            of_map[steps, width] = {seed: 100 * (runs[seed] / full[seed] - 1) for seed in both}
    return result


@dataclass(frozen=True)
class Fit:
    """A line through gaps over the binary logarithm of x: the gap at ``middle``, and the slope.

    ``slope`` is in points of percent for each doubling, ``error`` its standard error, ``half`` half its
    95% t-interval; both are NaN with two points, which a line meets exactly. A line through means has
    ``pairs``, the line through the gaps of all pairs of runs, where some place has several.
    """

    gap: float
    slope: float
    error: float
    half: float
    middle: float
    n: int
    pairs: Fit | None = None

    def at(self, x: float) -> float:
        """The line's gap at x."""
        return self.gap + self.slope * math.log2(x / self.middle)

    @property
    def told(self) -> str:
        """The slope with half its interval, as ``+0.86 ± 0.46``."""
        text = f"{'−' if self.slope < 0 else '+'}{abs(self.slope):.2f}"
        return text if math.isnan(self.half) else f"{text} ± {self.half:.2f}"

    @property
    def tells(self) -> bool:
        """Whether zero is outside the interval of the slope."""
        return abs(self.slope) > self.half  # false for NaN

    @property
    def verdict(self) -> str:
        """Whether the gap closes, grows or neither; the line through all pairs has to agree."""
        if not self.tells or not (self.pairs is None or self.pairs.tells):
            return "no change can be told"
        return "grows" if self.slope > 0 else "closes"


def fit(points: Sequence[tuple[float, float]], middle: float) -> Fit | None:
    """Least squares over (x, gap); ``None`` without two different x."""
    if len({x for x, _ in points}) < 2:
        return None
    logs = [math.log2(x / middle) for x, _ in points]
    values = [gap for _, gap in points]
    center, mean = statistics.fmean(logs), statistics.fmean(values)
    spread = sum((x - center) ** 2 for x in logs)
    slope = sum((x - center) * (y - mean) for x, y in zip(logs, values, strict=True)) / spread
    gap = mean - slope * center
    error = half = math.nan
    if (freedom := len(points) - 2) > 0:
        left = sum((y - gap - slope * x) ** 2 for x, y in zip(logs, values, strict=True))
        error = math.sqrt(left / freedom / spread)
        half = student(freedom) * error
    return Fit(gap, slope, error, half, middle, len(points))


def without_one(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The smallest and the largest slope of a fit that leaves out all points of one x.

    Raises ``ValueError`` where fewer than three different x are left to leave out from.
    """
    places = sorted({x for x, _ in points})
    if len(places) < 3:
        raise ValueError(f"points at {len(places)} places: expected three or more")
    slopes = []
    for left_out in places:
        line = fit([point for point in points if point[0] != left_out], places[0])
        assert line is not None
        slopes.append(line.slope)
    return min(slopes), max(slopes)


def million(steps: float) -> float:
    """The tokens of so many steps, in millions."""
    return steps * SEQUENCES * LENGTH / 1e6


def over_tokens(found: Gaps, name: str) -> list[tuple[float, float]]:
    """(million tokens, gap) of every run of a map at width 768."""
    return [
        (million(steps), gap)
        for (steps, width), seeds in found.get(name, {}).items()
        for gap in seeds.values()
        if width == WIDTH
    ]


def over_width(found: Gaps, name: str) -> list[tuple[float, float]]:
    """(width, gap) of every run of a map on 24.6 million tokens."""
    return [
        (float(width), gap)
        for (steps, width), seeds in found.get(name, {}).items()
        for gap in seeds.values()
        if steps == STEPS
    ]


def means(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean gap at each x: seeds of one x are no evidence of how the gap changes with x."""
    found: dict[float, list[float]] = {}
    for x, gap in points:
        found.setdefault(x, []).append(gap)
    return [(x, statistics.fmean(values)) for x, values in sorted(found.items())]


def fits(found: Gaps, name: str) -> dict[Unit, Fit]:
    """The fits of a map's gaps over tokens and over width, where there are records for them.

    A line goes through the mean gap at each place, and has that through all pairs beside it: the first
    does not know how far seeds scatter, and the second takes seeds of one place for evidence of a slope.
    """
    runs: dict[Unit, tuple[list[tuple[float, float]], float]] = {
        "tokens": (over_tokens(found, name), million(STEPS)),
        "width": (over_width(found, name), float(WIDTH)),
    }
    both: dict[Unit, Fit] = {}
    for unit, (points, middle) in runs.items():
        if line := fit(means(points), middle):
            many = fit(points, middle) if len(points) > line.n else None
            both[unit] = replace(line, pairs=many)
    return both


def table(records: Iterable[Mapping[str, Any]], unit: Unit) -> Iterator[str]:
    """Markdown: the gap of each map at each length, or at each width, and the slope of its fit.

    Maps with runs at one length or width alone are left out.
    """
    found = gaps(records)
    names = [name for name in WORDS if unit in fits(found, name)]
    points = [(steps, WIDTH) for steps in LENGTHS]
    title = f"tokens, at width {WIDTH}"
    if unit == "width":
        points = [(STEPS, width) for width in (*WIDTHS, WIDEST)]
        title = f"width, after {million(STEPS):.1f}M tokens"
    yield f"| {title} | {' | '.join(WORDS[name] for name in names)} |"
    yield "|---|" + "--:|" * len(names)
    for steps, width in points:
        cells = [found[name].get((steps, width)) for name in names]
        if any(cells):
            x = str(width) if unit == "width" else f"{million(steps):.1f}M"
            made = [change(c.values()).told(unit="%") if c else "not run" for c in cells]
            yield f"| {x} | {' | '.join(made)} |"
    slopes = [_slope(fits(found, name)[unit]) for name in names]
    yield f"| change for each doubling | {' | '.join(slopes)} |"


def _slope(line: Fit) -> str:
    if math.isnan(line.half):
        return f"{line.told} points"
    many = f", over all pairs {line.pairs.told}" if line.pairs else ""
    return f"{line.told} points (standard error {line.error:.2f}){many}: {line.verdict}"


def make(options: argparse.Namespace) -> None:
    """Make the runs that are planned and not recorded."""
    begin = time.perf_counter()
    train, val = shards(options.train, options.val, max(LENGTHS), options.device)
    text = text_of_shards(options.train, options.val)
    for planned in plan():
        if options.seeds and str(planned.seed) not in options.seeds.split(","):
            continue
        if options.width not in (None, planned.width):
            continue
        if is_recorded(planned.row | text, recorded(options.out, options.frontier)):
            continue
        spent = time.perf_counter() - begin
        if options.seconds and spent + planned.seconds > options.seconds:
            print(
                f"{planned} would take {planned.seconds:.0f} s of {options.seconds - spent:.0f} s left"
            )
            return
        needed = planned.steps * SEQUENCES * LENGTH + 1
        polar = maps(planned.width)[planned.map]
        row = run(
            train[:needed],
            val,
            planned.map,
            planned.seed,
            RATE,
            planned.steps,
            planned.width,
            polar,
            timed=not options.untimed,
            text=text,
        )
        append(options.out, row)
        print(f"{json.dumps(row)}  {time.perf_counter() - begin - spent:.0f} s", flush=True)


def main() -> None:
    """The three commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan")
    train = commands.add_parser("run")
    train.add_argument("train", type=Path)
    train.add_argument("val", type=Path)
    train.add_argument("--seeds", default="", help="only these, as 0 or 1,2")
    train.add_argument("--width", type=int, help="only models of this width")
    train.add_argument("--seconds", type=float, help="start no run that would end later")
    train.add_argument("--device", default="cuda")
    train.add_argument(
        "--untimed", action="store_true", help="other runs share the GPU: leave out ms"
    )
    train.add_argument("--out", type=Path, default=Path("scaling.jsonl"))
    shown = commands.add_parser("table")
    shown.add_argument("records", type=Path)
    for command in (train, shown):
        command.add_argument(
            "--frontier", type=Path, default=FRONTIER, help="runs of frontier.py on the same text"
        )
    options = parser.parse_args()
    if options.command == "table":
        found = recorded(options.records, options.frontier)
        say_left_out(found, SHAPES)
        print("\n".join([*table(found, "tokens"), "", *table(found, "width")]))
    elif options.command == "run":
        make(options)
    else:
        total = 0.0
        known = recorded(FRONTIER)
        for planned in plan():
            if not is_recorded(planned.row, known):
                total += planned.seconds
                print(f"{total:6.0f} s  {planned}")


if __name__ == "__main__":
    main()
