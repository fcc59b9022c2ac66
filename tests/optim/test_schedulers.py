"""What torch's learning-rate schedulers write into Muon's groups, and what Muon makes of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from polarstep import Muon


def optimizer():
    """A group each of Muon, AdamW and SGD, with gradients."""
    params = [nn.Parameter(torch.eye(3)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    for p in params:
        p.grad = torch.ones_like(p)
    return Muon(
        [
            {"params": params[:1]},
            {"params": params[1:2], "algorithm": "adamw", "lr": 1e-3},
            {"params": params[2:], "algorithm": "sgd", "lr": 1e-2, "momentum": 0.9},
        ],
        lr=0.05,
    )


def after_linear_decay(total):
    """An optimizer whose rates LinearLR brought to zero, up to rounding, in ``total`` steps."""
    opt = optimizer()
    scheduler = schedulers.LinearLR(opt, end_factor=0.0, total_iters=total)
    for _ in range(total):
        opt.step()
        scheduler.step()
    return opt


def test_a_step_after_linear_decay_changes_nothing():
    opt = after_linear_decay(4)
    assert opt.param_groups[0]["lr"] < 0
    before = [p.detach().clone() for group in opt.param_groups for p in group["params"]]
    opt.step()
    assert opt.param_groups[0]["lr"] == 0  # and not −1e-18
    after = [p for group in opt.param_groups for p in group["params"]]
    assert all(torch.equal(p, q) for p, q in zip(before, after, strict=True))


@pytest.mark.parametrize("lr", [-1e-12, -1e-9, -0.02])
def test_only_rates_within_rounding_of_zero_count_as_zero(lr):
    opt = optimizer()
    opt.param_groups[0]["lr"] = lr
    if lr < -1e-12:
        with pytest.raises(ValueError, match="expected a finite number ≥ 0"):
            opt.step()
    else:
        opt.step()
        assert torch.equal(opt.param_groups[0]["params"][0], torch.eye(3))


CYCLES = {
    "OneCycleLR": lambda opt, **o: schedulers.OneCycleLR(opt, max_lr=0.1, total_steps=8, **o),
    "CyclicLR": lambda opt, **o: schedulers.CyclicLR(opt, 0.01, 0.1, step_size_up=3, **o),
}


@pytest.mark.parametrize("name", CYCLES)
def test_cycling_schedulers_cycle_the_momentum_of_muon_and_sgd_but_no_betas(name):
    """torch cycles one setting for all groups: ``momentum``, since Muon's defaults have no betas.

    AdamW groups get a ``momentum`` too, and read it as β₁; what they were given as betas stays there.
    """
    opt = optimizer()
    betas = opt.param_groups[1]["betas"]
    scheduler = CYCLES[name](opt)
    momenta = []
    for _ in range(6):
        momenta.append([group["momentum"] for group in opt.param_groups])
        assert opt.param_groups[1]["betas"] == betas
        opt.step()
        scheduler.step()
    assert len({muon for muon, _, _ in momenta}) > 2
    assert all(muon == adamw == sgd for muon, adamw, sgd in momenta)


@pytest.mark.parametrize("name", CYCLES)
def test_the_cycled_momentum_is_beta_1_of_adamw(name):
    """As it is with torch's own AdamW, whose betas these schedulers cycle."""
    opt, p = optimizer(), nn.Parameter(torch.ones(3))
    beside = torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    cycles = [CYCLES[name](each) for each in (opt, beside)]
    for k in range(6):
        for group in (*opt.param_groups, *beside.param_groups):
            for q in group["params"]:
                q.grad = torch.full_like(q, 1.0 + k % 3)
        opt.step()
        beside.step()
        for scheduler in cycles:
            scheduler.step()
    torch.testing.assert_close(opt.param_groups[1]["params"][0], p)


@pytest.mark.parametrize("momentum", [0.5, 1.0])
def test_a_momentum_that_a_loop_writes_to_all_groups_is_not_beta_1_of_adamw(momentum):
    """As KellerJordan's scripts warm momentum up: ``for group in optimizer.param_groups: …``."""
    opt, beside = optimizer(), optimizer()
    opt.param_groups[1]["momentum"] = momentum
    for k in range(3):
        for each in (opt, beside):
            for group in each.param_groups:
                for q in group["params"]:
                    q.grad = torch.full_like(q, 1.0 + k)
            each.step()
    ours, expected = (each.param_groups[1]["params"][0] for each in (opt, beside))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", CYCLES)
def test_a_cycled_optimizer_saves_and_resumes(name):
    """The momentum that torch leaves in an AdamW group does not stop a state from loading."""
    opt = optimizer()
    CYCLES[name](opt)
    opt.step()
    other = optimizer()
    other.load_state_dict(opt.state_dict())
    other.step()
    assert other.param_groups[0]["momentum"] == opt.param_groups[0]["momentum"]


def test_timms_schedulers_find_no_option_under_the_key_that_they_multiply_rates_by():
    opt = Muon([nn.Parameter(torch.zeros(6, 2))], shape_scale="rms")
    assert "lr_scale" not in opt.param_groups[0]
    with pytest.raises(ValueError, match="give shape_scale"):
        Muon([{"params": [nn.Parameter(torch.zeros(6, 2))], "lr_scale": "rms"}])
    with pytest.raises(TypeError, match="give shape_scale"):
        Muon([nn.Parameter(torch.zeros(6, 2))], lr_scale="rms")
