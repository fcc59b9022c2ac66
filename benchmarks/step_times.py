"""The time of whole steps: one row of the table for each optimizer on one set of matrices."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import polarstep as ps
from step_optimizers import ASKED_FOR, Make, optimizers
from step_workloads import Workload, parameters
from timing import LEAST_MILLISECONDS, clock, milliseconds


class UnknownOptimizer(ValueError):
    """An optimizer was asked for that the table does not have."""


def whole_steps(
    name: str,
    workload: Workload,
    device: torch.device,
    *,
    others: bool = True,
    only: list[str] | None = None,
) -> list[dict[str, Any]]:
    """Median time of ``step()`` for every optimizer, and on a GPU the memory it takes.

    ``name`` is the workload's. ``others=False`` leaves out all but AdamW and our optimizers.
    ``only`` names the optimizers that are measured beside AdamW; ``None`` measures all of the table.
    """
    params = parameters(workload.shapes, device)
    made = optimizers(params, workload.rank, workload.oversample, device, others=others)
    chosen = _that_run(selected(made, only))
    measured = _one_by_one(chosen, device) if device.type == "cuda" else _in_turn(chosen)
    rows: list[dict[str, Any]] = []
    for row in measured:
        ratio = row["ms"] / rows[0]["ms"] if rows else 1.0  # the first row is AdamW's
        rows.append({"workload": name} | row | {"ratio": ratio})
        extra = "".join(f"  {k} {v:.0f}" for k, v in row.items() if k.endswith("mib"))
        if "device_ms" in row:
            extra += f"  on the device {row['device_ms']:.3f} ms"
        what = f"{name:9} {row['optimizer']:36} {row['ms']:9.3f} ms  {ratio:6.2f} × AdamW"
        print(f"  {what}{extra}", flush=True)
    return rows


def selected(made: Iterable[tuple[str, Make]], only: list[str] | None) -> list[tuple[str, Make]]:
    """The rows that are measured: AdamW and those of ``only``, or the whole table for ``None``."""
    made = list(made)
    if unknown := set(only or ()) - {label for label, _ in made}:
        known = "; ".join(label for label, _ in made)
        raise UnknownOptimizer(f"--optimizer {'; '.join(unknown)}: expected one of: {known}")
    wanted = only or [label for label, _ in made if label not in ASKED_FOR]
    return [(label, make) for label, make in made if label in wanted or label.startswith("AdamW")]


def _that_run(made: Iterable[tuple[str, Make]]) -> Iterator[tuple[str, Make]]:
    """The optimizers whose options the package has; an earlier version, or a peer, may lack some."""
    for label, make in made:
        try:
            make()
        except (TypeError, ValueError, AttributeError, ImportError) as error:
            print(f"  left out: {label}: {error}", flush=True)
        else:
            yield label, make


def _one_by_one(made: Iterable[tuple[str, Make]], device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows measured on a GPU: one optimizer at a time, so that the memory peak is its own."""
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


def _in_turn(made: Iterable[tuple[str, Make]], rounds: int = 15) -> Iterator[dict[str, Any]]:
    """Rows measured on a CPU, where other work may slow everything for a while.

    The optimizers take turns, round by round, so that a slow while slows all of them. A turn lasts
    a tenth of a second or more, so that a hiccup is a small part of it.
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
    """The number of steps after which the work repeats; SOAP has a QR every few steps."""
    group = optimizer.param_groups[0]
    frequency: int = group.get("precondition_frequency", 1)
    return frequency


def _repeated(run: Callable[[], object], times: int) -> Callable[[], object]:
    """A function that calls ``run`` several times."""
    return lambda: [run() for _ in range(times)]


def _replay(optimizer: torch.optim.Optimizer) -> Callable[[], object] | None:
    """A function that replays the CUDA graphs of a cycle of steps; ``None`` if none was captured."""
    if not isinstance(optimizer, ps.Muon):
        return None
    # An earlier version, measured with --beside, has its graphs in another place.
    version: Any = optimizer
    replayed = version._replayed if hasattr(version, "_replayed") else version._fused
    graphs = replayed.graphs if hasattr(replayed, "graphs") else replayed._plan.graphs
    if not graphs:
        return None
    # Graphs are keyed by which buckets draw random numbers: a step that makes a basis, or keeps one.
    makes = [graph for kind, found in graphs.items() if any(kind) for graph in found]
    keeps = [graph for kind, found in graphs.items() if not any(kind) for graph in found]
    # A map without random numbers has no step that draws any.
    launched = (makes or keeps) + (keeps or makes) * (_cycle(optimizer) - 1)
    return lambda: [graph.replay() for graph in launched]
