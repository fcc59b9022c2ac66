"""The memory of an optimizer: its state, and what a step takes."""

from __future__ import annotations

from pages.claims.words import claim
from pages.records.costs import AUTO, FULL_SPACE, MAPS, MAPS_AGAIN, columns_of_auto, steps


@claim
def state_of_maps() -> str:
    """The state of AdamW, of full space and of ``auto`` as measured, and what a warm sketch is of it."""

    def state(load: str) -> str:
        adamw, full, auto = (
            steps()[name, load]["state_mib"] for name in ("AdamW, fused", FULL_SPACE, AUTO)
        )
        return f'{adamw:.0f} MiB with AdamW, {full:.0f} in full space and {auto:.0f} with `"auto"`'

    small, large = columns_of_auto()
    return (
        f"{state('nanoGPT')} (ℓ = {small}) for nanoGPT's matrices, and {state('8B layer')} "
        f"(ℓ = {large}) for one layer of an 8B model, in float32"
    )


@claim
def memory_of_a_step() -> str:
    """What a step takes besides, as measured on a GPU."""

    def taken(name: str, load: str) -> str:
        found = sorted(steps(record)[name, load]["extra_mib"] for record in (MAPS, MAPS_AGAIN))
        return f"{found[0]:.0f} to {found[1]:.0f}"

    told = [
        f'{taken(FULL_SPACE, load)} MiB in full space and {taken(AUTO, load)} with `"auto"` for {words}'
        for load, words in (("nanoGPT", "nanoGPT's matrices"), ("8B layer", "the 8B layer"))
    ]
    return f"{' and '.join(told)}, in two records of different commits,"
