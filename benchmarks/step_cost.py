"""What does a whole optimizer step cost, and where does the time go?

    python benchmarks/step_cost.py                      # on the GPU if there is one
    python benchmarks/step_cost.py --device cpu --json cost.json
    python benchmarks/step_cost.py --device cpu --no-tiles   # as on a CPU without bfloat16 tiles
    python benchmarks/step_cost.py --sweep              # cost against width and against rank, too
    python benchmarks/step_cost.py --figure cost.json   # draw what an earlier run measured
    python benchmarks/step_cost.py --beside ../before   # against the package of another checkout
    python benchmarks/step_cost.py --only-steps --optimizer auto   # a row of the table, and AdamW
    python benchmarks/step_cost.py --quick              # small matrices, a few seconds on a laptop

One run measures AdamW (fused), the peers that can be imported (polarstep_lab.peers; dion's from a
checkout, ``POLARSTEP_PEERS=FOLDER``), with and without dion's CUDA graph and Triton kernels, and ours
with several polar maps, on the same parameters. The floor is the time that no implementation can go
below: the bytes that must be moved and the products that must be computed, at the rates measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# With --beside this script also measures another version of the package. Modules that the other
# version may lack are imported where they are used.
import polarstep as ps
from polarstep import rng
from timing import LEAST_MILLISECONDS, clock, machine, milliseconds, replayed_milliseconds

# (how many, m, n), and rank and oversampling of the sketch
WORKLOADS: dict[str, tuple[list[tuple[int, int, int]], int, int]] = {
    "nanoGPT": ([(40, 768, 768), (24, 3072, 768)], 200, 8),
    "8B layer": ([(2, 4096, 4096), (3, 14336, 4096)], 248, 8),
    "CIFAR-10": ([(1, 64, 216), (1, 64, 576), (1, 256, 576), (3, 256, 2304)], 128, 10),
}
# Ten columns more than the rank, the default of LowRank(200).
ON_A_CPU = {
    "nanoGPT": ([(4, 768, 768), (2, 3072, 768)], 200, 10),
    "one of each": ([(1, 768, 768), (1, 3072, 768)], 200, 10),
    "768×768": ([(1, 768, 768)], 200, 10),
    "3072×768": ([(1, 3072, 768)], 200, 10),
    "CIFAR-10": WORKLOADS["CIFAR-10"],
}
QUICK = {"small": ([(3, 256, 256), (2, 384, 128)], 24, 8)}

# Four steps with as much gain as seven steps of the paper's quintic.
INNER = ps.NewtonSchulz(4, "polar-express-sketch")


# Maps that are also timed with normalized rows.
WITH_ROWS = ("full space, PolarExpress 5", "Deflated 48, warm, one step")


def maps(rank: int, oversample: int) -> dict[str, Callable[[], ps.PolarMap]]:
    """Functions that make the polar maps to compare."""

    def low_rank(**options: Any) -> ps.LowRank:
        return ps.LowRank(rank, oversample, **options)

    return {
        "LowRank, warm": lambda: low_rank(sketch=ps.Warm(), inner=INNER),
        "LowRank, Gaussian h=0": lambda: low_rank(power=0, inner=INNER),
        "LowRank, Gaussian h=0, kept 4 steps": lambda: low_rank(power=0, inner=INNER, keep=4),
        "LowRank, Gaussian h=½": lambda: low_rank(power=0.5, inner=INNER),
        "LowRank, Kaczmarz h=½": lambda: low_rank(power=0.5, sketch=ps.Kaczmarz(), inner=INNER),
        "LowRank, the paper's (h=1, q=7)": low_rank,
        "LowRank, Gaussian h=1": lambda: low_rank(inner=INNER),
        "Deflated, Gaussian h=1, rest scaled": lambda: ps.Deflated(low_rank(inner=INNER)),
        "Deflated, warm, one step": lambda: ps.Deflated(
            low_rank(sketch=ps.Warm(), inner=INNER), ps.NewtonSchulz(1, "flat")
        ),
        "Deflated 48, warm, one step": lambda: ps.Deflated(
            ps.LowRank(48, 8, sketch=ps.Warm(), inner=INNER), ps.NewtonSchulz(1, "flat")
        ),
        "Deflated 48, Gaussian h=1, one step": lambda: ps.Deflated(
            ps.LowRank(48, 8, inner=INNER), ps.NewtonSchulz(1, "flat")
        ),
        "auto": lambda: ps.Auto(),
        "auto, cheap": lambda: ps.Auto("cheap"),
        "full space, PolarExpress 5": lambda: ps.NewtonSchulz(5, "polar-express"),
        "full space, quintic 7": lambda: ps.NewtonSchulz(7),
    }


def parameters(shapes: list[tuple[int, int, int]], device: torch.device) -> list[Tensor]:
    """Random parameters with random gradients."""
    params = []
    for count, m, n in shapes:
        for _ in range(count):
            p = torch.nn.Parameter(torch.randn(m, n, device=device) * 0.02)
            p.grad = torch.randn_like(p)
            params.append(p)
    return params


def optimizers(
    params: list[Tensor], rank: int, oversample: int, device: torch.device, *, others: bool = True
) -> Iterator[tuple[str, Callable[[], torch.optim.Optimizer]]]:
    """Functions that make the optimizers of the table; without ``others`` only AdamW and ours."""
    yield "AdamW, fused", lambda: torch.optim.AdamW(params, lr=1e-5, fused=True)
    if others and device.type == "cuda":  # most peers are bf16 only: minutes on most CPUs
        yield from peers(params)
    if others and device.type == "cpu":
        yield "a loop of Newton–Schulz 7", lambda: HandWritten(params, 7)
        yield "a loop of Newton–Schulz 5", lambda: HandWritten(params, 5)
        yield "a loop of batches, 7", lambda: Batched(params, 7)
    for name, polar in maps(rank, oversample).items():
        yield name, lambda polar=polar: ps.Muon(params, lr=1e-5, polar=polar())
    with_rows = {name: maps(rank, oversample)[name] for name in WITH_ROWS}
    for name, polar in with_rows.items():
        yield (
            f"{name}, rows normalized",
            lambda polar=polar: ps.Muon(
                params, lr=1e-5, polar=polar(), transform=ps.NormalizedRows()
            ),
        )


def peers(params: list[Tensor]) -> Iterator[tuple[str, Callable[[], torch.optim.Optimizer]]]:
    """Functions that make the peers; what cannot be imported is left out and said."""
    from polarstep_lab.peers import PEERS, load

    for peer in PEERS.values():
        try:
            made = load(peer)
        except ValueError as missing:
            print(f"  left out: {peer.title}: {missing}", flush=True)
            continue
        yield peer.title, partial(made, params, lr=1e-5)
        if peer.package == "dion":
            from dion.cuda_graph import CudaGraphOptimizer

            for suffix, options in (
                (", CUDA graph", {}),
                (", CUDA graph, Triton", {"use_triton": True}),
            ):
                yield (
                    f"{peer.title}{suffix}",
                    lambda made=made, options=options: CudaGraphOptimizer(
                        made(params, lr=1e-5, **options), warmup_steps=3
                    ),
                )


class HandWritten(torch.optim.Optimizer):
    """Muon in ten lines: a float32 quintic for one parameter after another."""

    def __init__(self, params: list[Tensor], steps: int) -> None:
        super().__init__(params, {"steps": steps})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                C = self.state[p].setdefault("C", torch.zeros_like(p))
                C.mul_(0.95).add_(p.grad)
                X = p.grad + 0.95 * C
                X = (X.T if X.shape[0] > X.shape[1] else X) / X.norm()
                for _ in range(group["steps"]):
                    A = X @ X.T
                    X = 1.875 * X + (-1.25 * A + 0.375 * A @ A) @ X
                p.add_(X.T if p.shape[0] > p.shape[1] else X, alpha=-1e-5)


class Batched(HandWritten):
    """The same, batched: all matrices of a shape at once, and additions within the products."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for (m, n), params in shapes.items():
                C = [self.state[p].setdefault("C", torch.zeros_like(p)) for p in params]
                grads = [p.grad for p in params]
                torch._foreach_mul_(C, 0.95)
                torch._foreach_add_(C, grads)
                X = torch.stack(torch._foreach_add(grads, C, alpha=0.95))
                X = (X.mT if m > n else X) / X.flatten(1).norm(dim=1)[:, None, None]
                for _ in range(group["steps"]):
                    A = X @ X.mT
                    X = torch.baddbmm(
                        X, torch.baddbmm(A, A, A, beta=-1.25, alpha=0.375), X, beta=1.875
                    )
                torch._foreach_add_(params, list(X.mT if m > n else X), alpha=-1e-5)


