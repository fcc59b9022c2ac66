"""Curves for practice, and the scheduler that applies them."""

from __future__ import annotations

import math

import pytest
import torch

from polarstep import AdamW, Muon, muon_for
from polarstep.maps import Exact
from polarstep.theory import annealing
from polarstep.theory.annealing import Annealed, MomentumRamp, Stages, Trapezoid


def _optimizer(**options):
    weights = [torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.ones(2))]
    groups = [
        {"params": [weights[0]]},
        {"params": [weights[1]], "algorithm": "adamw", "lr": 1e-3},
    ]
    for w in weights:
        w.grad = torch.ones_like(w)
    return Muon(groups, lr=0.1, momentum=0.95, **options)


def _run(optimizer, scheduler, steps):
    seen = []
    for _ in range(steps):
        group = optimizer.param_groups[0]
        seen.append((group["lr"], group["momentum"], optimizer.param_groups[1]["lr"]))
        optimizer.step()
        scheduler.step()
    return seen


def test_annealing_drives_lr_of_all_groups_and_momentum_of_muon():
    opt = _optimizer()
    curve = Trapezoid(10, warmup=2, cooldown=0.4, floor=0.1)
    ramp = MomentumRamp(10, start=0.85, warmup=4, cooldown=2)
    seen = _run(opt, Annealed(opt, curve, ramp), 12)
    assert [s[0] for s in seen] == pytest.approx([0.1 * curve(k) for k in range(12)])
    assert [s[2] for s in seen] == pytest.approx([1e-3 * curve(k) for k in range(12)])
    momenta = [s[1] for s in seen]
    assert momenta[:6] == pytest.approx([0.85, 0.875, 0.9, 0.925, 0.95, 0.95])
    assert momenta[8:] == pytest.approx([0.95, 0.9, 0.85, 0.85])
    assert "momentum" not in opt.param_groups[1]


def test_annealing_resumes_where_it_stopped(tmp_path):
    curves = {"lr": Trapezoid(20, 3, 0.4), "momentum": MomentumRamp(20, 0.8, 5, 5)}
    opt = _optimizer()
    whole = _run(opt, Annealed(opt, **curves), 20)
    opt = _optimizer()
    scheduler = Annealed(opt, **curves)
    first = _run(opt, scheduler, 9)
    torch.save({"opt": opt.state_dict(), "lr": scheduler.state_dict()}, tmp_path / "state.pt")
    opt = _optimizer()
    scheduler = Annealed(opt, **curves)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    opt.load_state_dict(state["opt"])
    scheduler.load_state_dict(state["lr"])
    assert first + _run(opt, scheduler, 11) == whole


def test_momentum_below_the_start_stays():
    ramp = MomentumRamp(10, start=0.85, warmup=4, cooldown=4)
    assert [ramp(k, 0.5) for k in range(12)] == [0.5] * 12


def test_overlapping_ramps_multiply():
    curve = Trapezoid(4, warmup=4, cooldown=1.0)
    assert [curve(k) for k in range(5)] == [0.25, 0.375, 0.375, 0.25, 0.0]
    ramp = MomentumRamp(4, start=0.0, warmup=4, cooldown=4)
    assert [ramp(k, 0.8) for k in range(5)] == pytest.approx([0.0, 0.2, 0.4, 0.2, 0.0])


def test_nanogpt_schedule_has_the_published_corners():
    opt = _optimizer()
    scheduler = annealing.nanogpt(opt)
    lr, momentum = scheduler.lr_curve, scheduler.momentum_curve
    assert [lr(0), lr(482), lr(483), lr(579)] == pytest.approx([1.0, 1.0, 1.52, 1.52])
    start = 1450 - 870
    assert lr(967) == pytest.approx(1.73 + (0.15 - 1.73) * (967 - start) / 870)
    assert [lr(1450), lr(1489)] == pytest.approx([0.15, 0.15])
    assert [momentum(0, 0.97), momentum(298, 0.97)] == pytest.approx([0.85, 0.97])
    assert [momentum(1440, 0.97), momentum(1490, 0.97)] == pytest.approx([0.97, 0.85])


def test_a_short_nanogpt_run_ends_its_momentum_in_a_fifth_of_its_steps():
    momentum = annealing.nanogpt(_optimizer(), scheduled=80, extension=20).momentum_curve
    assert [momentum(k, 0.95) for k in (0, 10, 20, 80, 90, 100)] == pytest.approx(
        [0.85, 0.9, 0.95, 0.95, 0.9, 0.85]
    )


