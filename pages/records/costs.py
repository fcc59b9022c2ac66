"""What a step costs and how inexact it is: the records of ``results/step-cost``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import polarstep as ps
from pages import ROOT
from pages.records import read_json

STEP_COST = "results/step-cost"
TIMES = "results/step-cost/h200-peers.json"
MAPS = "results/step-cost/h200-maps.json"
"""All our maps in one run, after their kernels had changed; its rows replace those of TIMES."""
MAPS_AGAIN = "results/step-cost/h200-again.json"
"""Some rows of MAPS in another run, at a later commit."""
WITH_AN_RMS = "results/step-cost/h200-rms.json"
"""Three maps with ``shape_scale="rms"`` and without, in one run."""
BETWEEN = "results/step-cost/h200-between.json"
"""A few maps on matrices of 384 to 4096 rows, for what the other two lack."""
ACCURACY = "results/step-cost/h200-accuracy.txt"
"""γ and ν of applied updates."""
HELD = {"nanoGPT": 768, "8B layer": 4096}
"""The short side of the matrices of a workload."""
INNER = ("orthonormalization", "inner iteration")
"""The phases of a warm step that work on small matrices."""
FULL_SPACE = "full space, PolarExpress 5"
"""Full space in the records of times."""
SIXTH, EIGHTH = "Deflated, ℓ = a sixth", "Deflated, ℓ = an eighth"
TWELFTH = "Deflated, ℓ = a twelfth"
"""Heads of three widths. ``auto`` takes ℓ = a sixth of the short side, from 2048 rows on an eighth."""
SCALED_SIXTH = "Deflated, ℓ = a sixth, rest scaled"
AUTO = "auto"
"""``auto`` itself, in MAPS. Rows of this name in earlier records are of other maps."""
HOSTS = ("results/step-cost/h200.json", "results/step-cost/h200-deflated.json", TIMES)
"""Records of different hosts. Rows of other libraries, whose code is the same in them, are compared."""
TIMED_AS = {
    (SCALED_SIXTH, "nanoGPT"): "Deflated 120, warm, rest scaled",
    (SIXTH, "nanoGPT"): "Deflated 120, warm, one step",
    (EIGHTH, "nanoGPT"): "Deflated 88, warm, one step",
    (TWELFTH, "nanoGPT"): "Deflated 56, warm, one step",
}
"""Rows of the records that are heads of these widths, by workload."""
TIMED_ON_ARM = {
    (SIXTH, "nanoGPT"): "auto",
    (TWELFTH, "nanoGPT"): "Deflated 48, warm, one step",
}
"""The same for the record of an ARM CPU, which has rank 48 in place of 56."""
COLUMNS_ON_ARM = {SIXTH: 128, TWELFTH: 56}
"""ℓ of these rows; other sketches of the record have that of ``step_workloads.ON_A_CPU``."""


@cache
def steps(record: str = TIMES) -> dict[tuple[str, str], dict[str, Any]]:
    """What ``step_cost.py`` measured, by optimizer and workload.

    Those of :data:`TIMES` are with the rows of :data:`MAPS` in their places, and with those of
    :data:`BETWEEN` where both have none. A ratio is to AdamW in the run of its row.
    """
    records = (BETWEEN, TIMES, MAPS) if record == TIMES else (record,)
    rows = [read_json(each)["steps"] for each in records]
    found = {(row["optimizer"], row["workload"]): row for part in rows for row in part}
    timed_as = TIMED_ON_ARM if record.endswith("cpu-arm.json") else TIMED_AS
    for (name, load), timed in timed_as.items():
        for suffix in ("", ", rows normalized"):
            if (timed + suffix, load) in found:
                found[name + suffix, load] = found[timed + suffix, load]
    return found


def on_hosts(name: str, load: str) -> list[dict[str, Any]]:
    """The rows of another library's optimizer in the records of :data:`HOSTS` that have it."""
    return [rows[name, load] for record in HOSTS if (name, load) in (rows := steps(record))]


class Applied(NamedTuple):
    """γ and ν of applied updates: a line of what ``step_accuracy.py`` prints, for a map and matrices.

    ``median`` and ``largest`` are of γ; ``delta`` is the largest Δγ.
    """

    matrices: str
    name: str
    median: float
    largest: float
    delta: float
    nu: float


def applied(record: Path = ROOT / ACCURACY) -> list[Applied]:
    """What ``step_accuracy.py`` printed, line by line."""
    line = r"^  (\S.*?)\s{2,}(\S.*?)\s+γ\s+(\S+)\s+(\S+)\s+Δγ\s+(\S+)\s+ν (\S+)$"
    found = re.findall(line, record.read_text(encoding="utf-8"), re.M)
    return [Applied(matrices, name, *map(float, rest)) for matrices, name, *rest in found]


def columns_of_auto() -> tuple[int, ...]:
    """ℓ that ``auto`` takes on a GPU for square matrices of the widths of :data:`HELD`."""
    found = []
    for d in HELD.values():
        polar = ps.Auto().on(d, d, torch.device("cuda"))
        assert isinstance(polar, ps.Deflated), d
        found.append(polar.head.width)
    return tuple(found)


def memory(row: Mapping[str, Any] | None) -> str:
    """MiB of an optimizer's state, and what a step takes besides, from a row of :func:`steps`."""
    return f"{row['state_mib']:.0f} + {row['extra_mib']:.0f}" if row else "not measured"
