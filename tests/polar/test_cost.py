"""The cost model against the published records of whole steps."""

from __future__ import annotations

import importlib
import json
from itertools import combinations
from pathlib import Path

import pytest
import torch

import polarstep as ps
from polarstep.polar.cost import DEVICES, adamw_seconds, figures_of, seconds

ROOT = Path(__file__).parents[2]
ADAMW = "AdamW, fused"
# The shapes, and how far the estimate may be off. On CIFAR-10's filters a GPU runs all buckets at once,
# and the record shows its host.
RECORDS = {
    ("h200", "H200", "nanoGPT"): 1.25,
    ("h200", "H200", "8B layer"): 1.25,
    ("cpu-no-tiles", "cpu", "nanoGPT"): 1.25,
    ("cpu-no-tiles", "cpu", "768×768"): 1.25,
    ("cpu-no-tiles", "cpu", "3072×768"): 1.25,
    ("cpu-no-tiles", "cpu", "CIFAR-10"): 1.45,
}


@pytest.fixture
def estimated_and_measured(request, monkeypatch):
    """Milliseconds by optimizer for the rows of a record that the model covers."""
    record, device, workload = request.param
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("step_cost")
    workloads = benchmark.WORKLOADS if device == "H200" else benchmark.ON_A_CPU
    shapes, rank, oversample = workloads[workload]
    rows = json.loads((ROOT / "results" / "step-cost" / f"{record}.json").read_text())["steps"]
    measured = {row["optimizer"]: row["ms"] for row in rows if row["workload"] == workload}
    on, where = DEVICES[device], torch.device("cpu" if device == "cpu" else "cuda")

    def estimate(polar):
        return sum(seconds(polar.on(m, n, where), m, n, on, count) for count, m, n in shapes)

    found = {
        name: (1e3 * estimate(make()), measured[name])
        for name, make in benchmark.maps(rank, oversample).items()
        if name in measured and "Kaczmarz" not in name  # a gather of columns is not modelled
    }
    adamw = sum(adamw_seconds(m, n, on, count) for count, m, n in shapes)
    return found | {ADAMW: (1e3 * adamw, measured[ADAMW])}, RECORDS[request.param]


@pytest.mark.parametrize("estimated_and_measured", RECORDS, ids=" ".join, indirect=True)
def test_estimates_agree_with_measured_steps(estimated_and_measured):
    times, allowed = estimated_and_measured
    assert {"LowRank, warm", "full space, PolarExpress 5", ADAMW} <= times.keys()
    off = {name: round(estimate / real, 2) for name, (estimate, real) in times.items()}
    assert all(1 / allowed <= ratio <= allowed for ratio in off.values()), off


@pytest.mark.parametrize("estimated_and_measured", RECORDS, ids=" ".join, indirect=True)
def test_maps_that_differ_clearly_are_in_the_measured_order(estimated_and_measured):
    times, _ = estimated_and_measured
    clear = [
        (first, second)
        for first, second in combinations(times.values(), 2)
        if max(first[1], second[1]) > 1.4 * min(first[1], second[1])
    ]
    assert len(clear) >= 5
    for first, second in clear:
        assert (first[0] < second[0]) == (first[1] < second[1])


def test_launches_are_shared_on_a_gpu_and_not_on_a_cpu():
    ratios = [
        seconds(ps.NewtonSchulz(5), 16, 16, DEVICES[name], 100)
        / seconds(ps.NewtonSchulz(5), 16, 16, DEVICES[name], 1)
        for name in ("H200", "cpu")
    ]
    assert ratios == [pytest.approx(1, abs=0.1), pytest.approx(100)]


def test_a_kept_basis_costs_less_and_a_power_iteration_more():
    on = DEVICES["H200"]
    fresh, kept, power = (
        seconds(ps.LowRank(120, 8, **options), 1024, 4096, on, 8)
        for options in ({"power": 0}, {"power": 0, "keep": 4}, {"power": 1})
    )
    assert kept < fresh < power


def test_the_figures_of_a_device():
    assert figures_of(torch.device("cpu")) is DEVICES["cpu"]
    assert figures_of(torch.device("meta")) is DEVICES["other"]
    assert figures_of(torch.device("cuda")) in DEVICES.values()


def test_a_map_of_ones_own_is_refused():
    with pytest.raises(TypeError, match="cost of a Exact map is not known: expected NewtonSchulz"):
        seconds(ps.Exact(), 8, 8, DEVICES["cpu"])
