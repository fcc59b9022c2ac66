"""What times were measured on: which device, how many runs shared it, which code ran, and how."""

from __future__ import annotations

import json
import math
from datetime import datetime

import pandas as pd

from polarstep_lab.records.record import RunRecord

__all__ = ["at_a_time", "commit_of", "device_of", "ran_alone", "runtime_of", "span_of"]


def device_of(run: RunRecord) -> str:
    """What a run was measured on; on a CPU that includes how many threads it had."""
    environment = run.environment
    name = str(environment.get("device_name") or environment.get("device") or "unknown device")
    threads = environment.get("threads")
    on_cpu = str(environment.get("device", "")).startswith("cpu")
    return f"{name}, {threads} thread{'s' * (threads != 1)}" if on_cpu and threads else name


def commit_of(run: RunRecord) -> str:
    """The short commit that a run was made by; says so where the source had been changed."""
    commit = str(run.environment.get("git_commit") or "")
    if not commit:
        return "not recorded"
    return f"{commit[:7]} with changes" if commit.endswith("+") else commit[:7]


def runtime_of(run: RunRecord) -> dict[str, str]:
    """The settings that change how long a step takes and not what it computes.

    A setting that the config leaves open has the value that the device decided on.
    """
    runtime = run.identity.config.get("runtime") or {}
    names = ("compile", "precision", "micro_batch", "cuda_graph")
    found = {name: runtime[name] for name in names if name in runtime}
    on_gpu = str(run.environment.get("device", "")).startswith("cuda")
    if "compile" in found and found["compile"] is None:
        found["compile"] = on_gpu and run.identity.benchmark == "nanogpt"
    if found.get("precision") == "auto":
        found["precision"] = "bfloat16" if on_gpu else "float32"
    return {
        f"runtime.{name}": value if isinstance(value, str) else json.dumps(value)
        for name, value in found.items()
    }


def span_of(run: RunRecord) -> tuple[float, float]:
    """When a run began and ended, in seconds; NaN where that was not recorded.

    The first second is left out, since starts are recorded to the second.
    """
    try:
        began = datetime.fromisoformat(str(run.environment.get("started"))).timestamp()
    except ValueError:
        return math.nan, math.nan
    return (began + 1, began + run.seconds) if run.seconds > 1 else (math.nan, math.nan)


def at_a_time(runs: pd.DataFrame) -> int:
    """How many of ``runs`` were under way at once."""
    spans = runs[["began", "ended"]].dropna()
    if spans.empty:
        return 1
    changes = pd.concat([pd.Series(1, spans["began"]), pd.Series(-1, spans["ended"])])
    return max(1, int(changes.groupby(level=0).sum().cumsum().max()))


def ran_alone(runs: pd.DataFrame) -> pd.Series:
    """For each run, whether no other run was under way on the same device at the same time."""
    known = runs.dropna(subset=["began", "ended"]).sort_values(["began", "ended"])
    devices = known.groupby("device")
    earlier = devices["ended"].cummax().groupby(known["device"]).shift(fill_value=-math.inf)
    later = devices["began"].shift(-1, fill_value=math.inf)
    alone = (known["began"] >= earlier) & (known["ended"] <= later)
    return alone.reindex(runs.index, fill_value=False)
