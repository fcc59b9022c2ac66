"""How the gap to full space changes with the tokens of a run, and with the width of its model.

Runs have 6.1 to 72.7 million tokens at width 768, and 24.6 million at the other widths. The rate is that
of the recipe throughout, and the schedule is stretched.
"""

from typing import Any

from polarstep_lab.study import Study, Variant

TOKENS_PER_STEP = 16 * 1024
STEPS = (375, 750, 1500, 3000, 4440)
WIDTHS = (384, 1152, 2048)
HEAD = {"optimizer.polar.solver": "polar-express-sketch", "optimizer.polar.steps": 4}


def maps(width: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Method and settings of each map: ℓ is a sixth of the width, at 2048 an eighth, or a quarter."""
    lifted = width // (8 if width == 2048 else 6) - 8
    sketched = {**HEAD, "optimizer.polar.power": 0, "optimizer.polar.oversample": 8}
    return {
        "full space": ("muon-polar-express", {}),
        "rest lifted": ("deflated", {"optimizer.polar.rank": lifted}),
        "h = 0": ("rand-muon", {**sketched, "optimizer.polar.rank": width * 200 // 768}),
        "AdamW": ("adamw", {}),
    }


def variants() -> list[Variant]:
    """Each map at each length and width, against full space at the same."""
    lengths = {
        f"{steps * TOKENS_PER_STEP / 1e6:.1f}M tokens": (
            768,
            {"data.stages.0.steps": steps, "evaluation.every": steps // 3},
        )
        for steps in STEPS
    }
    widths = {
        f"width {width}": (width, {"model.width": width, "model.heads": width // 128})
        for width in WIDTHS
    }
    return [
        Variant(f"{name}, {place}", method, {**polar, **settings}, against=f"full space, {place}")
        for place, (width, settings) in {**lengths, **widths}.items()
        for name, (method, polar) in maps(width).items()
    ]


study = Study(name="scaling", recipe="nanogpt-25m", variants=variants(), seeds=(0, 1, 2))
