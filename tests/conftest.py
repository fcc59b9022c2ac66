from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from tests.recorded import record_momentum

settings.register_profile(
    "polarstep",
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("polarstep")

# Files that take longest, in this order. Workers take one file after the other: a long file among the
# last would leave the others with nothing to do. Those that wait for processes of their own come first
# of all, as the kernels' tests run beside them and have work for a core that is free.
LONGEST = (
    "ranks/test_unstarted.py",
    "lab/experiments/test_jobs.py",
    "lab/experiments/test_ranks.py",
    "lab/experiments/test_on_ray.py",
    "lab/experiments/test_directory.py",
    "ranks/test_agreement.py",
    "ranks/test_layouts.py",
    "ranks/test_trajectories.py",
    "ranks/test_plans.py",
    "ranks/test_checkpoints.py",
    "lab/cli/test_experiments_page.py",
    "maps/test_contract.py",
    "lab/experiments/test_train.py",
    "fuzz/test_fuzz.py",
    "lab/experiments/test_noise.py",
    "optim/test_scaling.py",
    "lab/pages/test_reports.py",
    "optim/test_range.py",
    "optim/test_low_precision.py",
    "maps/test_newton_schulz.py",
    "theory/test_deflated.py",
    "optim/test_deflated.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of ``LONGEST`` first, and leave tests marked ``nightly`` to ``make test-all``."""
    if os.environ.get("ALL_TESTS") != "1":
        nightly = pytest.mark.skip(reason="nightly: make test-all")
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(nightly)
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what lives until the end: modules and collected tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def momentum() -> dict[str, torch.Tensor]:
    """Momentum of a small GPT's first fifty steps, by shape."""
    return record_momentum()


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without matrix tiles: products in float32, for tests that compare digits or routes."""
    for module in ("ops.cpu", "maps.auto"):
        monkeypatch.setattr(f"polarstep.{module}.has_tiles", lambda: False)
    monkeypatch.setattr("polarstep.maps.auto._CHOICES", {})


@pytest.fixture
def untouched_rng():
    """Fail a test that reads or advances torch's global generator."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), "the global generator was advanced"
