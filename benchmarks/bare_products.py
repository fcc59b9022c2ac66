"""How much of a step on a CPU are its matrix products, and how fast could a step be with them alone?

    python benchmarks/bare_products.py --json results/step-cost/cpu-bare.json
    python benchmarks/bare_products.py --quick     # small matrices, to see that it works

The products of one step are recorded by their shapes, strides and precisions, and replayed on random
numbers with nothing around them. Whole steps and replays take turns, so that a machine that slows down
slows all of them. No step with these products is faster against full space than the ratio of the
replays, whatever is saved around them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import polarstep as ps
from polarstep_lab.storage import write_json
from step_optimizers import maps
from step_workloads import ON_A_CPU, QUICK, parameters
from timing import machine

FULL_SPACE = "full space, PolarExpress 5"
MAPS = (FULL_SPACE, "Deflated 56, warm, one step", "Deflated 120, warm, one step")
PRODUCTS = ("aten.mm.", "aten.bmm.", "aten.addmm.", "aten.baddbmm.")


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the matrix products that torch computes, as functions that compute them again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Callable[[], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(func).startswith(PRODUCTS):
            again = [_alike(each) for each in args]
            options = {key: _alike(each) for key, each in kwargs.items()}
            self.found.append(lambda: func(*again, **options))
        return func(*args, **kwargs)


def _alike(value: Any) -> Any:
    """Random numbers that lie in memory as those of a tensor do; another value as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return made.normal_()


def recorded(optimizer: torch.optim.Optimizer) -> list[Callable[[], Any]]:
    """The products of the next step."""
    with Products() as seen:
        optimizer.step()
    return seen.found


def _all_again(products: list[Callable[[], Any]]) -> list[Any]:
    """What all these products give, computed once more."""
    return [again() for again in products]


def measured(quick: bool, rounds: int) -> list[dict[str, Any]]:
    """For each map the median ms of whole steps and of their products, and the ratios to full space."""
    load = QUICK["small"] if quick else ON_A_CPU["nanoGPT"]
    known = maps(load.rank, load.oversample)
    work: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {}
    counts = {}
    for name in MAPS:
        params = parameters(load.shapes, torch.device("cpu"))
        optimizer = ps.Muon(params, lr=1e-5, polar=known[name]())
        for _ in range(3):
            optimizer.step()
        products = recorded(optimizer)
        counts[name] = len(products)
        work[name] = optimizer.step, partial(_all_again, products)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in MAPS}
    for turn in range(rounds):
        for name, both in work.items():
            for each, spent in zip(both, times[name], strict=True):
                begin = time.perf_counter()
                each()
                spent.append(1000 * (time.perf_counter() - begin))
        print(f"round {turn + 1} of {rounds}", end="\n" if turn + 1 == rounds else "\r", flush=True)
    medians = {name: tuple(map(statistics.median, spent)) for name, spent in times.items()}
    rows = []
    for name, (whole, bare) in medians.items():
        full_whole, full_bare = medians[FULL_SPACE]
        row = {"map": name, "products": counts[name], "ms": whole, "bare_ms": bare}
        rows.append(row | {"faster": full_whole / whole, "bare_faster": full_bare / bare})
    return rows


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write what was measured to this file")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--quick", action="store_true", help="small matrices and three rounds")
    options = parser.parse_args()
    torch.manual_seed(0)
    where = machine(torch.device("cpu"))
    print(where)
    rows = measured(options.quick, 3 if options.quick else options.rounds)
    for row in rows:
        print(
            f"{row['map']:30}  step {row['ms']:7.1f} ms, {row['faster']:.2f} times as fast as full "
            f"space; {row['products']} products alone {row['bare_ms']:7.1f} ms, "
            f"{row['bare_faster']:.2f} times"
        )
    if options.json:
        write_json(options.json, {"machine": where, "maps": rows})
        print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