@pytest.mark.parametrize(
    "bad",
    [
        lambda: Trapezoid(0),
        lambda: Trapezoid(10, warmup=-1),
        lambda: Trapezoid(10, cooldown=4),
        lambda: Trapezoid(10, floor=-0.1),
        lambda: Stages(10, (1.0,), cooldown=4),
        lambda: MomentumRamp(10, cooldown=-1),
        lambda: Stages(10, ()),
        lambda: Stages(10, (1.0, math.nan)),
        lambda: Stages(10, ("1", "2")),
        lambda: Stages(10, 0.5),
        lambda: MomentumRamp(10, start=1.0),
        lambda: Trapezoid(math.nan),
        lambda: Trapezoid(10, floor=math.nan),
        lambda: MomentumRamp(10, warmup=math.nan),
        lambda: Annealed(_optimizer()),
    ],
)
def test_bad_curves_are_refused(bad):
    with pytest.raises(ValueError, match=r"expected|give a curve"):
        bad()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Trapezoid("100"), "total='100'"),
        (lambda: Trapezoid(100, warmup=None), "warmup=None"),
        (lambda: Trapezoid(100, cooldown="0.4"), "cooldown='0.4'"),
        (lambda: Stages("100", (1.0,)), "total='100'"),
        (lambda: MomentumRamp(100, start="0.85"), "start='0.85'"),
    ],
)
def test_a_word_in_the_place_of_a_number_is_named(build, message):
    with pytest.raises(TypeError, match=f"{message}: expected a number"):
        build()


@pytest.mark.parametrize("option", ["lr", "momentum"])
def test_a_number_in_the_place_of_a_curve_is_refused(option):
    with pytest.raises(
        TypeError, match=rf"{option}=0\.5: expected a curve, a function of the step"
    ):
        Annealed(_optimizer(), **{option: 0.5})


def test_momentum_is_annealed_after_a_checkpoint_from_before_the_scheduler():
    """The groups of such a checkpoint know no initial momentum, as little as a group added later."""
    ramp = MomentumRamp(10, start=0.85, warmup=4)
    opt = _optimizer()
    before = opt.state_dict()
    scheduler = Annealed(opt, momentum=ramp)
    opt.load_state_dict(before)
    opt.add_param_group({"params": [torch.nn.Parameter(torch.eye(3))], "momentum": 0.9})
    seen = []
    for _ in range(5):
        opt.step()
        scheduler.step()
        seen.append((opt.param_groups[0]["momentum"], opt.param_groups[-1]["momentum"]))
    assert seen == [
        (pytest.approx(ramp(k, 0.95)), pytest.approx(ramp(k, 0.9))) for k in range(1, 6)
    ]


def test_layers_unfrozen_during_a_run_follow_the_curves():
    layers = [torch.nn.Linear(4, 4) for _ in range(3)]
    model = torch.nn.Sequential(*layers)
    layers[0].requires_grad_(False)
    opt = muon_for(model, lr=0.1, others=AdamW(lr=1e-3), polar=Exact())
    curve = Trapezoid(10, cooldown=1.0)
    scheduler = Annealed(opt, curve, MomentumRamp(10, start=0.85, cooldown=10))
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    scheduler.step()
    opt.add_param_group({"params": layers[0].requires_grad_(True).parameters()})
    for _ in range(3):
        opt.step()
        scheduler.step()
    assert len(opt.param_groups) > 3
    for group in opt.param_groups:
        full = 0.1 if group["algorithm"] == "muon" else 1e-3
        assert group["lr"] * group["lr_factor"] == pytest.approx(full * curve(4))
    assert opt.param_groups[-1]["momentum"] == opt.param_groups[0]["momentum"]
    again = Annealed(opt, curve)
    again.load_state_dict(scheduler.state_dict())
    again.step()
    assert opt.param_groups[-1]["lr"] == pytest.approx(0.1 * curve(5))


def test_momentum_is_annealed_by_a_scheduler_made_in_the_middle_of_a_run():
    opt = _optimizer()
    for group in opt.param_groups:
        group["initial_lr"] = group["lr"]
    Annealed(opt, momentum=MomentumRamp(10, start=0.85, warmup=4), last_epoch=1)
    assert opt.param_groups[0]["momentum"] == pytest.approx(0.9)
