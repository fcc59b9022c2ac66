"""What ``benchmarks/step_cost.py`` measured, from its records in ``results/step-cost``."""

from __future__ import annotations

import json
import math
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "results" / "step-cost"


def step_times(record: str, workload: str) -> dict[str, float]:
    """Milliseconds of whole steps by optimizer: of the host or of the device, whichever is less.

    A small step is over on the device before its host has launched the next one.
    """
    rows = json.loads((FOLDER / f"{record}.json").read_text(encoding="utf-8"))["steps"]
    return {
        row["optimizer"]: min(row["ms"], row.get("device_ms", math.inf))
        for row in rows
        if row["workload"] == workload
    }
