"""The map for each shape and device: a sketch from a number of rows on, full space below."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from polarstep import kernels
from polarstep.context import constant
from polarstep.maps.base import Containing, MapState, PolarMap
from polarstep.maps.deflated import Deflated
from polarstep.maps.full_space import NewtonSchulz
from polarstep.maps.low_rank import LowRank
from polarstep.maps.subspace import Warm
from polarstep.ops.cpu import has_tiles

__all__ = ["Auto", "Budget"]


Budget = Literal["full", "balanced", "cheap"]

# The rows from which on a step with a sketch takes nine tenths of the time of full space or less: on
# matrices whose long side is 1, 2, 3, 4 and 8 times the short side, or more. They are from a model of
# FLOPs, bytes and launches that was fitted to the steps of results/step-cost on an H200 and on two CPUs,
# and take a dozen matrices of a shape, which share their launches. Other GPUs have the figures of their
# data sheets in the place of the H200's.
RATIOS = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Rows:
    """The rows from which on each sketched map pays, for :data:`RATIOS`."""

    deflated: tuple[int, ...]
    low_rank: tuple[int, ...]


ROWS = {
    "B200": Rows((648, 648, 520, 520, 512), (520, 328, 304, 288, 240)),
    "H200": Rows((520, 512, 336, 312, 272), (300, 248, 232, 216, 184)),
    "H100": Rows((520, 512, 512, 328, 280), (300, 248, 232, 216, 184)),
    "A100": Rows((288, 248, 232, 216, 184), (200, 176, 160, 152, 128)),
    # A GPU without a row takes a sketch where that pays on each of the three above.
    "cuda": Rows((648, 520, 520, 328, 280), (300, 248, 232, 216, 184)),
    "cpu": Rows((176, 144, 144, 144, 128), (112, 96, 88, 88, 80)),
    # Tiles multiply in full space three to eight times as fast.
    "cpu with tiles": Rows((736, 520, 512, 512, 512), (224, 96, 88, 88, 80)),
    # Devices of another kind, with torch's own operations.
    "other": Rows((192, 168, 160, 160, 152), (128, 104, 96, 96, 80)),
}
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

    Small matrices are not worth a sketch, and large ones are: from which number of rows on depends on
    the device (:data:`ROWS`). ``print(optimizer.routes)`` shows the choice for every parameter.
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
            sketch and one step where that saves a tenth of the time. ℓ is a sixth of the short side or
            256, if that is less, and never less than an eighth (up to 2048 columns).
            ``"full"``: full space for every shape. ``"cheap"``: full space, or a low-rank map (h = 0,
            ℓ a quarter of the short side, at most 256) where that saves a tenth of the time. From 4096
            rows on it takes about as long as AdamW.

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

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        """Whether the chosen map can continue; from an empty carry only if no map has any."""
        return super().resumes(carry, m, n) if carry else not self.traits.carries

    def inside(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The map that is chosen for m×n matrices on ``device``."""
        name, always, _ = _choice(self.budget, m, n, device)
        return _map(name, m, n, always)

    on = inside

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


# A dict, as torch.compile traces through functools.cache. Optimizers ask at every step.
_CHOICES: dict[tuple[Budget, int, int, torch.device], tuple[str, bool, str]] = {}


@constant
def _choice(budget: Budget, m: int, n: int, device: torch.device) -> tuple[str, bool, str]:
    """``name`` and ``always`` of :func:`_map` for m×n matrices on ``device``, and the reason.

    Not the map itself: torch.compile keeps a constant only if it is made of strings and numbers.
    A LowRank map's own rule on which shapes to sketch is for maps that a user gives, so it is overruled.
    """
    key = (budget, m, n, device)
    if key not in _CHOICES:
        name, why = _chosen(budget, m, n, device)
        polar = _map(name, m, n)
        _CHOICES[key] = (name, polar.on(m, n, device) is not polar, why)
    return _CHOICES[key]


def _chosen(budget: Budget, m: int, n: int, device: torch.device) -> tuple[str, str]:
    short, long = min(m, n), max(m, n)
    if budget == "full" or short == 0:
        return "full", "budget full" if budget == "full" else "empty"
    rows = ROWS[_kind_of(device)]
    fewest = rows.deflated if budget == "balanced" else rows.low_rank
    first = fewest[sum(long >= ratio * short for ratio in RATIOS) - 1]
    if short < first:
        return "full", f"a sketch pays from {first} rows on"
    why = f"pays from {first} rows on"
    if budget == "cheap":
        return "low-rank", why
    if short > TRAINED:
        part = _deflated_width(short) / short
        tried = f"tried in training with {1 / EIGHTH:.1%} of {TRAINED}"
        why += f"; ℓ is {part:.1%} of the short side, {tried}"
    if short < NARROWEST_TRAINED:
        why += f"; tried in training from width {NARROWEST_TRAINED} on"
    return "deflated", why


def _kind_of(device: torch.device) -> str:
    """The name of the device in :data:`ROWS`: a GPU's by its name.

    A GPU on which our kernels do not run counts as a device of another kind.
    """
    if device.type == "cpu":
        return "cpu with tiles" if has_tiles() else "cpu"
    if device.type != "cuda":
        return "other"
    if not torch.cuda.is_available():
        return "cuda"
    if not kernels.available(device):
        return "other"
    name = torch.cuda.get_device_name(device)
    return next((kind for kind in ROWS if kind in name), "cuda")
