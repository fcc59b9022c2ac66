"""The figures of the pages, as SVG: readable on a phone, and dark where the reader's screen is.

A figure is a plain picture of its own size that a page shrinks. It has a background, as an SVG follows
the scheme of the reader's system and not that of the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from pages.numbers import Number
from pages.numbers.cost import curve
from pages.numbers.quality import family
from pages.records import lines
from pages.rooms import ARROWS, BESIDE, ROWS, Room

WIDTH, HEIGHT = 520, 380
LEFT, TOP, BOTTOM = 58, 44, 52
NAMES, BARE = 166, 20
"""The margin on the right, with names of lines and without."""
SIZE = 15
"""Of the letters: at least 11 pixels on a screen of 400."""
STYLE = """
  .ground { fill: #ffffff } text { fill: #1f2328; font: SIZEpx system-ui, sans-serif }
  .small { font-size: 13px } .quiet { fill: #59636e } .grid { stroke: #d1d9e0 } .axis { stroke: #59636e }
  .ours { stroke: #0550ae; fill: #0550ae } .other { stroke: #bc4c00; fill: #bc4c00 }
  .third { stroke: #6639ba; fill: #6639ba } .adamw { stroke: #59636e; fill: #59636e }
  .full { stroke: #116329; fill: #116329 }
  path { fill: none !important; stroke-width: 2.5 } .ours path, path.ours { stroke-width: 4 }
  text.ours, text.other, text.third, text.adamw, text.full { stroke: none } .name { font-weight: 600 }
  .box { fill: #f6f8fa; stroke: #59636e } .arrow { stroke: #59636e; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117 } text { fill: #f0f6fc } .quiet { fill: #9198a1 }
    .grid { stroke: #30363d } .axis { stroke: #9198a1 }
    .ours { stroke: #58a6ff; fill: #58a6ff } .other { stroke: #f0883e; fill: #f0883e }
    .third { stroke: #d2a8ff; fill: #d2a8ff } .adamw { stroke: #9198a1; fill: #9198a1 }
    .full { stroke: #56d364; fill: #56d364 } .box { fill: #151b23; stroke: #9198a1 }
    .arrow { stroke: #9198a1 }
  }
""".replace("SIZE", str(SIZE))

Point = tuple[float, float]


def svg(title: str, describes: str, parts: Iterable[str], width: int, height: int) -> str:
    """A whole file: ``title`` and ``describes`` are for readers who do not see it."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="t d">',
            f'<title id="t">{escape(title)}</title>',
            f'<desc id="d">{escape(describes)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect class="ground" width="{width}" height="{height}" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text; ``anchor`` says which part of it is at x."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def stroke(kind: str, begin: Point, end: Point) -> str:
    """A straight line."""
    (x1, y1), (x2, y2) = begin, end
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


class Axes:
    """A frame with ticks: from numbers to places in the picture."""

    def __init__(
        self,
        xs: Sequence[float],
        ys: Sequence[float],
        *,
        right: int = NAMES,
        begin: float | None = None,
        log_x: bool = False,
        log_y: bool = False,
    ) -> None:
        """``xs`` and ``ys`` are the ticks, from end to end, but that x may begin at ``begin``."""
        self.xs, self.ys, self.right = xs, ys, right
        self.begin = xs[0] if begin is None else begin
        self.log_x, self.log_y = log_x, log_y

    def at(self, x: float, y: float) -> Point:
        """Where a point is."""
        across = _share(x, self.begin, self.xs[-1], self.log_x)
        up = _share(y, self.ys[0], self.ys[-1], self.log_y)
        inner = WIDTH - LEFT - self.right, HEIGHT - TOP - BOTTOM
        return LEFT + across * inner[0], HEIGHT - BOTTOM - up * inner[1]

    def draw(self, title: str, x_title: str, unit: str = "") -> list[str]:
        """The frame, its ticks, and a title above that says what is drawn over what."""
        left, bottom = self.at(self.begin, self.ys[0])
        right = self.at(self.xs[-1], self.ys[0])[0]
        parts = [text(12, 26, title, "name"), text(left, HEIGHT - 10, x_title, "quiet")]
        for y in self.ys:
            place = self.at(self.begin, y)[1]
            parts.append(stroke("grid", (left, place), (right, place)))
            parts.append(
                text(left - 6, place + 5, f"{y:g}{unit}".replace("-", "−"), "quiet", "end")
            )
        for x in self.xs:
            place = self.at(x, self.ys[0])[0]
            parts.append(stroke("axis", (place, bottom), (place, bottom + 5)))
            parts.append(text(place, bottom + 20, f"{x:g}", "quiet", "middle"))
        return [*parts, stroke("axis", (left, bottom), (right, bottom))]

    def line(self, points: Sequence[Point], kind: str) -> str:
        """A curve, from where it first is inside the frame."""
        inside = [self.at(x, y) for x, y in points if self.ys[0] <= y <= self.ys[-1]]
        told = " L".join(f"{x:.1f} {y:.1f}" for x, y in inside)
        return f'<path class="{kind}" d="M{told}"/>'


def _share(value: float, low: float, high: float, log: bool) -> float:
    if log:
        value, low, high = math.log(value), math.log(low), math.log(high)
    return (value - low) / (high - low)


def apart(places: Sequence[float], least: float) -> list[float]:
    """Places moved so that neighbours are ``least`` apart, as little as that needs."""
    order = sorted(range(len(places)), key=lambda k: places[k])
    moved = [places[k] for k in order]
    for _ in range(200):
        for k in range(len(moved) - 1):
            if (short := least - (moved[k + 1] - moved[k])) > 0:
                moved[k] -= short / 2
                moved[k + 1] += short / 2
    found = [0.0] * len(places)
    for k, place in zip(order, moved, strict=True):
        found[k] = place
    return found


Curve = tuple[str, str, Sequence[Point]]
"""Name, kind, and points."""


def curves(axes: Axes, drawn: Sequence[Curve], unit: str = "") -> list[str]:
    """Lines with dots at their ends, and their names and last values in a column on the right."""
    parts = [axes.line(points, kind) for _, kind, points in drawn]
    ends = [axes.at(*points[-1]) for *_, points in drawn]
    heights = apart([y for _, y in ends], 2 * SIZE + 8)
    below = max(0.0, max(heights) + SIZE - (HEIGHT - BOTTOM))
    heights = [height - below for height in heights]
    for (name, kind, points), (x, y), height in zip(drawn, ends, heights, strict=True):
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        place = WIDTH - NAMES + 10
        seconds, value = points[-1]
        told = f"{value:.1f}, {seconds:.1f}{unit}" if unit else f"{value:.1f}"
        parts.append(text(place, height, name, f"{kind} name"))
        parts.append(text(place, height + SIZE + 1, told, "quiet"))
    return parts


def losses(title: str, x_title: str, axes: Axes, drawn: Sequence[Curve], unit: str = "") -> str:
    """A figure of validation perplexity on a logarithmic scale."""
    after = unit or " steps"
    told = [f"{name} ends at {p[-1][1]:.1f} after {p[-1][0]:.4g}{after}" for name, _, p in drawn]
    parts = [*axes.draw(f"{title}, validation perplexity", x_title), *curves(axes, drawn, unit)]
    return svg(f"{title}: perplexity over {x_title}", "; ".join(told), parts, WIDTH, HEIGHT)


def loss_over_steps(numbers: Mapping[str, Number]) -> str:
    """GPT-2 with ``muon_for(model)``, and other optimizers at the best of their grids, over steps."""
    its = family("gpt2")
    drawn = []
    for name, kind, method in (
        ("AdamW", "adamw", "adamw"),
        ("torch.optim.Muon", "other", "torch-muon"),
        ("NorMuon", "third", "normuon"),
        ("polarstep", "ours", "default"),
    ):
        if method in its:
            run = its[method][max(its[method])]
            drawn.append((name, kind, [(step, math.exp(loss)) for step, loss in run["curve"]]))
    axes = Axes([0, 500, 1000, 1500], [50, 100, 200, 400, 800], log_y=True)
    return losses("GPT-2", "steps of 16,384 tokens, one seed", axes, drawn)


def loss_over_seconds(numbers: Mapping[str, Number]) -> str:
    """A GPT of 5 layers × 768, each optimizer alone on one H200, over seconds of training.

    ``polarstep`` is the map, the transform and the scale of ``muon_for``, here without decay as all are.
    """
    drawn = []
    for name, kind, slug in (
        ("AdamW", "adamw", "adamw"),
        ("torch.optim.Muon", "other", "torch-muon"),
        ("NorMuon", "third", "normuon"),
        ("polarstep", "ours", "auto-rows-fan"),
    ):
        run = curve(slug)
        points = [(step * run["step_ms"] / 1000, value) for step, value in run["curve"]]
        drawn.append((name, kind, points))
    axes = Axes([0, 10, 20, 30, 40], [50, 60, 80, 100, 150, 200], log_y=True)
    return losses("A GPT", "seconds on one H200, one seed, no weight decay", axes, drawn, " s")


def long_run(numbers: Mapping[str, Number]) -> str:
    """One pass over 73 million tokens, each row's first run that had the GPU to itself, over minutes."""
    drawn = []
    for name, kind, variant in (
        ("AdamW", "adamw", "adamw"),
        ("LowRank (paper)", "other", "rand-muon"),
        ("full space", "full", "muon-polar-express"),
        ("auto", "ours", "deflated-120"),
    ):
        run = next(
            line
            for line in lines("long-run", "table")
            if line["variant"] == variant and not line["environment"].get("device_shared", False)
        )
        minutes = run["result"]["step_ms"] / 60_000
        points = [
            (row["step"] * minutes, row["perplexity"])
            for row in run["logs"]["metrics"]
            if row["kind"] == "val" and row["step"] > 0
        ]
        drawn.append((name, kind, points))
    axes = Axes([0, 0.5, 1, 1.5, 2, 2.5], [30, 40, 60, 100, 200], log_y=True)
    x_title = "minutes on one H200, one seed, rates of short runs"
    return losses("72.7M tokens", x_title, axes, drawn, " min")


SHOWN = {
    "AdamW": ("adamw", "adamw", 9, 5),
    "full space": ("full", "full", 0, -12),
    "auto": ("auto", "ours", -9, 0),
    "muon_for": ("auto-rows-fan", "ours", -9, 16),
    "LowRank, h = 0": ("low-rank", "ours", 9, 14),
    "LowRank, the paper's": ("paper", "ours", 9, 5),
    "torch.optim.Muon": ("torch-muon", "other", 0, -12),
    "Muon of dion": ("dion", "third", 10, -2),
    "NorMuon": ("normuon", "third", 10, 12),
    "Dion2": ("dion2", "third", -9, 0),
    "Dion3": ("dion3", "third", 9, 0),
}
"""Name: the number's subject, the kind of its point, and where its name stands beside it.

``muon_for`` is its map, transform and scale, in these runs without decay."""


def cost_and_quality(numbers: Mapping[str, Number]) -> str:
    """What a step costs on nanoGPT's matrices, and the perplexity after 24.6M tokens."""
    axes = Axes(
        [1, 2, 5, 10, 20, 50, 100], [-5, 0, 5, 10, 15, 20, 25], right=BARE, begin=0.8, log_x=True
    )
    parts = axes.draw(
        "Test perplexity, to Muon in full space", "an optimizer step, in steps of AdamW", "%"
    )
    told = []
    for name, (slug, kind, right, down) in SHOWN.items():
        cost = numbers[f"{slug}.step.nanogpt"]
        gap = numbers.get(f"{slug}.gap.25m", Number(0.0, "0%", ""))
        x, y = axes.at(cost.value, gap.value)
        if gap.low is not None and gap.high is not None:
            ends = (min(max(end, axes.ys[0]), axes.ys[-1]) for end in (gap.low, gap.high))
            low, high = (axes.at(axes.begin, end)[1] for end in ends)
            parts.append(stroke(kind, (x, low), (x, high)))
        parts.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="5"/>')
        anchor = "middle" if right == 0 else "start" if right > 0 else "end"
        parts.append(text(x + right, y + down, name, kind, anchor))
        told.append(f"{name} {cost.text}, {gap.text}")
    return svg("Perplexity over the cost of a step", "; ".join(told), parts, WIDTH, HEIGHT)


def rooms(numbers: Mapping[str, Number]) -> str:
    """The folders and files of the package, and who imports whom."""
    high, step, top = 52, 80, 44
    places: dict[str, Point] = {}
    boxes = [text(12, 26, "A step goes from top to bottom", "name")]
    for k, row in enumerate(ROWS):
        boxes += _row_of_rooms(row, top + k * step, high, places)
    between = [
        stroke("arrow", (places[one][0], places[one][1] + high), places[other])
        for one, other in ARROWS
    ]
    under = top + len(ROWS) * step
    boxes.append(text(12, under + 14, "Beside it, on the same rooms", "name"))
    for k, row in enumerate(BESIDE):
        boxes += _row_of_rooms(row, under + 30 + k * (high + 12), high, places)
    height = under + 30 + len(BESIDE) * (high + 12)
    told = "; ".join(f"{one} imports {other}" for one, other in ARROWS)
    return svg("The rooms of the package", told, [*between, *boxes], WIDTH, height)


def _row_of_rooms(row: Sequence[Room], y: float, high: int, places: dict[str, Point]) -> list[str]:
    """Boxes side by side; ``places`` gets the middle of the top of each."""
    wide, gap = 160, 10
    parts = []
    for k, room in enumerate(row):
        x = (WIDTH - len(row) * (wide + gap) + gap) / 2 + k * (wide + gap)
        places[room.name] = x + wide / 2, y
        parts += [
            f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{wide}" height="{high}" rx="6"/>',
            text(x + wide / 2, y + 21, room.name, "name", "middle"),
            text(x + wide / 2, y + 41, room.does, "quiet small", "middle"),
        ]
    return parts


FIGURES: dict[str, Callable[[Mapping[str, Number]], str]] = {
    "docs/assets/loss-over-steps.svg": loss_over_steps,
    "docs/assets/loss-over-seconds.svg": loss_over_seconds,
    "docs/assets/long-run.svg": long_run,
    "docs/assets/cost-and-quality.svg": cost_and_quality,
    "docs/assets/rooms.svg": rooms,
}
"""A figure by its path in the repository."""
