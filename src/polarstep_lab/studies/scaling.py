"""How the gap to full space changes with the tokens of a run: 6.1 to 72.7 million, all else alike.

The rate is that of the recipe at every length, and the schedule is stretched.
"""

from typing import Any

from polarstep_lab.study import Study, Variant

TOKENS_PER_STEP = 16 * 1024
STEPS = (375, 750, 1500, 3000, 4440)
MAPS: dict[str, tuple[str, dict[str, Any]]] = {
    "full space": ("muon-polar-express", {}),
    "rank 120, rest lifted": ("deflated", {"optimizer.polar.rank": 120}),
    "rank 200, h = 0": (
        "rand-muon",
        {
            "optimizer.polar.power": 0,
            "optimizer.polar.oversample": 8,
            "optimizer.polar.solver": "polar-express-sketch",
            "optimizer.polar.steps": 4,
        },
    ),
    "AdamW": ("adamw", {}),
}


def variants() -> list[Variant]:
    """Each map at each length, against full space at this length."""
    found = []
    for steps in STEPS:
        length = f"{steps * TOKENS_PER_STEP / 1e6:.1f}M tokens"
        for name, (method, settings) in MAPS.items():
            own = {**settings, "data.stages.0.steps": steps, "evaluation.every": steps // 3}
            against = f"full space, {length}"
            found.append(Variant(f"{name}, {length}", method, own, against=against))
    return found


study = Study(name="scaling", recipe="nanogpt-25m", variants=variants(), seeds=(0, 1, 2))
