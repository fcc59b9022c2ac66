"""What ``benchmarks/step_cost.py`` measured, from ``results/step-cost``."""

from __future__ import annotations

import math
from pathlib import Path

from polarstep_lab import records

FOLDER = Path(__file__).parents[1] / "results" / "step-cost"


def step_times(part: str, workload: str) -> dict[str, float]:
    """Milliseconds of whole steps by optimizer: of the host or of the device, whichever is less.

    A small step is over on the device before its host has launched the next one.
    """
    return {
        line["variant"]: min(line["result"]["ms"], line["result"].get("device_ms", math.inf))
        for line in records.read(FOLDER)
        if (line["kind"], line["part"]) == ("time", part)
        and line["config"].get("workload") == workload
    }
