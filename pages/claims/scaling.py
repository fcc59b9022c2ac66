"""How the gap to full space changes with the tokens and with the width."""

from __future__ import annotations

import scaling as study
from differences import change
from frontier import RATE, STEPS, WIDTH
from pages.claims.words import claim, signed
from pages.records.quality import million_tokens
from pages.records.scaling import OVER, gaps


@claim
def gap_over_tokens() -> str:
    """Whether the gap closes, stays or grows with the tokens, in test perplexity."""
    return _of_two("tokens")


@claim
def gap_over_width() -> str:
    """Whether the gap closes, stays or grows with the width, in test perplexity."""
    return _of_two("width")


@claim
def gap_of_rank_48() -> str:
    """The same of runs that were made before the held-out text had halves."""
    over_tokens = _scaled(
        "tokens", "deflated", "the gap to full space with the tokens", "perplexity"
    )
    over_width = _scaled("width", "deflated", "that with the width", "perplexity")
    return f"in perplexity of all held-out text {over_tokens}; {over_width}"


def _of_two(unit: study.Unit) -> str:
    maps = {
        "deflated-sixth": "the gap of the map of `auto` to full space",
        "low-rank": "that of `LowRank`",
    }
    both = "; ".join(_scaled(unit, name, words, "test") for name, words in maps.items())
    return f"in test perplexity {both}"


def _scaled(unit: study.Unit, name: str, words: str, text: study.Text) -> str:

    found = gaps(text)
    line = study.fits(found, name)[unit]
    points = OVER[unit](found, name)
    places = sorted({x for x, _ in points})
    verb = f"{line.verdict} by this fit"
    if line.verdict not in ("grows", "closes"):
        verb = "does not change clearly"
    slope = f"{signed(line.slope, 2)} ± {line.half:.2f} points for each doubling"
    if line.pairs:
        slope += f" by the means and {line.pairs.told} over all pairs"
    at = f"{places[0]:.1f}M to {places[-1]:.1f}M tokens"
    if unit == "width":
        at = f"width {places[0]:g} to {places[-1]:g}, {million_tokens():.1f}M tokens"
    alone = sum([x for x, _ in points].count(place) == 1 for place in places)
    of = "lengths" if unit == "tokens" else "widths"
    pairs = f"n = {len(points)} pairs of runs at {line.n} {of}, {at}"
    told = f"{words} {verb}, {slope} ({pairs}"
    if alone:
        told += f"; {alone} of {len(places)} {of} {'has' if alone == 1 else 'have'} one seed"
    if len(places) > 2:
        low, high = study.without_one(study.means(points))
        told += f"; {signed(low, 2)} to {signed(high, 2)} with any one of them left out"
    return f"{told})"


@claim
def widest_gap() -> str:
    """Deflated maps in the widest model, with a rank that grows with the width and with a fixed one."""

    def of(name: str, text: study.Text) -> list[str]:
        found = gaps(text)[name]
        widths = (study.WIDTHS[-1], WIDTH)
        return [change(found[STEPS, width].values()).told(unit="%") for width in widths]

    grows, stays = of(study.SIXTH, "test"), of(study.DEFLATED, "perplexity")
    return (
        f"at width {study.WIDTHS[-1]} the map of `auto`, whose rank grows with the width, has a gap to "
        f"full space of {grows[0]} in test perplexity, where at width {WIDTH} it is {grows[1]}; "
        f"with rank 48 at both widths it is {stays[0]} and {stays[1]} in that of all held-out text, "
        f"all after {million_tokens():.1f}M tokens"
    )


@claim
def widest_model() -> str:
    """A head of an eighth of the width, in the widest model that was trained and at width 768."""
    at_768 = _gap_of_the_eighth(WIDTH)
    return (
        f"with ℓ = an eighth of the width the gap to full space is at width {widest()}, and {at_768} at "
        f"width {WIDTH}, in test perplexity"
    )


@claim
def seeds_of_widths() -> str:
    """How many seeds the map of ``auto`` has at each width, against full space."""
    found = gaps()
    seeds = {
        width: len(runs)
        for name in (study.SIXTH, study.EIGHTH)
        for (steps, width), runs in found[name].items()
        if steps == STEPS
        if (name == study.EIGHTH) == (width >= study.WIDEST)
    }
    told = [f"{count} at {width}" for width, count in sorted(seeds.items())]
    return f"the numbers of seeds by width are {', '.join(told[:-1])} and {told[-1]}"


def widest() -> str:
    """The width of the widest model, the gap of an eighth there, and after how many tokens."""
    found = _gap_of_the_eighth(study.WIDEST)
    return (
        f"{study.WIDEST} {found} after {million_tokens():.1f}M tokens, both at {RATE:g}, which "
        "was not tuned at that width"
    )


def _gap_of_the_eighth(width: int) -> str:

    found = gaps()[study.EIGHTH]
    return change(found[STEPS, width].values()).told(unit="%")
