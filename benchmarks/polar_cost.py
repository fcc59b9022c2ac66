"""What does an optimizer step cost here, against a hand-written Newton–Schulz loop?

    python benchmarks/polar_cost.py                 # a few minutes on two cores
    python benchmarks/polar_cost.py --json          # one object a row, for a script
    python benchmarks/polar_cost.py --copies 1 --repeats 3

The loop follows the paper literally: float32, one parameter after the other, the polynomial and
nothing else. The optimizer's rows are whole steps, momentum, decay and update included. Methods
take turns, so that a busy machine slows all of them alike; times are medians.

The promise, on a CPU: a full-space step is at least as fast as the loop with as many steps, and
``LowRank(200)`` at least five times as fast as the loop with seven steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from polarstep import Kaczmarz, LowRank, Muon, NewtonSchulz, PolarMap, rng
from polarstep.maps import Warm

SHAPES = {"768×768": (768, 768), "3072×768": (3072, 768)}

LOOPS = {"loop, 7 steps": 7, "loop, 5 steps": 5}

MAPS: dict[str, PolarMap] = {
    "full space, 7 × quintic": NewtonSchulz(7, "quintic"),
    "full space, 5 × quintic": NewtonSchulz(5, "quintic"),
    "full space, 5 × PolarExpress": NewtonSchulz(5, "polar-express"),
    "LowRank(200)": LowRank(200),
    "LowRank(200, power=0.5)": LowRank(200, power=0.5),
    "LowRank(200, sketch=Kaczmarz())": LowRank(200, sketch=Kaczmarz()),
    "LowRank(200, sketch=Warm())": LowRank(200, sketch=Warm()),
}

# For a row: the loop to compare it with, and how many times as fast the row should be.
PROMISES = {
    "full space, 7 × quintic": ("loop, 7 steps", 1.0),
    "full space, 5 × quintic": ("loop, 5 steps", 1.0),
    "LowRank(200)": ("loop, 7 steps", 5.0),
}


@dataclass(frozen=True)
class Row:
    """The cost of one method on one set of matrices."""

    matrices: str
    method: str
    milliseconds: float  # of a step on one matrix, median
    over_loop_7: float  # how many times as fast as the loop with seven steps
    over_loop_5: float
    threads: int


def momentum(count: int, m: int, n: int) -> list[Tensor]:
    """Matrices whose singular values decay, as in momentum."""
    scale = torch.arange(1, n + 1) ** -0.7
    return [
        torch.randn(m, n, generator=rng.generator("polar cost", m, n, i)) * scale
        for i in range(count)
    ]


def newton_schulz_loop(gradients: list[Tensor], steps: int) -> list[Tensor]:
    """The paper's quintic iteration, written literally."""
    results = []
    for G in gradients:
        X = G.T if G.shape[0] > G.shape[1] else G
        X = X / X.norm()
        for _ in range(steps):
            A = X @ X.T
            X = 1.875 * X + (-1.25 * A + 0.375 * (A @ A)) @ X
        results.append(X.T if G.shape[0] > G.shape[1] else X)
    return results


def step_of(gradients: list[Tensor], polar: PolarMap) -> Callable[[], object]:
    """A whole optimizer step on parameters of its own."""
    params = [torch.nn.Parameter(torch.zeros_like(G)) for G in gradients]
    for p, G in zip(params, gradients, strict=True):
        p.grad = G
    return Muon(params, polar=polar, weight_decay=0.01).step


def measure(copies: int, repeats: int, progress: Progress) -> list[Row]:
    """Medians over ``repeats`` rounds in which every method has its turn."""
    task = progress.add_task(
        "measuring", total=len(SHAPES) * (len(LOOPS) + len(MAPS)) * (repeats + 1)
    )
    rows = []
    for name, (m, n) in SHAPES.items():
        gradients = momentum(copies, m, n)
        methods: dict[str, Callable[[], object]] = {
            loop: partial(newton_schulz_loop, gradients, steps) for loop, steps in LOOPS.items()
        }
        methods |= {label: step_of(gradients, polar) for label, polar in MAPS.items()}
        times: dict[str, list[float]] = {label: [] for label in methods}
        for turn in range(repeats + 1):
            for label, run in methods.items():
                progress.update(task, description=f"{name}: {label}")
                start = time.perf_counter()
                run()
                if turn > 0:  # the first is a warm-up
                    times[label].append(time.perf_counter() - start)
                progress.advance(task)
        median = {label: statistics.median(each) / copies for label, each in times.items()}
        rows += [
            Row(
                matrices=name,
                method=label,
                milliseconds=1e3 * seconds,
                over_loop_7=median["loop, 7 steps"] / seconds,
                over_loop_5=median["loop, 5 steps"] / seconds,
                threads=torch.get_num_threads(),
            )
            for label, seconds in median.items()
        ]
    return rows


def tables_of(rows: list[Row]) -> list[Table]:
    """A table for each shape, with the promised speed beside the measured speed."""
    tables = []
    for shape in SHAPES:
        table = Table(title=f"One step on a {shape} matrix, {rows[0].threads} thread(s)")
        table.add_column("method", no_wrap=True)
        for heading in ("ms", "× loop of 7", "× loop of 5", "promised"):
            table.add_column(heading, justify="right")
        for row in (row for row in rows if row.matrices == shape):
            promise = ""
            if row.method in PROMISES:
                loop, factor = PROMISES[row.method]
                measured = row.over_loop_7 if LOOPS[loop] == 7 else row.over_loop_5
                verdict = "[green]kept" if measured >= factor else "[red]missed"
                promise = f"≥ {factor:g} × loop of {LOOPS[loop]}: {verdict}"
            ratios = f"{row.over_loop_7:.2f}", f"{row.over_loop_5:.2f}"
            table.add_row(row.method, f"{row.milliseconds:.1f}", *ratios, promise)
        tables.append(table)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--copies", type=int, default=4, help="matrices of each shape")
    parser.add_argument("--repeats", type=int, default=7, help="rounds the median is taken over")
    parser.add_argument("--threads", type=int, help="threads of torch; its own choice by default")
    parser.add_argument("--json", action="store_true", help="print one JSON object a row")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    console = Console(stderr=options.json)
    with Progress(console=console, transient=True) as progress:
        rows = measure(options.copies, options.repeats, progress)
    if options.json:
        for row in rows:
            print(json.dumps(asdict(row), ensure_ascii=False))
    else:
        console.print(*tables_of(rows))


if __name__ == "__main__":
    main()
