"""The ablations of ``nanogpt-small``: one setting changed at a time, against the recipe's own value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from differences import Change, paired, percent
from pages.claims.short_runs import FAST, best, by_rate
from pages.claims.words import claim
from pages.records import long_run as study
from pages.records.costs import Applied, applied
from pages.records.runs import FULL, SKETCHED, accuracy, tokens_of, values

FOLDER, RECIPE = "results/gpt-ablations", "nanogpt-small"
PAPERS = {"power": 1, "keep": 1, "solver": "quintic"}
"""The paper's sketch, among runs at several rates."""


@dataclass(frozen=True)
class Axis:
    """Values of one setting, each with its words, and the value that the recipe has."""

    name: str
    words: Mapping[Any, str]
    title: str
    recipe: str
    method: str = SKETCHED

    def tests(self, value: Any) -> dict[int, float]:
        """Test perplexity by seed with this value; with ``None`` that of the recipe itself."""
        axis = (None, None) if value is None else (self.name, value)
        return _tests(self.method, *axis)

    def changes(self) -> dict[Any, Change]:
        """What each value changes against the recipe's own, over the seeds that both have."""
        return {value: paired(self.tests(value), self.tests(None)) for value in self.words}


@cache
def _tests(method: str, axis: str | None = None, value: Any = None) -> dict[int, float]:
    return values(FOLDER, RECIPE, method, axis, value)


_SOLVERS = {
    "polar-express": "PolarExpress",
    "empirical": "Jordan's coefficients",
    "cubic": "the cubic",
}
RANK = Axis("rank", {50: "50", 100: "100", 400: "400"}, "rank", "200")
STEPS = Axis("steps", {1: "one", 3: "three", 5: "five", 9: "nine"}, "steps of the solver", "seven")
SOLVER = Axis("solver", _SOLVERS, "solver in the sketch", "quintic")
FULL_SPACE = Axis("solver", _SOLVERS, "solver in full space", "quintic", FULL)
LENGTH = Axis("sequence-length", {512: "512", 2048: "2048"}, "tokens of a sequence", "1024")
POWER = Axis("power", {0: "h = 0", 0.5: "h = ½", 2: "h = 2"}, "power iterations", "h = 1")
KEEP = Axis("keep", {2: "two", 4: "four", 8: "eight"}, "steps with one basis", "one")
SKETCH = Axis(
    "sketch",
    {
        "gaussian-fast": "h = 0, four inner steps",
        "kept-fast": "the same, a basis for four steps",
        "warm": "warm",
        "warm-fast": "warm, four inner steps",
    },
    "sketch",
    "Gaussian",
)
AXES = (RANK, STEPS, SOLVER, FULL_SPACE, LENGTH, POWER, KEEP, SKETCH)


def basis(changes: Iterable[Change]) -> str:
    """On how many seeds and tokens differences rest."""
    (pairs,) = {each.pairs for each in changes}
    return f"n = {pairs}, {tokens_of(RECIPE) / 1e6:.1f}M tokens"


def _told(axis: Axis, pattern: str) -> str:
    """The change with every value by ``pattern``, and on what it rests."""
    changes = axis.changes()
    each = [f"{found.text(1)} {pattern.format(axis.words[v])}" for v, found in changes.items()]
    return f"{', '.join(each)} (test perplexity, {basis(changes.values())})"


@claim
def rank_ablation() -> str:
    """Whether perplexity falls from each rank to twice that rank, as the paper has it."""
    ranks = {value: RANK.tests(value) for value in RANK.words} | {200: RANK.tests(None)}
    steps = [(low, 2 * low) for low in (50, 100, 200)]
    changes = [paired(ranks[high], ranks[low]) for low, high in [*steps, (50, 200)]]
    told = [
        f"{found.text(1)} from {low} to {high}"
        for found, (low, high) in zip(changes[:-1], steps, strict=True)
    ]
    return f"{', '.join(told)}; {changes[-1].text(1)} from 50 to 200 (test perplexity, {basis(changes)})"


@claim
def rank_and_tokens() -> str:
    """What full space gains on rank 200, in these runs and in the long ones."""
    short = percent(_tests(FULL), _tests(SKETCHED))
    long = percent(study.tests("muon"), study.tests("rand-muon"))
    return (
        f"with seven quintic steps in full space, which is rank 768, test perplexity changes by "
        f"{short.told(unit='%')} against rank 200 here, and by {long.told(unit='%')} after "
        f"{study.million_tokens():.1f}M tokens"
    )


@claim
def step_ablation() -> str:
    """What more and fewer steps of the inner solver change against the recipe's seven."""
    return f"against {STEPS.recipe}: {_told(STEPS, 'with {}')}"


@claim
def solver_ablation() -> str:
    """Whether three solvers are alike in the sketch and the cubic behind them, as the paper has it."""
    jordan = paired(SOLVER.tests("empirical"), SOLVER.tests("polar-express"))
    return (
        f"against the {SOLVER.recipe}: {_told(SOLVER, 'with {}')}. Jordan's coefficients against "
        f"PolarExpress: {jordan.text(1)} (n = {jordan.pairs})"
    )


