"""One colour, dash and marker for each method, the same in every figure, table and theme.

Each colour comes as a pair, for a light and for a dark page. Within a theme any two colours stay
apart for normal sight and for the three kinds of colour blindness, and each stands out from the
page (a contrast of 3:1 or more); the tests compute both. Randomized methods are dashed as well, so
that a figure survives a black-and-white printer.

Figures are drawn in the light colours. :func:`themed` then replaces each of them in the SVG by a
CSS variable, which lets a figure inside the page follow the reader's theme.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from polarstep_lab.methods import METHODS, all_methods

__all__ = [
    "ALL_LOOKS",
    "CHROME",
    "SERIES",
    "Look",
    "look_of",
    "looks_of",
    "ordinal_looks",
    "themed",
]


@dataclass(frozen=True)
class Look:
    """How one series is drawn: a CSS variable, its two colours, a dash pattern and a marker."""

    variable: str
    light: str
    dark: str
    dash: str = "-"
    marker: str = "o"


_DASHES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")

_METHOD_LOOKS = (
    Look("--series-adamw", "#6b6875", "#8d9489", "-", "s"),
    Look("--series-sgd", "#c97a04", "#ffcf3a", "-", "D"),
    Look("--series-muon-polyak", "#2a62f0", "#a9cbff", "-", "o"),
    Look("--series-rand-polyak", "#1f9a5f", "#14d683", "--", "^"),
    Look("--series-muon-nesterov", "#1d1a5e", "#5b6bff", "-", "o"),
    Look("--series-rand-gaussian", "#a11a00", "#e8642a", "--", "^"),
    Look("--series-rand-kaczmarz", "#b165c8", "#b56ad1", "--", "v"),
)
SERIES = {method.name: look for method, look in zip(METHODS, _METHOD_LOOKS, strict=True)}
"""The look of each row of Table 2."""

_ORDINAL_LOOKS = (
    Look("--ordinal-0", "#9fb4d8", "#33518a", "-", "o"),
    Look("--ordinal-1", "#7796cc", "#4a70b8", "-", "s"),
    Look("--ordinal-2", "#5079bd", "#6690d6", "-", "D"),
    Look("--ordinal-3", "#2f5da6", "#88b0ea", "-", "^"),
    Look("--ordinal-4", "#1d4484", "#abcbf5", "-", "v"),
    Look("--ordinal-5", "#122c5c", "#cfe2fb", "-", "P"),
    Look("--ordinal-6", "#081737", "#eef6ff", "-", "X"),
)

_MAP_LOOKS = {
    "polar-express": Look("--series-polar-express", "#2d0309", "#f3eff2", "-", "X"),
    "deflated": Look("--series-deflated", "#5d12a1", "#af3087", "--", "P"),
    "auto": Look("--series-auto", "#0a583b", "#2e723f", "--", "D"),
}
"""The look of each map that Table 2 does not have."""


def _beside() -> dict[str, Look]:
    """The looks of methods that are not in Table 2.

    Ours have the colour of their map, and with normalized rows another dash and marker. Those of other
    libraries have the colours of ordered values.
    """
    found = {}
    peers = zip(
        itertools.cycle(_ORDINAL_LOOKS[::-2] + _ORDINAL_LOOKS[-2::-2]),
        itertools.cycle((":", "-.")),
        strict=False,
    )
    for method in all_methods()[len(METHODS) :]:
        if method.peer is not None:
            look, dash = next(peers)
            found[method.name] = replace(look, dash=dash)
            continue
        look = SERIES["Rand Muon (Nes.-Gaussian)"]
        if method.polar == "default":
            look = replace(_MAP_LOOKS["auto"], dash="-")
        elif method.polar is not None:
            look = _MAP_LOOKS[method.polar]
        rows = replace(look, dash="-." if look.dash == "--" else ":", marker="v")
        found[method.name] = rows if method.normalize_rows else look
    return found


_BESIDE = _beside()

CHROME = (
    Look("--ink", "#1b1d23", "#e9eaee"),
    Look("--ink-soft", "#5a5e69", "#a6abb8"),
    Look("--rule", "#d9dce3", "#363b47"),
    Look("--page", "#fefefe", "#14161b"),
    Look("--panel", "#f6f7fa", "#1c1f27"),
    Look("--alarm", "#b3261e", "#ff8a80"),
)
"""Text, secondary text, rules, page, raised boxes and warnings."""

ALL_LOOKS = (*CHROME, *_METHOD_LOOKS, *_MAP_LOOKS.values(), *_ORDINAL_LOOKS)
"""Every look that the page's style sheet has to define."""

_VARIABLES = {look.light: look.variable for look in ALL_LOOKS}


def look_of(method: str) -> Look:
    """The look of a method; an unknown method is drawn like secondary text."""
    return (SERIES | _BESIDE).get(method, replace(CHROME[1], dash=":", marker="P"))


def looks_of(methods: Iterable[str]) -> list[Look]:
    """A look for each row by its method; further rows of a method differ in dash and marker.

    >>> [(look.light, look.dash, look.marker) for look in looks_of(["AdamW", "AdamW", "AdamW"])]
    [('#6b6875', '-', 's'), ('#6b6875', '--', '^'), ('#6b6875', '-.', 'P')]
    """
    rows: Counter[str] = Counter()
    found = []
    for method in methods:
        look, further = look_of(method), rows[method]
        dash = _DASHES[(_DASHES.index(look.dash) + further) % len(_DASHES)]
        marker = _MARKERS[(_MARKERS.index(look.marker) + 2 * further) % len(_MARKERS)]
        found.append(replace(look, dash=dash, marker=marker))
        rows[method] += 1
    return found


def ordinal_looks(count: int, ordered: bool = True) -> list[Look]:
    """Looks for ``count`` values, from pale to deep; dashed apart where the values have no order."""
    last = len(_ORDINAL_LOOKS) - 1
    places = [round(i * last / (count - 1)) for i in range(count)] if count > 1 else [last // 2]
    dashes = itertools.cycle("-" if ordered else _DASHES)
    looks = [_ORDINAL_LOOKS[place] for place in places[:count]]
    return [replace(look, dash=dash) for look, dash in zip(looks, dashes, strict=False)]


def themed(svg: str) -> str:
    """``svg`` with every colour of the palette replaced by the CSS variable that holds it.

    >>> themed('<path style="stroke: #1b1d23"/>')
    '<path style="stroke: var(--ink)"/>'
    """
    pattern = re.compile("|".join(map(re.escape, _VARIABLES)))
    return pattern.sub(lambda match: f"var({_VARIABLES[match.group()]})", svg)
