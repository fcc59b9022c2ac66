"""The map for each shape and device, chosen by an estimate of what a step costs."""

from __future__ import annotations

from dataclasses import dataclass
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
# one bucket, whose launches they share. A map does not know how many there are.
MATRICES = 32
# A map with fewer directions than full space must save a tenth of the time.
WORTH = 0.9
# "cheap" is a step within this many times the time of AdamW.
CHEAP = 1.15
# ℓ is a part of the short side, in multiples of 16 and at most 256, from where on sketches get dear. A
# quarter for the low-rank map, as in the paper's experiments. For the deflated map a sixth: in runs of
# 73M tokens it ended level with full space, and a twelfth, which takes 5% less time on an H200, a
# percent behind on each of three seeds.
QUARTER, SIXTH = 4, 6
WIDEST = 256
OVERSAMPLE = 8


@dataclass(frozen=True)
class Auto(Containing):
    """The cheapest map that is expected to train as well as the budget asks, for each shape.

    Small matrices are not worth a sketch, and large ones are. Which is which depends on the device,
    and is decided by an estimate of the time of a whole step (:mod:`polarstep.polar.cost`) for some
    dozens of matrices of the shape. ``print(optimizer.routes)`` shows the choice for every parameter.

    On a GPT of 11 layers × 768 the deflated map ended 0.1% above the perplexity of full space after
    73M tokens (± 0.7, three seeds, ``results/long-run``), and the paper's low-rank map 12% above it
    (one seed). ``docs/which.md`` has shorter runs, other widths and other ranks.

    Args:
        budget: ``"balanced"``: full space (five PolarExpress steps), or :class:`Deflated` with a warm
            sketch (ℓ a sixth of the short side, at most 256) and one step, whichever is cheaper.
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
        """The map that carries and draws all that a map of this budget may carry and draw."""
        return FULL if self.budget == "full" else DEFLATED[WIDEST]

    @property
    def ignores_zeros(self) -> bool:
        """Whether full space is the only choice; a sketch depends on the shape."""
        return self.contained.ignores_zeros

    def resumes(self, carry: Carry, m: int, n: int) -> bool:
        """Whether the chosen map can go on from ``carry``; from nothing only if no map carries any."""
        return super().resumes(carry, m, n) if carry else not self.carries

    def inside(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The map that is chosen for m×n matrices on ``device``."""
        return _map(_choice(self.budget, m, n, device)[0], m, n)

    def on(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The map that is chosen for m×n matrices on ``device``."""
        return self.inside(m, n, device)

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """The chosen map, and why."""
        device = device or torch.device("cpu")
        name, why = _choice(self.budget, m, n, device)
        return f"{_map(name, m, n).describe(m, n, device)}; auto: {why}"


FULL = NewtonSchulz(5, "polar-express")
INNER = NewtonSchulz(4, "polar-express-sketch")
WIDTHS = range(16, WIDEST + 1, 16)
DEFLATED = {
    width: Deflated(
        LowRank(width - OVERSAMPLE, OVERSAMPLE, sketch=Warm(), inner=INNER),
        NewtonSchulz(1, "flat"),
        FULL,
    )
    for width in WIDTHS
}
LOW_RANK = {
    width: LowRank(width - OVERSAMPLE, OVERSAMPLE, power=0, inner=INNER) for width in WIDTHS
}


def _map(name: str, m: int, n: int) -> PolarMap:
    if name == "full":
        return FULL
    return _deflated(m, n) if name == "deflated" else LOW_RANK[_width(m, n, QUARTER)]


def _deflated(m: int, n: int) -> Deflated:
    return DEFLATED[_width(m, n, SIXTH)]


def _width(m: int, n: int, part: int) -> int:
    """ℓ for m×n matrices: a ``part``-th of the short side, rounded up to a multiple of 16."""
    return min(WIDEST, -(-min(m, n) // (16 * part)) * 16)


# A dict, as torch.compile traces through functools.cache. Optimizers ask at every step.
_CHOICES: dict[tuple[Budget, int, int, torch.device], tuple[str, str]] = {}


@constant
def _choice(budget: Budget, m: int, n: int, device: torch.device) -> tuple[str, str]:
    """The name of the map for m×n matrices on ``device``, and the reason for it."""
    key = (budget, m, n, device)
    if key not in _CHOICES:
        _CHOICES[key] = _chosen(budget, m, n, device)
    return _CHOICES[key]


def _chosen(budget: Budget, m: int, n: int, device: torch.device) -> tuple[str, str]:
    if budget == "full" or min(m, n) == 0:
        return "full", "budget full" if budget == "full" else "empty"
    sketched = ("deflated",) if budget == "balanced" else ("deflated", "low-rank")
    # From the best to the worst; a map that would run another one on this shape is left out.
    maps = {name: _map(name, m, n) for name in ("full", *sketched)}
    maps = {name: polar for name, polar in maps.items() if polar.on(m, n, device) is polar}
    if len(maps) == 1:
        return "full", f"{_deflated(m, n).full_space_reason(m, n, device)}"
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
        other = min(time for name, time in times.items() if name != "full")
        return best, f"a sketch would take {other / shortest:.2f} × as long"
    return best, f"about {shortest / times['full']:.2f} × full space"
