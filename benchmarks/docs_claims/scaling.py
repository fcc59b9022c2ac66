"""How the gap to full space changes with the tokens and with the width."""

from __future__ import annotations

from differences import change
from docs_claims.words import claim, signed
from docs_quality import ROOT, million_tokens


@claim
def gap_over_tokens() -> str:
    """Whether the gap closes, stays or grows with the tokens."""
    return _scaled("tokens")


@claim
def gap_over_width() -> str:
    """Whether the gap closes, stays or grows with the width."""
    return _scaled("width")


def _scaled(unit: str) -> str:
    import scaling as study

    found = study.gaps(study.recorded(ROOT / "results/scaling/runs.jsonl", study.FRONTIER))
    told = []
    for name, words in (
        (study.SIXTH, "the map of `auto`"),
        (study.DEFLATED, "`Deflated` with rank 48"),
        (study.LOW_RANK, "`LowRank`"),
    ):
        line = study.fits(found, name).get(unit)
        if line is None:
            continue
        points = (study.over_tokens if unit == "tokens" else study.over_width)(found, name)
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
        text = f"the gap of {words} {verb}, {slope} ({pairs}"
        if alone:
            text += f"; {alone} of {len(places)} {of} {'has' if alone == 1 else 'have'} one seed"
        if len(places) > 2:
            low, high = study.without_one(study.means(points))
            text += f"; {signed(low, 2)} to {signed(high, 2)} with any one of them left out"
        told.append(f"{text})")
    return "; ".join(told)


@claim
def widest_gap() -> str:
    """Deflated maps in the widest model, with a rank that grows with the width and with a fixed one."""
    import scaling as study

    found = study.gaps(study.recorded(ROOT / "results/scaling/runs.jsonl", study.FRONTIER))
    grows, stays = (
        [
            change(found[name][study.STEPS, width].values()).told(unit="%")
            for width in (study.WIDTHS[-1], study.WIDTH)
        ]
        for name in (study.SIXTH, study.DEFLATED)
    )
    return (
        f"at width {study.WIDTHS[-1]} the gap of the map of `auto`, whose rank grows with the width, is "
        f"{grows[0]}, where at width {study.WIDTH} it is {grows[1]}; with rank 48 at both widths it is "
        f"{stays[0]} and {stays[1]}, all after {million_tokens():.1f}M tokens"
    )
