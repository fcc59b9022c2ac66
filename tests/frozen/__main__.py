"""``python -m tests.frozen --before FOLDER``: the same steps by this tree and by another one.

The table of :mod:`tests.frozen.rows` is stepped by two interpreters on one machine, one with the package
in ``src`` of this tree and one with that in ``src`` of FOLDER. X and the state are compared after each
step: bit for bit for one process and for the kernels (by Triton's interpreter), to 1e-12 in float64 on
two ranks. Every row that differs is printed, and the exit status is then 1. ``--only PATTERN`` takes the
rows whose title, as "alone: warm, stack", has PATTERN.

A row that raises an error counts as different. ``--gone TEXT`` allows it where the title or the error
has TEXT: for what was taken out on purpose.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
SELECTIONS = ("alone", "ranks", "kernels")
# Ranks may add in another order. Entries of X are near one.
ON_RANKS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def stepped(tree: Path, selection: str, pattern: str, folder: Path) -> dict[str, Any]:
    """What the package in ``tree`` makes of a selection's rows, by an interpreter of its own."""
    file = folder / selection
    path = os.pathsep.join([str(tree / "src"), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    if selection == "kernels":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.frozen.steps", selection, pattern, str(file)]
    subprocess.run(command, env=environment, cwd=ROOT, check=True)
    found = torch.load(file)
    assert Path(found["polarstep"]).is_relative_to(tree.resolve()), found["polarstep"]
    return found["rows"]


def difference(old: Any, new: Any, selection: str) -> str | None:
    """What differs first between two trees in the steps of a row, in words."""
    if isinstance(old, str) or isinstance(new, str):
        return f"{_told(old)}; now {_told(new)}"
    for step, (its, ours) in enumerate(zip(old, new, strict=True)):
        if missing := its.keys() ^ ours.keys():
            return f"step {step}: {', '.join(sorted(missing))} in one tree alone"
        for key, X in its.items():
            Y = ours[key]
            if X.shape != Y.shape or X.dtype != Y.dtype:
                return f"step {step}: {key} is {_form(X)}; now {_form(Y)}"
            if not torch.allclose(X, Y, rtol=0, atol=0, equal_nan=True):
                off = float((X.double() - Y.double()).abs().max())
                if selection != "ranks" or not off <= ON_RANKS.get(X.dtype, 0) * _size(X):
                    return f"step {step}: {key} differs by {off:.2g}"
    return None


def _told(steps: Any) -> str:
    return steps if isinstance(steps, str) else "it stepped"


def _form(X: Tensor) -> str:
    return f"{tuple(X.shape)}, {X.dtype}"


def _size(X: Tensor) -> float:
    return max(1.0, float(X.abs().max()))


def main(argv: list[str] | None = None) -> int:
    """Compare; return 1 if a row differs, or if no row was taken."""
    parser = argparse.ArgumentParser(prog="python -m tests.frozen")
    parser.add_argument("--before", type=Path, required=True, help="the other tree")
    parser.add_argument("--only", default="", metavar="PATTERN", help="rows whose title has it")
    parser.add_argument(
        "--gone", action="append", default=[], metavar="TEXT", help="what is meant to be gone"
    )
    parser.add_argument("--selection", choices=SELECTIONS, action="append", help="default: all")
    given = parser.parse_args(argv)
    count = differing = 0
    with tempfile.TemporaryDirectory() as name:
        for selection in given.selection or SELECTIONS:
            begun, folders = time.monotonic(), (Path(name, "before"), Path(name, "now"))
            for folder in folders:
                folder.mkdir(exist_ok=True)
            old, new = (
                stepped(tree, selection, given.only, folder)
                for tree, folder in zip((given.before, ROOT), folders, strict=True)
            )
            found = {row: difference(old[row], new[row], selection) for row in old}
            wrong = {
                row: told
                for row, told in found.items()
                if told and not any(text in f"{row}: {told}" for text in given.gone)
            }
            for row, told in wrong.items():
                print(f"{selection}: {row}: {told}")
            took = time.monotonic() - begun
            print(f"{selection}: {len(found)} rows, {len(wrong)} differ; {took:.0f} s", flush=True)
            count, differing = count + len(found), differing + len(wrong)
    return 1 if differing or not count else 0


if __name__ == "__main__":
    sys.exit(main())
