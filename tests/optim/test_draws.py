"""The random numbers of a step are a function of seed, shape and step."""

from __future__ import annotations

import pytest
import torch
from tests.own_parts import sketched
from tests.spectra import gaussian
from torch import Tensor
from torch.nn import Parameter

import polarstep as ps

FINDERS = {"fresh": ps.Gaussian(), "sampled": ps.Kaczmarz(), "warm": ps.Warm()}
over_finders = pytest.mark.parametrize("name", FINDERS)


def steps_taken(name: str, steps: int, seed: int = 0) -> list[Tensor]:
    """T at each of ``steps`` on one and the same M."""
    W = Parameter(torch.zeros(12, 20, dtype=torch.float64))
    optimizer = ps.Muon([W], polar=sketched(FINDERS[name]), momentum=0.0, seed=seed)
    seen: list[Tensor] = []
    optimizer.register_polar_hook(lambda bucket: seen.append(bucket.T.clone()))
    for _ in range(steps):
        W.grad = gaussian(12, 20)
        optimizer.step()
    return seen


@over_finders
def test_another_seed_is_another_sketch_at_every_step(name: str) -> None:
    for T, again, other in zip(*(steps_taken(name, 3, seed) for seed in (0, 0, 1)), strict=True):
        assert torch.equal(T, again)
        assert (T - other).norm() > 1e-3 * T.norm()


@pytest.mark.parametrize("name", ["fresh", "sampled"])
def test_a_fresh_sketch_is_another_one_at_every_step(name: str) -> None:
    first, second, third = steps_taken(name, 3)
    for a, b in ((first, second), (second, third), (first, third)):
        assert (a - b).norm() > 1e-3 * a.norm()


def test_numbers_that_are_kept_are_those_of_the_precision() -> None:
    """A warm sketch starts from the same numbers at every step, and float64 has more of their digits."""
    one, two = (Parameter(torch.zeros(12, 20, dtype=d)) for d in (torch.float32, torch.float64))
    together = ps.Muon([one, two], polar=sketched(ps.Warm()))
    alone = ps.Muon([Parameter(two.detach().clone())], polar=sketched(ps.Warm()))
    for optimizer in (together, alone):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = gaussian(12, 20).to(p.dtype)
        optimizer.step()
    assert torch.equal(two, alone.param_groups[0]["params"][0])