@claim
def solver_full_space() -> str:
    """The solvers in full space, against the recipe's seven quintic steps."""
    return f"against the {FULL_SPACE.recipe}: {_told(FULL_SPACE, 'with {}')}"


@claim
def solver_and_rate() -> str:
    """What the quintic gains by a lower rate alone; judged by the validation text."""
    rates = by_rate(SKETCHED, **PAPERS)
    found = paired(rates[best(rates)], rates[0.03])
    return (
        f"at {best(rates):g} in place of the recipe's 0.03, the best of seven rates, the quintic itself "
        f"changes by {found.text(1)} (validation perplexity of earlier runs, the rate chosen on the "
        f"same seeds, {basis([found])})"
    )


@claim
def power_and_rate() -> str:
    """No power iterations against h = 1, each at the best of its rates; by the validation text."""
    none, one = by_rate(SKETCHED, **FAST), by_rate(SKETCHED, **PAPERS)
    found = paired(none[best(none)], one[best(one)])
    return (
        f"with the best of seven rates for each it is {found.text(1)} for h = 0 with four inner steps "
        f"against h = 1 (validation perplexity of earlier runs, {basis([found])})"
    )


@claim
def length_ablation() -> str:
    """Sequences of half and of twice the recipe's length, with as many tokens in all."""
    return f"against {LENGTH.recipe}: {_told(LENGTH, 'with {}')}"


@claim
def power_ablation() -> str:
    """What power iterations change against the paper's h = 1."""
    return f"against {POWER.recipe}: {_told(POWER, 'with {}')}"


@claim
def keep_ablation() -> str:
    """What it costs to keep a basis for several steps."""
    return f"against a new one at every step: {_told(KEEP, 'with one for {} steps')}"


@claim
def ablation_intervals() -> str:
    """How many intervals the figure of ablations has, and how many leave out zero."""
    changes = [found for axis in AXES for found in axis.changes().values()]
    return f"{sum(found.clear for found in changes)} of the {len(changes)} intervals leave out zero"


@claim
def warm_loss() -> str:
    """What a warm sketch costs against the paper's, at one rate."""
    gpt = SKETCH.changes()["warm"]
    cifar = paired(accuracy(SKETCHED, "sketch", "warm"), accuracy(SKETCHED))
    return (
        f"{gpt.text(1)} against the paper's (test perplexity, {basis([gpt])}). On CIFAR-10 its accuracy "
        f"is {cifar.text(2)} points (n = {cifar.pairs})"
    )


def _on_momentum(name: str) -> Applied:
    """γ of a map of ``LowRank`` on recorded momentum."""
    (row,) = (
        each
        for each in applied()
        if each.name == name and each.matrices.startswith("recorded momentum")
    )
    return row


@claim
def warm_gamma() -> str:
    """γ of a warm sketch beside γ of new ones."""
    names = {"warm": "a warm sketch", "Gaussian h=0": "h = 0", "the paper's": "the paper's sketch"}
    rows = {words: _on_momentum(name) for name, words in names.items()}
    median = ", ".join(f"{row.median:.3f} with {words}" for words, row in rows.items())
    largest = ", ".join(f"{row.largest:.3f}" for row in rows.values())
    (matrices,) = {row.matrices for row in rows.values()}
    return f"the median γ is {median}, and the largest {largest} ({matrices})"


@claim
def gamma_and_training() -> str:
    """The order of the fast maps in training, beside that of γ."""
    words = {
        "gaussian-fast": "h = 0",
        "kept-fast": "h = 0 and a basis for four steps",
        "warm-fast": "the warm sketch",
    }
    names = ("Gaussian h=0", "Gaussian h=0, kept 4 steps", "warm")
    rows = dict(zip(words, map(_on_momentum, names), strict=True))
    changes = SKETCH.changes()

    gammas = [
        tuple(row.median for row in rows.values()),
        tuple(row.largest for row in rows.values()),
    ]
    median, largest = (", ".join(f"{gamma:.3f}" for gamma in each) for each in gammas)
    worst = max(words, key=lambda sketch: changes[sketch].value)
    most = [each[list(words).index(worst)] == max(each) for each in gammas]
    has = {(True, True): "has", (False, False): "has not"}.get((most[0], most[1]), "has one of")
    told = ", ".join(f"{changes[sketch].text(1)} with {word}" for sketch, word in words.items())
    return (
        "On a GPT these maps, which have four inner steps, change test perplexity against the paper's "
        f"map, which has h = 1 and seven quintic steps, by {told} ({basis(changes.values())}, one rate "
        f"for all). Their median γ on recorded momentum is {median}, and their largest {largest}: the "
        f"map with the highest mean perplexity {has} the highest of these."
    )
