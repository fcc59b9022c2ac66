"""What does a whole optimizer step cost, ours and that of other libraries?

    python benchmarks/step_cost.py                      # on the GPU if there is one
    python benchmarks/step_cost.py --device cpu --json step-cost.jsonl
    python benchmarks/step_cost.py --device cpu --no-tiles   # as on a CPU without bfloat16 tiles
    python benchmarks/step_cost.py --beside ../before   # against the package of another checkout
    python benchmarks/step_cost.py --only-steps --optimizer auto   # a row of the table, and AdamW
    python benchmarks/step_cost.py --only-steps --workload "width 640" --optimizer auto
    python benchmarks/step_cost.py --quick              # small matrices, a few seconds on a laptop

One run measures AdamW (fused), the peers that can be imported, and ours with several polar maps, on the
same parameters. ``POLARSTEP_PEERS=FOLDER:FOLDER`` names checkouts of peers (dion, Emerging-Optimizers,
muonium); peers that are not there are left out, and no peer is needed. dion's are also measured in its
CUDA graph, plain, with its Triton kernels and with those of gram-newton-schulz. ``polarstep pack
step-cost.jsonl --out results/step-cost`` keeps what was measured.

Some rows are measured only where --optimizer names them. "Deflated, ℓ = a sixth", "an eighth", "a
twelfth" and "LowRank, ℓ = a quarter" have these parts of the short side and sketch every shape. Beside
"full space, PolarExpress 5" and "auto" they tell whether auto chose well, as on the widths between those
of the table ("width 384" to "width 704"). The deflated ones are also there with ", rows normalized".
Three maps are there with ", update RMS of 0.2", which is shape_scale="rms". "full space, PolarExpress 5,
in float32" and "Deflated 120, warm, one step, float8=False" tell what bfloat16 gains on a CPU with
tiles, where full space is in bfloat16 by default.

The parts are files of their own: step_workloads (the matrices), step_optimizers, step_times, and
step_beside (two versions of the package in turn).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# With --beside this script also measures earlier versions of the package. In all its parts, modules
# that those versions may lack are imported where they are used.
import polarstep as ps
from step_beside import PACKAGE, beside
from step_times import UnknownOptimizer, whole_steps
from step_workloads import BETWEEN, ON_A_CPU, QUICK, WORKLOADS
from timing import machine


def main() -> None:
    """Measure, print, and append lines of records to --json."""
    parser = _parser()
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.no_tiles:
        torch.backends.mkldnn.set_flags(_enabled=False)  # type: ignore[no-untyped-call]
    torch.manual_seed(0)
    workloads = WORKLOADS if device.type == "cuda" else ON_A_CPU
    workloads = QUICK if options.quick else workloads
    names = options.workload or list(workloads)
    known = workloads | BETWEEN
    if unknown := set(names) - set(known):
        parser.error(f"--workload {', '.join(unknown)}: expected one of {', '.join(known)}")
    print(machine(device))
    print(f"{PACKAGE}{Path(ps.__file__).resolve()}", flush=True)
    try:
        rows = [*_rows(options, names, known, device)]
    except UnknownOptimizer as error:
        parser.error(str(error))
    if options.json:
        with options.json.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(_line(row, options, device), ensure_ascii=False) + "\n")


def _rows(
    options: argparse.Namespace, names: list[str], known: dict[str, Any], device: torch.device
) -> Iterator[dict[str, Any]]:
    """What is measured: whole steps, or with --beside those of two versions."""
    if options.beside:
        passed = [f"--device={device}"]
        passed += ["--quick"] * options.quick + ["--no-tiles"] * options.no_tiles
        passed += [f"--optimizer={name}" for name in options.optimizer or []]
        yield from beside(options.beside.resolve(), names, options.rounds, passed)
        return
    for name in names:
        only, others = options.optimizer, not options.only_steps
        yield from whole_steps(name, known[name], device, others=others, only=only)


def _line(row: dict[str, Any], options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """A row as a line of a record."""
    result = {key: value for key, value in row.items() if key not in ("optimizer", "workload")}
    return {
        "kind": "beside" if options.beside else "time",
        "study": "step-cost",
        "part": options.part or device.type,
        "variant": row["optimizer"],
        "config": {"workload": row["workload"]},
        "environment": {"machine": machine(device)},
        "result": result,
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--json", type=Path, help="append what was measured to this file")
    parser.add_argument("--part", help="of results/step-cost that the lines are for, as h200-maps")
    parser.add_argument("--no-tiles", action="store_true", help="a CPU's products in float32 only")
    parser.add_argument("--quick", action="store_true", help="small matrices and few repeats")
    parser.add_argument("--workload", action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--optimizer", action="append", help="only this one beside AdamW; may be repeated"
    )
    parser.add_argument("--only-steps", action="store_true", help="AdamW and our optimizers alone")
    parser.add_argument("--beside", type=Path, help="a checkout whose package is measured in turn")
    parser.add_argument("--rounds", type=int, default=5, help="of --beside")
    return parser


if __name__ == "__main__":
    main()
