"""What times were measured on: which device, how many runs shared it, which code ran, and how."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

from polarstep_lab.records.record import RunRecord

__all__ = ["at_a_time", "commit_of", "device_of", "ran_alone", "runtime_of"]


def device_of(run: RunRecord) -> str:
    """What a run was measured on; on a CPU that includes how many threads it had."""
    environment = run.environment
    name = str(environment.get("device_name") or environment.get("device") or "unknown device")
    threads = environment.get("threads")
    on_cpu = str(environment.get("device", "")).startswith("cpu")
    return f"{name}, {threads} thread{'s' * (threads != 1)}" if on_cpu and threads else name


def commit_of(run: RunRecord) -> str | None:
    """The commit that a run was made by, short, with a word where the source was changed since."""
    commit = run.environment.get("git_commit")
    if not commit:
        return None
    return f"{commit[:7]} with changes" if str(commit).endswith("+") else str(commit)[:7]


def runtime_of(run: RunRecord) -> dict[str, str]:
    """The settings that change how long a step takes and not what it computes, as they were run.

    What a config leaves open, the device decides.
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


def at_a_time(runs: Iterable[RunRecord]) -> int:
    """How many of ``runs`` were under way at once."""
    spans = [span for run in runs if (span := _span(run))]
    moments = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return max(1, most)


def ran_alone(runs: Iterable[RunRecord]) -> frozenset[Path]:
    """The directories of the runs during which no other was under way on the same device."""
    alone = set()
    latest: dict[str, tuple[float, Path]] = {}  # where a device's runs end so far, and the last one
    spans = [(span, run) for run in runs if (span := _span(run))]
    for (start, end), run in sorted(spans, key=lambda item: (item[0], str(item[1].directory))):
        until, last = latest.get(device_of(run), (-math.inf, run.directory))
        if start < until:
            alone.discard(last)
        else:
            alone.add(run.directory)
        latest[device_of(run)] = max((until, last), (end, run.directory))
    return frozenset(alone)


def _span(run: RunRecord) -> tuple[float, float] | None:
    """When a run was under way, without its first second: starts are recorded to the second."""
    try:
        began = datetime.fromisoformat(str(run.environment.get("started"))).timestamp()
    except ValueError:
        return None
    return (began + 1, began + run.seconds) if run.seconds > 1 else None
