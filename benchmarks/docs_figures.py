"""The figures of the pages as SVG, readable on a light and on a dark page; drawn from the records."""

from __future__ import annotations

import math
from dataclasses import dataclass

from docs_quality import TIMES, Weighed, million_tokens, perplexities, quality, steps, weighed

STYLE = (
    "text{font:14px sans-serif;fill:#666}.title{font-weight:bold}.small{font-size:12px}"
    ".low{fill:#3f6fb5}.other{fill:#a8a8a8}.axis{stroke:#888;stroke-width:1}"
    ".grid{stroke:#8884;stroke-width:1}.bar{stroke:#3f6fb5;stroke-width:2}"
    ".bar.other{stroke:#8a8a8a}.hollow{fill:none;stroke:#3f6fb5;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}.low{fill:#7aa7e8}.bar{stroke:#7aa7e8}"
    ".hollow{stroke:#7aa7e8}}"
)


def _svg(width: int, height: int, title: str, shapes: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{title}">'
    )
    return "\n".join([head, f"<style>{STYLE}</style>", *shapes, "</svg>\n"])


def _text(x: float, y: float, words: str, *, kind: str = "", anchor: str = "start") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{words}</text>'


def step_cost() -> str:
    """A bar for the time of each optimizer's step over AdamW's, on two sets of matrices."""
    names = [each.timed for each in weighed() if each.timed]
    width, left, right, row, top = 760, 270, 60, 24, 34
    loads = (("nanoGPT", "the 64 matrices of nanoGPT"), ("8B layer", "a layer of an 8B model"))
    ratios = {at: measured["ratio"] for at, measured in steps(TIMES).items()}
    longest = math.log(max(ratios[name, load] for name in names for load, _ in loads))
    shapes, y = [], 0
    for load, words in loads:
        shapes.append(_text(0, y + 20, f"{words}: time of a step ÷ AdamW's", kind="title"))
        for i, name in enumerate(names):
            ratio, line = ratios[name, load], y + top + row * i
            # On a logarithmic scale, from half of AdamW's time on.
            length = (width - left - right) * math.log(2 * ratio) / (longest + math.log(2))
            kind = "low" if name.startswith(("LowRank", "Deflated")) else "other"
            bar = f'width="{length:.1f}" height="{row - 7}" class="{kind}"'
            shapes += [
                _text(left - 8, line + 15, name, anchor="end"),
                f'<rect x="{left}" y="{line + 2}" {bar}/>',
                _text(left + length + 6, line + 15, f"{ratio:.2f}×"),
            ]
        y += top + row * len(names) + 14
    return _svg(width, y, "Time of an optimizer step over AdamW's", shapes)


@dataclass(frozen=True)
class _Frame:
    """A plot's area, and where a value lies in it."""

    left: float
    top: float
    right: float
    bottom: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        along = (math.log(x) - math.log(self.x[0])) / (math.log(self.x[1]) - math.log(self.x[0]))
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + along * (self.right - self.left), self.bottom - up * (
            self.bottom - self.top
        )


def frontier() -> str:
    """Perplexity against full space over the time of a step, on two sets of matrices."""
    points = [each for each in weighed() if each.timed and each.trained]
    width, height = 760, 430
    shapes = [
        _text(
            0,
            20,
            f"Perplexity after {million_tokens():.1f}M tokens, against full space",
            kind="title",
        )
    ]
    panels = (
        ("nanoGPT", "on nanoGPT's 64 matrices", (0.55, 3.2), (0.6, 1, 2, 3)),
        ("8B layer", "on a layer of an 8B model", (1.4, 30.0), (1.5, 3, 6, 12, 24)),
    )
    for place, (load, words, x, ticks) in enumerate(panels):
        left = 52 + place * 372
        frame = _Frame(left, 60, left + 320, height - 62, x, (-2.5, 10.0))
        shapes += _axes(frame, words, ticks)
        adamw = steps()["AdamW, fused", load]["ms"]
        at, top = frame.at(adamw, 10.0)
        shapes.append(f'<path d="M{at:.1f} {frame.bottom}V{top + 14:.1f}" class="axis"/>')
        shapes.append(_text(at - 3, top + 8, "AdamW", kind="small"))
        for each in points:
            shapes += _point(frame, each, load)
    seeds = len(perplexities()["full", 0.014])
    note = (
        f"Bars: 95% t-intervals over paired seeds, of {seeds} in full space. Hollow: one seed. "
        "The GPT is 768 wide in both panels."
    )
    shapes.append(_text(0, height - 8, note, kind="small"))
    return _svg(width, height, "Perplexity over the time of an optimizer step", shapes)


def _axes(frame: _Frame, words: str, ticks: tuple[float, ...]) -> list[str]:
    shapes = []
    for value in (-2, 0, 2, 4, 6, 8):
        _, y = frame.at(frame.x[0], value)
        kind = "axis" if value == 0 else "grid"
        shapes.append(f'<path d="M{frame.left} {y:.1f}H{frame.right}" class="{kind}"/>')
        sign = "−" if value < 0 else "+" if value > 0 else ""
        label = f"{sign}{abs(value)}%"
        shapes.append(_text(frame.left - 6, y + 4, label, kind="small", anchor="end"))
    shapes.append(
        f'<path d="M{frame.left} {frame.top}V{frame.bottom}H{frame.right}" '
        'class="axis" fill="none"/>'
    )
    for tick in ticks:
        x, _ = frame.at(tick, 0)
        shapes.append(_text(x, frame.bottom + 17, f"{tick:g}", kind="small", anchor="middle"))
    middle = (frame.left + frame.right) / 2
    label = f"optimizer ms per step, {words}"
    shapes.append(_text(middle, frame.bottom + 36, label, kind="small", anchor="middle"))
    return shapes


def _point(frame: _Frame, each: Weighed, load: str) -> list[str]:
    """A mark with its interval and its name."""
    assert each.timed is not None
    assert each.trained is not None
    ms = steps()[each.timed, load]["ms"]
    found = quality(each.trained)
    x, y = frame.at(ms, found.mean)
    other = "" if each.columns else " other"
    shapes = []
    if found.n > 1 and found.half > 0:
        low, high = (frame.at(ms, end)[1] for end in (found.low, found.high))
        shapes.append(f'<path d="M{x:.1f} {low:.1f}V{high:.1f}" class="bar{other}"/>')
    hollow = found.n == 1
    kind = "hollow" if hollow else f"{'other' if other else 'low'}"
    shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" class="{kind}"/>')
    name = each.title.replace("`", "").replace('polar="auto": ', "")
    right, down, anchor = LABELS.get(name, (10, 4, "start"))
    shapes.append(_text(x + right, y + down, name, kind="small", anchor=anchor))
    return shapes


LABELS = {
    "full space": (0, 22, "middle"),
    "Deflated, warm": (-10, 4, "end"),
    "Deflated, h = 1": (4, 28, "end"),
}
"""Where the name of a map stands beside its mark, so that names do not meet."""

FIGURES = {
    "docs/assets/step-cost.svg": step_cost,
    "docs/assets/frontier.svg": frontier,
}
