"""Two versions of the package, measured in turn: how much faster or slower is a step than before?"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = Path(__file__).with_name("step_cost.py")
# The time of a step as its caller sees it, and on a GPU also that of its graphs alone.
KINDS = ("ms", "device_ms")
PACKAGE = "package: "
"""How the line begins on which ``step_cost.py`` prints the package that it measures."""

Key = tuple[str, str]  # workload and optimizer


def beside(path: Path, names: list[str], rounds: int, options: list[str]) -> list[dict[str, Any]]:
    """Median times with this package and with the one under ``path``/src, and median ratios.

    ``names`` are the workloads, ``options`` the further options of ``step_cost.py``. Each
    measurement is a process of its own. The two packages take turns and swap their order each
    round, so that a machine that slows down slows both. AdamW is the control: its ratio is noise.
    """
    pairs: dict[Key, dict[str, list[tuple[float, float]]]] = {}
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", flush=True)
        both = {}
        for root in (ROOT, path) if turn % 2 == 0 else (path, ROOT):
            both[root] = _steps_of(root, names, options)
        for key in (key for key in both[ROOT] if key in both[path]):
            new, old = both[ROOT][key], both[path][key]
            for kind in KINDS:
                if kind in new and kind in old:
                    of_kind = pairs.setdefault(key, {}).setdefault(kind, [])
                    of_kind.append((new[kind], old[kind]))
        for key, of_key in pairs.items():  # of all rounds so far, should the next be cut off
            print(_line(_row(*key, of_key)), flush=True)
    return [_row(*key, of_key) for key, of_key in pairs.items()]


def _row(
    workload: str, optimizer: str, pairs: dict[str, list[tuple[float, float]]]
) -> dict[str, Any]:
    """Medians and ratios of the (now, before) pairs of milliseconds of all rounds."""
    row: dict[str, Any] = {"workload": workload, "optimizer": optimizer}
    for kind, of_kind in pairs.items():
        new, old = (statistics.median(each) for each in zip(*of_kind, strict=True))
        ratios = [a / b for a, b in of_kind]
        row |= {kind: new, f"{kind}_before": old, f"{kind}_ratio": statistics.median(ratios)}
        row[f"{kind}_ratios"] = ratios
    return row


def _line(row: dict[str, Any]) -> str:
    """A row in words."""
    parts = [
        f"{row[kind]:9.3f} ms, before {row[f'{kind}_before']:9.3f}, "
        f"ratio {row[f'{kind}_ratio']:.3f} "
        f"({min(row[f'{kind}_ratios']):.3f}–{max(row[f'{kind}_ratios']):.3f})"
        for kind in KINDS
        if kind in row
    ]
    return f"  {row['workload']:9} {row['optimizer']:36} {';  on the device '.join(parts)}"


def _steps_of(root: Path, names: list[str], options: list[str]) -> dict[Key, dict[str, Any]]:
    """The rows that ``step_cost.py`` measures with the package under ``root``/src."""
    source = root / "src"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.jsonl"
        command = [sys.executable, str(SCRIPT), "--only-steps", "--json", str(out), *options]
        command += [f"--workload={name}" for name in names]
        search = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} with {source} failed:\n{done.stderr}")
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    lines = done.stdout.splitlines()
    (package,) = (line.removeprefix(PACKAGE) for line in lines if line.startswith(PACKAGE))
    if not Path(package).is_relative_to(source):
        raise RuntimeError(
            f"the steps were measured with {package}: expected the package under {source}; "
            "give --beside the root of a checkout, which has src/polarstep"
        )
    return {(row["config"]["workload"], row["variant"]): row["result"] for row in rows}
