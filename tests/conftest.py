from __future__ import annotations

import gc
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
# last would leave the others with nothing to do.
LONGEST = (
    "distributed/test_trajectories.py",
    "polar/test_contract.py",
    "lab/experiments/test_train.py",
    "lab/experiments/test_ranks.py",
    "fuzz/test_fuzz.py",
    "lab/experiments/test_on_ray.py",
    "distributed/test_checkpoints.py",
    "test_hopper.py",
    "lab/experiments/test_tune.py",
    "lab/experiments/test_noise.py",
    "distributed/test_ledger.py",
    "lab/test_results.py",
    "optim/test_range.py",
    "lab/cli/test_demo.py",
    "optim/test_deflated.py",
    "lab/experiments/test_report_paper.py",
    "optim/test_low_precision.py",
    "lab/cli/test_experiments.py",
    "optim/test_own_parts.py",
    "lab/experiments/test_peers.py",
    "optim/test_resting.py",
    "lab/experiments/test_report_page.py",
    "lab/experiments/test_archive.py",
    "lab/experiments/test_checkpoint.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files of ``LONGEST`` first."""
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
def untouched_rng():
    """Fail a test that reads or advances torch's global generator."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(torch.get_rng_state(), before), "the global generator was advanced"
