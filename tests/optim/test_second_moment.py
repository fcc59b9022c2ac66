"""A rule with a second moment for each entry is one class: plain, in low precision, saved and skipped.

tests/ranks/test_trajectories.py steps it on ranks, and tests/kernels/test_own_parts.py by kernels.
"""

from __future__ import annotations

import io

import pytest
import torch
from tests.own_parts import SecondMoment
from tests.spectra import gaussian
from torch.nn import Parameter

import polarstep as ps

POLAR = ps.NewtonSchulz(3, "quintic")
STEPS = 4


def stepped(p: Parameter, optimizer: ps.Muon, steps: range, bad: int | None = None) -> None:
    for k in steps:
        p.grad = gaussian(*p.shape, seed=k).to(p.dtype)
        if k == bad:
            p.grad[0, 0] = torch.nan
        optimizer.step()


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
def test_it_steps_as_written(shape) -> None:
    p = Parameter(torch.zeros(shape, dtype=torch.float64))
    options = {"lr": 0.1, "momentum": 0.5, "shape_scale": "none", "weight_decay": 0.2}
    stepped(p, ps.Muon([p], polar=POLAR, transform=SecondMoment(), **options), range(STEPS))
    X, C, v = (torch.zeros(shape, dtype=torch.float64) for _ in range(3))
    for k in range(STEPS):
        G = gaussian(*shape, seed=k)
        C = 0.5 * C + G
        T = POLAR(G + 0.5 * C)
        v = 0.9 * v + 0.1 * T.square()
        X = (1 - 0.1 * 0.2) * X - 0.1 * T / (v.sqrt() + 1e-8)
    torch.testing.assert_close(p.detach(), X)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float64, {}),
        (torch.bfloat16, {"rounding": "compensated"}),
        (torch.float16, {}),
        (torch.float32, {"momentum_dtype": torch.int8}),
    ],
    ids=str,
)
def test_a_run_goes_on_from_a_file_bit_for_bit_and_skips_bad_gradients(dtype, options) -> None:
    ends = []
    for saved in (False, True):
        p = Parameter(torch.zeros(8, 128, dtype=dtype))
        make = lambda p: ps.Muon(  # noqa: E731
            [p], polar=POLAR, transform=SecondMoment(), nonfinite="skip", **options
        )
        optimizer = make(p)
        stepped(p, optimizer, range(2), bad=1)
        if saved:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer = make(p)
            optimizer.load_state_dict(torch.load(file))
        stepped(p, optimizer, range(2, STEPS))
        v = optimizer.state[p]["second_moment"]
        assert v.dtype == torch.promote_types(dtype, torch.float32)
        assert bool(v.isfinite().all())
        assert bool(p.isfinite().all())
        ends.append((p.detach(), v))
    assert all(map(torch.equal, *ends))
