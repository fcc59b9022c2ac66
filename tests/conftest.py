from __future__ import annotations

import gc

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
