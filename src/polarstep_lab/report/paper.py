"""Our figures next to the paper's: by how much they differ, in which order methods come, and why.

Where a recipe is the paper's own setting, digits are compared. Where it asks the same question of
another model and other text, digits mean nothing; the order of the methods and what a step costs
relative to full-space Muon can still be compared, and are.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from polarstep_lab.methods import METHODS as ALL_METHODS
from polarstep_lab.report.estimates import Difference, Estimate
from polarstep_lab.report.published import Published, Setting, scaled
from polarstep_lab.report.reasons import REASONS, Facts
from polarstep_lab.report.rows import Row, Section

__all__ = ["Beside", "Line", "Note", "beside_the_paper"]

REFERENCE = "Muon (Nesterov)"
"""The method that costs are given relative to where models differ."""
_ALL = frozenset(("metric", "gflops"))
_SAME_COST = 5e-4  # as relative difference: the paper's figures have four decimals


@dataclass(frozen=True)
class Note:
    """A known difference: its letter, its topic and sentence, and the methods it is true of."""

    mark: str
    topic: str
    text: str
    methods: tuple[str, ...]


@dataclass(frozen=True)
class Line:
    """One method here and in the paper; ``difference`` only where digits can be compared."""

    row: Row
    published: Published
    difference: Difference | None
    place: int | None
    paper_place: int
    relative_gflops: float | None
    paper_relative_gflops: float | None
    marks: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the metric is further from the paper's than two standard errors."""
        return self.row.differs


@dataclass(frozen=True)
class Beside:
    """A section next to the paper."""

    comparable: bool
    summary: str
    order: str
    lines: tuple[Line, ...]
    notes: tuple[Note, ...]
    source: str


def beside_the_paper(section: Section) -> Beside | None:
    """The comparison of a section with Table 2; ``None`` where there is nothing to compare.

    One method alone has a place among none, and one seed of it no spread.
    """
    setting = scaled(section.recipe, section.benchmark)
    rows = _one_per_method(section, setting)
    if setting is None or not rows:
        return None
    comparable = any(row.paper for row in rows)
    scored = [row.metric for row in rows if row.metric]
    if len(scored) < 2 and not (comparable and scored and scored[0].n > 1):
        return None
    told = {
        row.method: _sentences(
            row,
            _wanted(row, setting) if comparable else _ALL,
            _data_of(row, section),
        )
        for row in rows
    }
    notes = _notes(rows, told)
    places = _places({row.method: row.metric.mean for row in rows if row.metric}, section)
    paper_places = _places({row.method: setting.rows[row.method].mean for row in rows}, section)
    ours = {row.method: row.gflops for row in rows if row.gflops}
    theirs = {row.method: setting.rows[row.method].gflops for row in rows}
    lines = tuple(
        Line(
            row,
            setting.rows[row.method],
            row.off_the_paper,
            places.get(row.method),
            paper_places[row.method],
            _relative(ours, row.method),
            _relative(theirs, row.method),
            tuple(note.mark for note in notes if row.method in note.methods),
        )
        for row in rows
    )
    summary = _summary(lines, section) if comparable else _not_comparable(section, setting)
    return Beside(comparable, summary, _order(lines, section), lines, notes, setting.source)


def _one_per_method(section: Section, setting: Setting | None) -> list[Row]:
    """The row of each method of Table 2: in the paper's setting, then with the most seeds."""
    chosen: dict[str, Row] = {}
    for row in sorted(section.rows, key=lambda r: (r.paper is None, -len(r.finished))):
        if setting and row.method in setting.rows:
            chosen.setdefault(row.method, row)
    return [chosen[method] for method in (setting.rows if setting else ()) if method in chosen]


def _data_of(row: Row, section: Section) -> str:
    """What a row was trained on, by its own records or by others that name the same shards.

    Records did not always say. Where two say different things of one pattern, neither speaks for a
    third.
    """
    own = [run.environment.get("data") for run in row.runs]
    others = [
        run.environment.get("data")
        for other in section.all_rows
        if other.config.get("data") == row.config.get("data")
        for run in other.runs
    ]
    known = {*filter(None, own)} or {*filter(None, others)}
    return str(known.pop()) if len(known) == 1 else ""


def _sentences(row: Row, wanted: Set[str], data: str) -> list[tuple[str, str]]:
    """What is known to differ for a row and bears on the figures that are wanted: topic, sentence."""
    method = next(method for method in ALL_METHODS if method.name == row.method)
    run = row.runs[0]
    device = str(run.environment.get("device", ""))
    facts = Facts(method, run.identity.benchmark, row.config, device, data)
    said = [(reason.topic, reason.say(facts)) for reason in REASONS if wanted & set(reason.about)]
    return [(topic, text) for topic, text in said if text]


