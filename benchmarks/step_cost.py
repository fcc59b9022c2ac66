"""What does a whole optimizer step cost, and where does the time go?

    python benchmarks/step_cost.py                      # on the GPU if there is one
    python benchmarks/step_cost.py --device cpu --json cost.json
    python benchmarks/step_cost.py --device cpu --no-tiles   # as on a CPU without bfloat16 tiles
    python benchmarks/step_cost.py --sweep              # cost against width and against rank, too
    python benchmarks/step_cost.py --figure cost.json   # draw what an earlier run measured
    python benchmarks/step_cost.py --beside ../before   # against the package of another checkout
    python benchmarks/step_cost.py --only-steps --optimizer auto   # a row of the table, and AdamW
    python benchmarks/step_cost.py --only-steps --workload "width 640" --optimizer auto
    python benchmarks/step_cost.py --quick              # small matrices, a few seconds on a laptop

One run measures AdamW (fused), the peers that can be imported (dion's from a
checkout, ``POLARSTEP_PEERS=FOLDER``), with and without dion's CUDA graph and Triton kernels, and ours
with several polar maps, on the same parameters. The floor is the time that no implementation can go
below: the bytes that must be moved and the products that must be computed, at the rates measured here.

Some rows are measured only where --optimizer names them. "Deflated, ℓ = a sixth", "an eighth", "a
twelfth" and "LowRank, ℓ = a quarter" have these parts of the short side and sketch every shape. Beside
"full space, PolarExpress 5" and "auto" they tell whether auto chose well, as on the widths between those
of the table ("width 384" to "width 704"). The deflated ones are also there with ", rows normalized".
Three maps are there with ", update RMS of 0.2", which is shape_scale="rms". "full space, PolarExpress 5,
in float32" and "Deflated 120, warm, one step, float8=False" tell what bfloat16 gains on a CPU with
tiles, where full space is in bfloat16 by default.
"Deflated 48, warm, one step, rows normalized" is a row of earlier records.

Without --optimizer all rows of the table are measured, of which there are more now than when some of the
records in results/step-cost were made. Its README has, for each record, the command that names its rows.

This file has the command line. The parts of the benchmark are files of their own:

    step_workloads    the matrices
    step_optimizers   the optimizers and polar maps
    step_times        the time of whole steps
    step_phases       the time of each phase of a LowRank step, and the floor
    step_sweeps       time against width and rank (--sweep)
    step_beside       two versions of the package in turn (--beside)
    step_figure       the figure (--figure)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

# With --beside this script also measures earlier versions of the package. In all its parts, modules
# that those versions may lack are imported where they are used.
import polarstep as ps
from polarstep_lab.storage import read_json, write_json
from step_beside import PACKAGE, beside
from step_phases import floor, phases, rates
from step_sweeps import exponent, sweeps
from step_times import UnknownOptimizer, whole_steps
from step_workloads import BETWEEN, ON_A_CPU, QUICK, WORKLOADS, Workload
from timing import machine


def main() -> None:
    """Measure, print, save."""
    parser = _parser()
    options = parser.parse_args()
    if options.figure:
        from step_figure import draw  # matplotlib is not needed to measure

        record = read_json(options.figure)
        if "phases" not in record:
            parser.error(
                f"--figure {options.figure}: expected the record of a whole run, with phases; this "
                "one is of --only-steps or --beside"
            )
        draw(record, options.figure.with_suffix(".png"))
        return
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
    chosen = {name: known[name] for name in names}
    if options.beside:
        record = _beside(options, names, device)
    else:
        try:
            if options.only_steps:
                record = _only_steps(chosen, device, only=options.optimizer)
            else:
                record = _everything(chosen, device, options.sweep, only=options.optimizer)
        except UnknownOptimizer as error:
            parser.error(str(error))
    if options.json:
        write_json(options.json, record)
        print(f"wrote {options.json}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--no-tiles", action="store_true", help="a CPU's products in float32 only")
    parser.add_argument("--sweep", action="store_true", help="also against width and rank")
    parser.add_argument("--figure", type=Path, help="draw the figure of an earlier --json file")
    parser.add_argument("--quick", action="store_true", help="small matrices and few repeats")
    parser.add_argument("--workload", action="append", help="only this one; may be repeated")
    parser.add_argument(
        "--optimizer", action="append", help="only this one beside AdamW; may be repeated"
    )
    parser.add_argument("--only-steps", action="store_true", help="AdamW and our optimizers alone")
    parser.add_argument("--beside", type=Path, help="a checkout whose package is measured in turn")
    parser.add_argument("--rounds", type=int, default=5, help="of --beside")
    return parser


def _beside(options: argparse.Namespace, names: list[str], device: torch.device) -> dict[str, Any]:
    """Times with this package and with that of another checkout, for the named workloads."""
    print(machine(device))
    passed = [f"--device={device}"]
    passed += ["--quick"] * options.quick + ["--no-tiles"] * options.no_tiles
    passed += [f"--optimizer={name}" for name in options.optimizer or []]
    rows = beside(options.beside.resolve(), names, options.rounds, passed)
    return {"machine": machine(device), "rounds": options.rounds, "beside": rows}


def _only_steps(
    workloads: dict[str, Workload], device: torch.device, *, only: list[str] | None
) -> dict[str, Any]:
    """Whole steps of AdamW and our optimizers. Prints where the measured package is."""
    print(machine(device))
    print(f"{PACKAGE}{Path(ps.__file__).resolve()}", flush=True)
    steps = []
    for name, workload in workloads.items():
        steps += whole_steps(name, workload, device, others=False, only=only)
    return {"machine": machine(device), "steps": steps}


def _everything(
    workloads: dict[str, Workload], device: torch.device, sweep: bool, *, only: list[str] | None
) -> dict[str, Any]:
    """The device's rates, and for each workload whole steps, their phases and the floor."""
    record: dict[str, Any] = {"machine": machine(device), "steps": [], "phases": {}, "floor": {}}
    print(record["machine"])
    record["rates"] = rate = rates(device)
    print(
        f"  memory {rate['bytes_per_ms'] / 1e9:.2f} TB/s, {rate['flops_per_ms'] / 1e9:.1f} TFLOP/s"
    )
    for name, workload in workloads.items():
        record["steps"] += whole_steps(name, workload, device, only=only)
        record["phases"][name] = phases(workload, device)
        record["floor"][name] = floor(workload, rate)
        shares = ", ".join(f"{k} {v:.3f}" for k, v in record["phases"][name].items())
        print(f"  {name:9} phases (ms): {shares}; floor {record['floor'][name]:.3f}", flush=True)
    if sweep:
        record["sweeps"] = sweeps(device)
        for kind, rows in record["sweeps"].items():
            for label in (k for k in rows[0] if k != "x"):
                print(f"  {label} grows as {kind}^{exponent(rows, label):.2f}")
    return record


if __name__ == "__main__":
    main()