def whole_steps(
    name: str,
    workload: Any,
    device: torch.device,
    *,
    others: bool = True,
    only: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Median time of ``step()`` for every optimizer, and on a GPU the memory it takes.

    ``only``: names of optimizers of the table that are measured beside AdamW; ``None`` for all.
    """
    shapes, rank, oversample = workload
    params = parameters(shapes, device)
    made = optimizers(params, rank, oversample, device, others=others)
    found = _that_run(
        (label, make)
        for label, make in made
        if only is None or label in only or label.startswith("AdamW")
    )
    measured = _one_by_one(found, device) if device.type == "cuda" else _in_turn(found)
    rows: list[dict[str, Any]] = []
    for row in measured:
        ratio = row["ms"] / rows[0]["ms"] if rows else 1.0
        rows.append({"workload": name} | row | {"ratio": ratio})
        extra = "".join(f"  {k} {v:.0f}" for k, v in row.items() if k.endswith("mib"))
        if "device_ms" in row:
            extra += f"  on the device {row['device_ms']:.3f} ms"
        what = f"{name:9} {row['optimizer']:36} {row['ms']:9.3f} ms  {ratio:6.2f} × AdamW"
        print(f"  {what}{extra}", flush=True)
    return rows


def _that_run(
    made: Iterable[tuple[str, Callable[[], torch.optim.Optimizer]]],
) -> Iterator[tuple[str, Callable[[], torch.optim.Optimizer]]]:
    """The optimizers whose options the package has; an earlier version may lack some."""
    for label, make in made:
        try:
            make()
        except (TypeError, ValueError, AttributeError) as error:
            print(f"  left out: {label}: {error}", flush=True)
        else:
            yield label, make


def _one_by_one(
    made: Iterable[tuple[str, Callable[[], torch.optim.Optimizer]]], device: torch.device
) -> Iterator[dict[str, Any]]:
    """On a GPU: one optimizer at a time, so that the memory peak is its own."""
    for label, make in made:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer = make()
        cycle = _cycle(optimizer)
        ms = milliseconds(_repeated(optimizer.step, cycle), device) / cycle
        row: dict[str, Any] = {"optimizer": label, "ms": ms}
        if replay := _replay(optimizer):  # the time without Python
            row["device_ms"] = milliseconds(replay, device) / cycle
        state = sum(
            t.numel() * t.element_size()
            for s in optimizer.state.values()
            for t in s.values()
            if isinstance(t, Tensor)
        )
        extra = torch.cuda.max_memory_allocated() - before - state
        yield row | {"state_mib": state / 2**20, "extra_mib": extra / 2**20}
        del optimizer


def _in_turn(
    made: Iterable[tuple[str, Callable[[], torch.optim.Optimizer]]], rounds: int = 15
) -> Iterator[dict[str, Any]]:
    """On a CPU: optimizers take turns, round by round, as other work may slow the CPU for a while.

    A turn is a tenth of a second or more, so that a hiccup is a small part of it.
    """
    steps = {}
    for label, make in made:
        optimizer = make()
        optimizer.step()  # makes the state
        cycle = _cycle(optimizer)
        once = clock(_repeated(optimizer.step, cycle))
        turn = cycle * max(1, round(LEAST_MILLISECONDS / once))
        steps[label] = (_repeated(optimizer.step, turn), turn)
    times: dict[str, list[float]] = {label: [] for label in steps}
    for done in range(rounds):
        print(f"  round {done + 1} of {rounds}", end="\r", flush=True)
        for label, (run, turn) in steps.items():
            times[label].append(clock(run) / turn)
    for label, measured in times.items():
        yield {"optimizer": label, "ms": statistics.median(measured)}


def _cycle(optimizer: torch.optim.Optimizer) -> int:
    """The number of steps after which the work repeats."""
    polar = optimizer.param_groups[0].get("polar")
    return polar.keep if isinstance(polar, ps.LowRank) else 1


def _repeated(run: Callable[[], object], times: int) -> Callable[[], object]:
    return lambda: [run() for _ in range(times)]


def _replay(optimizer: torch.optim.Optimizer) -> Callable[[], object] | None:
    """A function that replays the graphs of a cycle of steps; ``None`` if none was captured."""
    if not isinstance(optimizer, ps.Muon):
        return None
    # An earlier version, measured with --beside, has its graphs under another name.
    replayed = optimizer._replayed if hasattr(optimizer, "_replayed") else optimizer._fused
    graphs = replayed.graphs
    if not graphs:
        return None
    makes = [graph for kind, found in graphs.items() if any(kind) for graph in found]
    keeps = [graph for kind, found in graphs.items() if not any(kind) for graph in found]
    # A map without random numbers has no step that draws any.
    launched = (makes or keeps) + (keeps or makes) * (_cycle(optimizer) - 1)
    return lambda: [graph.replay() for graph in launched]


def phases(workload: Any, device: torch.device) -> dict[str, float]:
    """Milliseconds of each phase of a warm LowRank step, timed separately."""
    from polarstep import products

    shapes, rank, oversample = workload
    polar = maps(rank, oversample)["LowRank, warm"]()
    total: dict[str, float] = {}
    for count, m, n in shapes:
        if polar.full_space_reason(m, n, device) is not None:
            continue
        G, C, X = (torch.randn(count, m, n, device=device) for _ in range(3))
        M = torch.randn(count, m, n, device=device, dtype=products.of(device).dtype(G.dtype))
        for phase, run in (("momentum", _momentum(G, C, M, device)), *_phases_of(polar, M, X)):
            total[phase] = total.get(phase, 0.0) + replayed_milliseconds(run, device)
    return total


def _phases_of(
    polar: ps.LowRank, M: Tensor, X: Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The second step of a warm map on M, in parts; with or without Z, as this device runs it."""
    from polarstep import products
    from polarstep.polar import Carry, Draw
    from polarstep.polar.orthonormal import orthonormalize, whitened_polynomials

    (_, m, n), finder, width = M.shape, polar.finder, polar.width
    ops, A = products.of(M.device), M if m <= n else M.mT
    draw = Draw(polar.draw(m, n, rng.generator("phases", device=M.device)))
    _, carry = polar.step(M, Carry(), draw)
    padded = finder.padded(width, A.dtype, A.device)

    def sketch() -> Tensor:
        Y = ops.times(A, carry["basis"].mT, padded)
        return carry["whitening"] @ Y.mT if "whitening" in carry else Y

    yield "sketch", sketch
    if "whitening" in carry:
        yield "orthonormalization", partial(ops.whitened_basis, sketch(), whitened_polynomials())
    else:
        yield "orthonormalization", partial(orthonormalize, ops.workable(sketch()), finder.orth)
    basis = finder.basis(A, width, carry, draw)
    yield "project", partial(torch.matmul, basis.Q.mT, A)
    B = ops.workable(basis.Q.mT @ A)
    yield "inner iteration", partial(finder.lift, polar.inner, B, basis, width, carry, draw)
    two = polar.step(M, carry, draw)[0].two_factors
    assert two is not None
    yield "lift and update", _update(X, *two, M.device)


def _momentum(G: Tensor, C: Tensor, M: Tensor, device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return lambda: torch.add(G, C.mul_(0.9).add_(G), alpha=0.9)
    from polarstep.kernels.momentum import momentum

    tables = [torch.tensor([t.data_ptr() for t in T], device=device) for T in (G, C)]
    betas = torch.full((len(G),), 0.9, device=device)
    return lambda: momentum(*tables, betas, M, element=torch.float32, nesterov=True)


def _update(X: Tensor, L: Tensor, R: Tensor, device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return lambda: X.add_(L @ R, alpha=-1e-5)
    from polarstep.kernels.update import update_from_factors

    table = torch.tensor([x.data_ptr() for x in X], device=device)
    ones = torch.ones(len(X), device=device)
    return lambda: update_from_factors(table, L, R, ones, ones, element=torch.float32)


def rates(device: torch.device) -> dict[str, float]:
    """Bytes and FLOPs per second of this device, from a large sum and a large product."""
    from polarstep import products

    size = 2**28 if device.type == "cuda" else 2**24
    a, b, c = (torch.randn(size, device=device) for _ in range(3))
    moved = 12 * size / replayed_milliseconds(lambda: torch.add(a, b, out=c), device)
    d = 8192 if device.type == "cuda" else 1024
    X = torch.randn(d, d, device=device, dtype=products.of(device).dtype(a.dtype))
    product = 2 * d**3 / replayed_milliseconds(lambda: X @ X, device)
    return {"bytes_per_ms": moved, "flops_per_ms": product}


def floor(workload: Any, rate: dict[str, float]) -> float:
    """Milliseconds below which no warm LowRank step on float32 parameters can go.

    Read G, C and X, write C and X, write M once and read it twice in half precision; three products.
    """
    shapes, rank, oversample = workload
    size = sum(count * m * n for count, m, n in shapes)
    moved = size * (4 * 5 + 2 * 3) / rate["bytes_per_ms"]
    return moved + 6 * size * (rank + oversample) / rate["flops_per_ms"]


def sweeps(device: torch.device) -> dict[str, list[dict[str, float]]]:
    """Time against width at ℓ = width/4, and against rank at one width; four square matrices."""
    on_gpu = device.type == "cuda"
    widths = [256, 512, 1024, 2048, 4096, 8192] if on_gpu else [256, 512, 1024, 2048]
    width0 = 4096 if on_gpu else 1024
    results: dict[str, list[dict[str, float]]] = {"width": [], "rank": []}
    for width in widths:
        params = parameters([(4, width, width)], device)
        row: dict[str, float] = {"x": width}
        for label, polar in (
            ("LowRank, warm", ps.LowRank(width // 4 - 8, 8, sketch=ps.Warm(), inner=INNER)),
            ("full space, PolarExpress 5", ps.NewtonSchulz(5, "polar-express")),
        ):
            row[label] = milliseconds(ps.Muon(params, lr=1e-5, polar=polar).step, device, 12)
        row["AdamW, fused"] = milliseconds(
            torch.optim.AdamW(params, lr=1e-5, fused=True).step, device, 12
        )
        results["width"].append(row)
        print("  width", {k: round(v, 3) for k, v in row.items()}, flush=True)
    params = parameters([(4, width0, width0)], device)
    for rank in [width0 // 64, width0 // 32, width0 // 16, width0 // 8, width0 // 4, width0 // 2]:
        polar = ps.LowRank(rank - 8, 8, sketch=ps.Warm(), inner=INNER, always_sketch=True)
        ms = milliseconds(ps.Muon(params, lr=1e-5, polar=polar).step, device, 12)
        results["rank"].append({"x": rank, "LowRank, warm": ms})
        print("  rank", rank, round(ms, 3), flush=True)
    return results


def exponent(rows: list[dict[str, float]], label: str) -> float:
    """Slope of log time against log x over the larger half of the sweep."""
    rows = rows[len(rows) // 2 - 1 :]
    return math.log(rows[-1][label] / rows[0][label]) / math.log(rows[-1]["x"] / rows[0]["x"])


def beside(path: Path, names: list[str], rounds: int, options: list[str]) -> list[dict[str, Any]]:
    """Median times with this package and with the one under ``path``/src, and median ratios.

    Each measurement is a process of its own. The two packages take turns and swap their order each
    round, so that a machine that slows down slows both. AdamW is the control: its ratio is noise.
    """
    here = Path(__file__).resolve().parent.parent
    kinds = ("ms", "device_ms")
    found: dict[tuple[str, str], dict[str, list[tuple[float, float]]]] = {}
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", flush=True)
        both = {}
        for root in (here, path) if turn % 2 == 0 else (path, here):
            both[root] = _steps_of(root, names, options)
        for key in both[here].keys() & both[path].keys():
            new, old = both[here][key], both[path][key]
            for kind in kinds:
                if kind in new and kind in old:
                    of_key = found.setdefault(key, {})
                    of_key.setdefault(kind, []).append((new[kind], old[kind]))
    order = [key for key in both[here] if key in found]
    rows: list[dict[str, Any]] = []
    for workload, optimizer in order:
        row: dict[str, Any] = {"workload": workload, "optimizer": optimizer}
        for kind, pairs in found[workload, optimizer].items():
            new, old = (statistics.median(each) for each in zip(*pairs, strict=True))
            ratios = [a / b for a, b in pairs]
            row |= {kind: new, f"{kind}_before": old, f"{kind}_ratio": statistics.median(ratios)}
            row[f"{kind}_ratios"] = ratios
        rows.append(row)
        parts = [
            f"{row[kind]:9.3f} ms, before {row[f'{kind}_before']:9.3f}, "
            f"ratio {row[f'{kind}_ratio']:.3f} "
            f"({min(row[f'{kind}_ratios']):.3f}–{max(row[f'{kind}_ratios']):.3f})"
            for kind in kinds
            if kind in row
        ]
        print(f"  {workload:9} {optimizer:36} {';  on the device '.join(parts)}", flush=True)
    return rows


def _steps_of(
    root: Path, names: list[str], options: list[str]
) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows that this script measures with the package under ``root``/src."""
    source = root / "src"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.json"
        command = [sys.executable, __file__, "--only-steps", "--json", str(out), *options]
        command += [f"--workload={name}" for name in names]
        search = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} with {source} failed:\n{done.stderr}")
        record = json.loads(out.read_text())
    if not Path(record["package"]).is_relative_to(source):
        raise RuntimeError(
            f"the steps were measured with {record['package']}: expected the package under {source}; "
            "give --beside the root of a checkout, which has src/polarstep"
        )
    return {(row["workload"], row["optimizer"]): row for row in record["steps"]}


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw bars of whole steps and of the phases, and the sweeps if there are any."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullFormatter, NullLocator

    swept = bool(record.get("sweeps"))
    figure, axes = plt.subplots(
        2 if swept else 1, 2, figsize=(13, 9 if swept else 5), squeeze=False
    )
    colours = plt.get_cmap("tab20").colors[::2] + plt.get_cmap("tab20").colors[1::2]
    names = list(dict.fromkeys(row["optimizer"] for row in record["steps"]))
    loads = [load for load, parts in record["phases"].items() if parts]
    for i, name in enumerate(names):
        ratios = [
            next(
                (
                    r["ratio"]
                    for r in record["steps"]
                    if (r["workload"], r["optimizer"]) == (w, name)
                ),
                0,
            )
            for w in loads
        ]
        at = [j + (i - len(names) / 2) * 0.8 / len(names) for j in range(len(loads))]
        colour = colours[i % len(colours)]
        axes[0, 0].bar(at, ratios, 0.8 / len(names), label=name, color=colour)
    axes[0, 0].set_yscale("log")
    axes[0, 0].axhline(1, color="black", lw=0.8)
    axes[0, 0].set_xticks(range(len(loads)), loads)
    axes[0, 0].set_ylabel("time of a step ÷ AdamW's")
    bottom, top = axes[0, 0].get_ylim()
    axes[0, 0].set_ylim(bottom, top * (top / bottom) ** 0.35)  # room for the names
    axes[0, 0].legend(fontsize=7, ncols=2, loc="upper center")
    for j, load in enumerate(loads):
        left = 0.0
        for i, (phase, ms) in enumerate(record["phases"][load].items()):
            label = phase if j == 0 else None
            axes[0, 1].barh(j, ms, left=left, color=colours[i], label=label)
            left += ms
        axes[0, 1].plot([record["floor"][load]] * 2, [j - 0.45, j + 0.45], "k--", lw=1)
    axes[0, 1].set_yticks(range(len(loads)), loads)
    axes[0, 1].set_xlabel("ms, phases of LowRank (warm) one by one; dashed: the floor")
    axes[0, 1].legend(fontsize=7)
    if swept:
        for axis, kind in zip(axes[1], ("width", "rank"), strict=True):
            rows = record["sweeps"][kind]
            for i, label in enumerate(k for k in rows[0] if k != "x"):
                slope = exponent(rows, label)
                axis.loglog(
                    [r["x"] for r in rows],
                    [r[label] for r in rows],
                    "o-",
                    color=colours[i],
                    label=f"{label}: grows as x^{slope:.2f}",
                )
            axis.set_xticks([r["x"] for r in rows], [f"{r['x']:.0f}" for r in rows])
            axis.xaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}" if kind == "rank" else NullFormatter())
            axis.set_xlabel("width (ℓ: a quarter of it)" if kind == "width" else "ℓ")
            axis.set_ylabel("ms a step, four matrices")
            axis.legend(fontsize=8)
            axis.grid(alpha=0.3)
    figure.suptitle(record["machine"])
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main() -> None:
    """Measure, print, save."""
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
    arguments = parser.parse_args()
    if arguments.figure:
        record = json.loads(arguments.figure.read_text())
        draw(record, arguments.figure.with_suffix(".png"))
        return
    device = torch.device(arguments.device)
    if arguments.no_tiles:
        torch.backends.mkldnn.set_flags(_enabled=False)
    torch.manual_seed(0)
    workloads = WORKLOADS if device.type == "cuda" else ON_A_CPU
    workloads = QUICK if arguments.quick else workloads
    names = arguments.workload or list(workloads)
    if unknown := set(names) - set(workloads):
        parser.error(f"--workload {', '.join(unknown)}: expected one of {', '.join(workloads)}")
    if arguments.beside:
        print(machine(device))
        options = [f"--device={device}"]
        options += ["--quick"] * arguments.quick + ["--no-tiles"] * arguments.no_tiles
        options += [f"--optimizer={name}" for name in arguments.optimizer or []]
        rows = beside(arguments.beside.resolve(), names, arguments.rounds, options)
        record = {"machine": machine(device), "rounds": arguments.rounds, "beside": rows}
    elif arguments.only_steps:
        record = {"package": str(Path(ps.__file__).resolve()), "steps": []}
        for name in names:
            record["steps"] += whole_steps(
                name, workloads[name], device, others=False, only=arguments.optimizer
            )
    else:
        chosen = {name: workloads[name] for name in names}
        record = everything(chosen, device, arguments.sweep, only=arguments.optimizer)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1))
        print(f"wrote {arguments.json}")


def everything(
    workloads: dict[str, Any], device: torch.device, sweep: bool, *, only: list[str] | None = None
) -> dict[str, Any]:
    """The device's rates, and for each workload whole steps, their phases and the floor."""
    record = {"machine": machine(device), "steps": [], "phases": {}, "floor": {}}
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
    sys.exit(main())