def _notes(rows: Sequence[Row], told: Mapping[str, Sequence[tuple[str, str]]]) -> tuple[Note, ...]:
    """Every distinct sentence once, with a letter."""
    sentences = dict.fromkeys(sentence for row in rows for sentence in told[row.method])
    assert len(sentences) <= len(string.ascii_lowercase)
    return tuple(
        Note(mark, *sentence, tuple(row.method for row in rows if sentence in told[row.method]))
        for mark, sentence in zip(string.ascii_lowercase, sentences, strict=False)
    )


def _wanted(row: Row, setting: Setting) -> Set[str]:
    """Which figures of a row ask for a reason."""
    gflops, difference = setting.rows[row.method].gflops, row.off_the_paper
    wanted = set()
    if difference is not None and (difference.clear or difference.error is None):
        wanted.add("metric")
    if row.gflops and gflops and abs(row.gflops / gflops - 1) > _SAME_COST:
        wanted.add("gflops")
    return wanted


def _places(means: Mapping[str, float], section: Section) -> dict[str, int]:
    """1 for the best method, and so on."""
    ordered = sorted(means, key=lambda method: means[method], reverse=section.higher_is_better)
    return {method: place for place, method in enumerate(ordered, start=1)}


def _relative(gflops: Mapping[str, float | None], method: str) -> float | None:
    own, reference = gflops.get(method), gflops.get(REFERENCE)
    return own / reference if own and reference else None


def _summary(lines: Sequence[Line], section: Section) -> str:
    """How many methods agree with the paper, and how far off the others are."""
    judged = [line for line in lines if line.difference and line.difference.error is not None]
    if not judged:
        return "One seed has no spread: whether a difference from the paper is one cannot be told."
    agree = [line for line in judged if not line.differs]
    text = (
        f"{len(agree)} of {len(judged)} methods agree with the paper within two standard errors of "
        "the difference"
    )
    off = [line for line in judged if line.differs]
    if not off:
        return f"{text}."
    better = [line for line in off if (line.difference.value > 0) is section.higher_is_better]  # type: ignore[union-attr]
    directions = [
        f"{len(group)} {'is' if len(group) == 1 else 'are'} {word}"
        for group, word in ((better, "better"), ([x for x in off if x not in better], "worse"))
        if group
    ]
    return f"{text}; {' and '.join(directions)}."


def _not_comparable(section: Section, setting: Setting) -> str:
    return (
        f"Not comparable in digits: the paper's {section.metric_name.lower()} is that of another "
        f"model on other data ({setting.data}). What can be compared is the order of the methods and "
        f"the cost of a step relative to {REFERENCE}."
    )


def _order(lines: Sequence[Line], section: Section) -> str:
    """Which pairs of methods come in the paper's order, of those that the paper tells apart."""
    same, other, open_ = [], [], []
    for a, b in itertools.combinations([line for line in lines if line.row.metric], 2):
        paper = _minus_published(a.published, b.published)
        if not paper.clear:
            continue
        ours = a.row.metric.minus(b.row.metric)  # type: ignore[union-attr, arg-type]
        if not ours.clear:
            open_.append((a, b))
        elif (ours.value > 0) == (paper.value > 0):
            same.append((a, b))
        else:
            other.append((a, b))
    pairs = len(same) + len(other) + len(open_)
    if not pairs:
        return ""
    text = (
        f"Of {'the' if pairs > 1 else 'only'} {pairs} pair{'s' * (pairs > 1)} of methods that the "
        f"paper tells apart by more than two standard errors, {len(same) or 'none'} "
        f"come{'s' * (len(same) < 2)} in the same order here"
    )
    if open_:
        verb = "is" if len(open_) == 1 else "are"
        text += f", {len(open_)} {verb} not told apart by these seeds"
    if other:
        named = "; ".join(_better_first(a, b, section) for a, b in other)
        text += f", {len(other)} the other way round ({named})"
    return f"{text}."


def _better_first(a: Line, b: Line, section: Section) -> str:
    assert a.row.metric
    assert b.row.metric
    first = (a.row.metric.mean > b.row.metric.mean) is section.higher_is_better
    return (
        f"{a.row.method} before {b.row.method}"
        if first
        else f"{b.row.method} before {a.row.method}"
    )


def _minus_published(a: Published, b: Published) -> Difference:
    return Estimate(a.mean, a.std, a.seeds).minus(Estimate(b.mean, b.std, b.seeds))
