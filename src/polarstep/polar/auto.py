"""The map for each shape and device, chosen by an estimate of what a step costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from polarstep.polar.base import Carry, PolarMap
from polarstep.polar.containing import Containing
from polarstep.polar.cost import adamw_seconds, figures_of, seconds
from polarstep.polar.deflated import Deflated
from polarstep.polar.finders import Warm
from polarstep.polar.low_rank import LowRank
from polarstep.polar.newton_schulz import NewtonSchulz
from polarstep.torch_compile import constant

__all__ = ["Auto", "Budget"]

Budget = Literal["full", "balanced", "cheap"]

# A model has a dozen layers or more, with one to four matrices of a shape in each. These matrices are
# one bucket, whose launches they share. A map does not know how many there are: the fewer they are, the
# less a sketch saves, so it has to pay for a dozen.
MATRICES = 12
# A map with fewer directions than full space must save a tenth of the time.
WORTH = 0.9
# "cheap" is a step within this many times the time of AdamW.
CHEAP = 1.15
# ℓ is a part of the short side, rounded up. For the low-rank map a quarter, as in the paper's
# experiments, and at most 256 columns, from where on sketches get dear. For the deflated map a sixth: in
# runs of 73M tokens it ended level with full space, and a twelfth, which takes 5% less time on an H200,
# a percent behind on each of three seeds. From 1536 rows on it stays at 256 columns, until these are an
# eighth, which ended half a percent behind full space at widths of 768 and 2048.
QUARTER, SIXTH, EIGHTH = 4, 6, 8
NARROW, WIDEST = 256, 2048
# The widths of the narrowest and of the widest model that was trained with the deflated map.
NARROWEST_TRAINED, TRAINED = 384, 2048
OVERSAMPLE = 8


@dataclass(frozen=True)
class Auto(Containing):
    """The cheapest map that is expected to train as well as the budget asks, for each shape.

    Small matrices are not worth a sketch, and large ones are. Which is which depends on the device,
    and is decided by an estimate of the time of a whole step (:mod:`polarstep.polar.cost`) for a dozen
    matrices of the shape. ``print(optimizer.routes)`` shows the choice for every parameter.
    Where :class:`LowRank` by itself would not sketch a shape, a sketched map that is chosen has
    ``always_sketch=True``.

    On a GPT of 11 layers × 768 the deflated map ended 0.1% above the perplexity of full space after
    73M tokens (± 0.7, three seeds, ``results/long-run``), and the paper's low-rank map 11% above it
    (± 1.5). From 2048 rows on ℓ is an eighth of them, with which a GPT of 5 layers × 2048 ended 0.5%
    above full space after 25M tokens (± 1.6, three seeds, ``results/scaling``). No model wider than 2048
    or narrower than 384 was trained, and routes of such matrices say so. ``docs/frontier.md`` has other
    widths and ranks.

    Args:
        budget: ``"balanced"``: full space (five PolarExpress steps), or :class:`Deflated` with a warm
            sketch and one step, whichever is cheaper. ℓ is a sixth of the short side or 256, if that
            is less, and never less than an eighth (up to 2048 columns).
            ``"full"``: full space for every shape. ``"cheap"``: the best of these two and a low-rank
            map (h = 0, ℓ a quarter of the short side, at most 256) that takes at most 1.15 times the
            time of AdamW, as the low-rank map does from 4096 rows on; the cheapest of the three where
            none does.

    >>> Auto().on(64, 64, torch.device("cpu"))
    NewtonSchulz(steps=5, coefficients='polar-express', delta='frobenius', dtype=None, form='auto')
    >>> type(Auto().on(768, 3072, torch.device("cpu"))).__name__
    'Deflated'
    """

    budget: Budget = "balanced"

    def __post_init__(self) -> None:
        if self.budget not in get_args(Budget):
            raise ValueError(
                f"budget={self.budget!r}: expected one of {', '.join(get_args(Budget))}"
            )

    @property
    def contained(self) -> PolarMap:
        """A map with all the carries and random numbers that a map of this budget may have."""
        return FULL if self.budget == "full" else DEFLATED[WIDEST, False]

    @property
    def ignores_zeros(self) -> bool:
        """Whether full space is the only choice; a sketch depends on the shape."""
        return self.contained.ignores_zeros

    def resumes(self, carry: Carry, m: int, n: int) -> bool:
        """Whether the chosen map can continue; from an empty carry only if no map has any."""
        return super().resumes(carry, m, n) if carry else not self.carries

    def inside(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The map that is chosen for m×n matrices on ``device``."""
        name, always, _ = _choice(self.budget, m, n, device)
        return _map(name, m, n, always)

    def on(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The map that is chosen for m×n matrices on ``device``."""
        return self.inside(m, n, device)

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """The chosen map, and why."""
        device = device or torch.device("cpu")
        name, always, why = _choice(self.budget, m, n, device)
        return f"{_map(name, m, n, always).describe(m, n, device)}; auto: {why}"


FULL = NewtonSchulz(5, "polar-express")
INNER = NewtonSchulz(4, "polar-express-sketch")
WIDTHS = (*range(16, NARROW, 16), *range(NARROW, WIDEST + 1, 64))
# The maps below are listed by ℓ, and by whether they sketch every shape.
KINDS = [(width, always) for width in WIDTHS for always in (False, True)]
LOW_RANK = {
    (width, always): LowRank(
        width - OVERSAMPLE, OVERSAMPLE, power=0, inner=INNER, always_sketch=always
    )
    for width, always in KINDS
}
DEFLATED = {
    kind: Deflated(replace(LOW_RANK[kind], power=1, sketch=Warm()), NewtonSchulz(1, "flat"), FULL)
    for kind in KINDS
}


def _map(name: str, m: int, n: int, always: bool = False) -> PolarMap:
    if name == "full":
        return FULL
    if name == "deflated":
        return DEFLATED[_deflated_width(min(m, n)), always]
    return LOW_RANK[_part(min(m, n), QUARTER), always]


def _deflated_width(short: int) -> int:
    """ℓ of the deflated map: a sixth of the short side, from 1536 rows on 256, from 2048 an eighth."""
    if short <= NARROW * EIGHTH:
        return _part(short, SIXTH)
    return min(WIDEST, -(-short // (64 * EIGHTH)) * 64)


def _part(short: int, part: int) -> int:
    """A ``part``-th of the short side, rounded up to a multiple of 16, and at most 256."""
    return min(NARROW, -(-short // (16 * part)) * 16)


def _sketching(name: str, m: int, n: int, device: torch.device) -> PolarMap:
    """The map called ``name``, with ``always_sketch`` where it would not sketch m×n matrices by itself.

    A map's own rule on which shapes to sketch is for maps that a user gives. Here the estimate decides.
    """
    polar = _map(name, m, n)
    return polar if polar.on(m, n, device) is polar else _map(name, m, n, always=True)


# A dict, as torch.compile traces through functools.cache. Optimizers ask at every step.
_CHOICES: dict[tuple[Budget, int, int, torch.device], tuple[str, bool, str]] = {}


@constant
def _choice(budget: Budget, m: int, n: int, device: torch.device) -> tuple[str, bool, str]:
    """``name`` and ``always`` of :func:`_map` for m×n matrices on ``device``, and the reason.

    Not the map itself: torch.compile keeps a constant only if it is made of strings and numbers.
    """
    key = (budget, m, n, device)
    if key not in _CHOICES:
        name, why = _chosen(budget, m, n, device)
        _CHOICES[key] = (name, _sketching(name, m, n, device) is not _map(name, m, n), why)
    return _CHOICES[key]


def _chosen(budget: Budget, m: int, n: int, device: torch.device) -> tuple[str, str]:
    if budget == "full" or min(m, n) == 0:
        return "full", "budget full" if budget == "full" else "empty"
    # From the best to the worst.
    names = ("full", "deflated") if budget == "balanced" else ("full", "deflated", "low-rank")
    maps = {name: _sketching(name, m, n, device) for name in names}
    # Where ℓ is the whole short side there is nothing to sketch.
    maps = {name: polar for name, polar in maps.items() if polar.on(m, n, device) is polar}
    if len(maps) == 1:
        return "full", f"ℓ={_deflated_width(min(m, n))} ≥ {min(m, n)}"
    on = figures_of(device)
    times = {name: seconds(polar, m, n, on, MATRICES) for name, polar in maps.items()}
    adamw = adamw_seconds(m, n, on, MATRICES)
    for name, time in times.items():
        if budget == "cheap" and time <= CHEAP * adamw:
            return name, f"about {time / adamw:.2f} × AdamW"
    best, shortest = "full", times["full"]
    for name, time in times.items():
        if time < WORTH * shortest:
            best, shortest = name, time
    if best == "full":
        ratio = min(time for name, time in times.items() if name != "full") / shortest
        margin = ", and has to save a tenth" if ratio < 1 else ""
        return best, f"a sketch would take {ratio:.2f} × as long{margin}"
    share = f"about {shortest / times['full']:.2f} × full space"
    if best == "deflated" and min(m, n) > TRAINED:
        part = _deflated_width(min(m, n)) / min(m, n)
        tried = f"tried in training with {1 / EIGHTH:.1%} of {TRAINED}"
        share += f"; ℓ is {part:.1%} of the short side, {tried}"
    if best == "deflated" and min(m, n) < NARROWEST_TRAINED:
        share += f"; tried in training from width {NARROWEST_TRAINED} on"
    if budget == "cheap":
        share += f"; no map is within {CHEAP} × AdamW, this one takes {shortest / adamw:.2f}"
    return best, share
