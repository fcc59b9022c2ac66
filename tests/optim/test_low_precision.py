"""bfloat16 parameters that keep small updates, and momentum in fewer bits."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.routing.sample_models import SmallGPT
from tests.spectra import gaussian
from torch import Tensor, nn
from torch.nn import Parameter

from polarstep import SGD, AdamW, Exact, Muon, NewtonSchulz, muon_for
from polarstep.state import BLOCK, momentum_of

POLAR = NewtonSchulz(5, "quintic")


def stepped(
    dtype: torch.dtype, count: int, shape: tuple[int, ...] = (12, 8), **options: object
) -> Tensor:
    """A weight after ``count`` steps, all in one direction, each far below its precision."""
    W = Parameter((gaussian(*shape, seed=1) + 1).bfloat16().to(dtype))
    optimizer = Muon([W], **({"lr": 3e-3, "polar": Exact(), "shape_scale": "none"} | options))
    for _ in range(count):
        W.grad = gaussian(*shape, seed=2).to(dtype)
        optimizer.step()
    return W.detach()


@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("split", [None, (4, 4, 4), (6, 3, 3)], ids=str)
def test_small_updates_are_kept(decay, nonfinite, split):
    options = {"weight_decay": decay, "nonfinite": nonfinite, "split_sizes": split}
    start = stepped(torch.float32, 0)
    move = stepped(torch.float32, 66, **options) - start
    lost = stepped(torch.bfloat16, 66, **options).float() - start
    kept = stepped(torch.bfloat16, 66, rounding="compensated", **options).float() - start
    assert (lost - move).norm() > 0.3 * move.norm()
    # X itself has eight bits, the start and the end are rounded; the path between is not.
    assert (kept - move).norm() < 0.2 * move.norm()


@pytest.mark.parametrize("rule", [AdamW(lr=1e-4), SGD(lr=1e-4)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_vectors_keep_small_updates_too(rule, nonfinite):
    def run(dtype: torch.dtype, rounding: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2)).to(dtype)
        optimizer = muon_for(model, others=rule, rounding=rounding, nonfinite=nonfinite)
        gain = model[1].weight
        for _ in range(100):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
        return gain.detach().float()

    exact = 1 - run(torch.float32, "nearest")
    assert torch.all(run(torch.bfloat16, "nearest") == 1)  # every step was lost
    assert torch.all((1 - run(torch.bfloat16, "compensated") - exact).abs() < 0.3 * exact)


@pytest.mark.parametrize("rule", [AdamW(lr=1e-4), SGD(lr=1e-4)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_a_group_may_have_parameters_in_several_precisions(rule, nonfinite, last, wide):
    """Gains in float32 beside embeddings in bfloat16: each is updated as if it were alone."""
    ends = []
    for together in (True, False):
        params = [Parameter(torch.ones(6, dtype=dtype)) for dtype in (wide, torch.bfloat16)]
        given = params[::-1] if last else params
        options = {"algorithm": rule.algorithm, "lr": rule.lr}
        groups = [given] if together else [[p] for p in given]
        optimizer = Muon(
            [{"params": group, **options} for group in groups],
            rounding="compensated",
            nonfinite=nonfinite,
        )
        for _ in range(100):
            for p in params:
                p.grad = torch.full_like(p, 1 / 3)
            optimizer.step()
        ends.append([p.detach() for p in params])
    assert all(map(torch.equal, *ends))
    assert torch.all(ends[0][1] < 1)


def test_compensated_steps_are_those_of_float32_parameters():
    """X + R follows a float32 run to sixteen bits, whatever X alone can show."""
    W = Parameter(gaussian(12, 8, seed=1).bfloat16())
    reference = Parameter(W.detach().float())
    ours = Muon([W], lr=1e-3, polar=Exact(), rounding="compensated", momentum_dtype=torch.float32)
    theirs = Muon([reference], lr=1e-3, polar=Exact())
    for k in range(50):
        gradient = gaussian(12, 8, seed=k).bfloat16()
        W.grad, reference.grad = gradient, gradient.float()
        ours.step()
        theirs.step()
    total = W.detach().float() + ours.state[W]["rounding_error"]
    assert (total - reference.detach()).abs().max() < 50 * 2.0**-17 * reference.detach().abs().max()


def test_parameters_in_float32_are_not_touched_by_it():
    assert torch.equal(stepped(torch.float32, 5), stepped(torch.float32, 5, rounding="compensated"))


# --- state of AdamW and SGD for float16 parameters


def in_float16(
    rule: AdamW | SGD, size: float, **options: object
) -> tuple[Muon, Parameter, Muon, Parameter]:
    """100 steps of a float16 parameter, and of one in float32 with the same gradients."""
    W = Parameter(torch.ones(64, dtype=torch.float16))
    reference = Parameter(torch.ones(64))
    hyperparameters = {"algorithm": rule.algorithm, "lr": rule.lr}
    ours = Muon([{"params": [W], **hyperparameters}], **options)
    theirs = Muon([{"params": [reference], **hyperparameters}])
    for k in range(100):
        W.grad = (size * gaussian(64, seed=k).abs()).half()
        reference.grad = W.grad.float()
        ours.step()
        theirs.step()
    return ours, W, theirs, reference


# In float16 AdamW's v would be zero for the first two; for the last v and SGD's C would be infinite.
SIZES = [1e-6, 1e-4, 1.0, 1e4]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rule", [AdamW, SGD], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_steps_of_float16_parameters_are_those_of_float32(rule, size, nonfinite):
    lr = 1e-3 if rule is AdamW else 1e-4 / size
    options = {"rounding": "compensated", "nonfinite": nonfinite}
    ours, W, _, reference = in_float16(rule(lr=lr), size, **options)
    total = W.detach().float() + ours.state[W]["rounding_error"]
    assert (1 - reference.detach()).min() > 0.01
    # X + R has 22 bits, and each of the 100 steps is rounded to them.
    torch.testing.assert_close(total, reference.detach(), rtol=0, atol=100 * 2.0**-22)


@pytest.mark.parametrize(
    ("dtype", "each"), [(torch.float16, 4), (torch.bfloat16, 2), (torch.float32, 4)], ids=str
)
@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
@pytest.mark.parametrize("rule", [AdamW, SGD], ids=["AdamW", "SGD"])
def test_bytes_of_the_state(rule, rounding, dtype, each):
    """The figures of docs/precision.md."""
    p = Parameter(torch.ones(64, dtype=dtype))
    optimizer = Muon([{"params": [p], "algorithm": rule.algorithm}], rounding=rounding)
    p.grad = torch.ones_like(p)
    optimizer.step()
    found = sum(X.nbytes for X in optimizer.state[p].values() if X.shape == p.shape)
    compensation = 2 if rounding == "compensated" and dtype != torch.float32 else 0
    assert found == (each * len(rule.buffers) + compensation) * p.numel()


@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
@pytest.mark.parametrize("saved", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_float16_models_load_states_of_any_precision(rounding, saved):
    """A checkpoint in float32 keeps its small numbers; one in 16 bits, of before, is cast up."""
    p = Parameter(torch.ones(64, dtype=torch.float16))
    optimizer = Muon([{"params": [p], "algorithm": "adamw"}], rounding=rounding)
    p.grad = torch.ones_like(p)
    optimizer.step()
    checkpoint = optimizer.state_dict()
    of_parameter = checkpoint["state"][0]
    size = 1e-12 if saved != torch.float16 else 1e-3
    for key in AdamW.buffers:
        of_parameter[key] = (size * gaussian(64, seed=1).abs()).to(saved)
    again = Muon([{"params": [p], "algorithm": "adamw"}], rounding=rounding)
    again.load_state_dict(checkpoint)
    p.grad = torch.zeros_like(p)
    again.step()
    for key, beta in zip(AdamW.buffers, AdamW().betas, strict=True):
        found = again.state[p][key]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, beta * of_parameter[key].float(), rtol=1e-6, atol=0)
    resumed = Muon([{"params": [p], "algorithm": "adamw"}], rounding=rounding)
    resumed.load_state_dict(again.state_dict())
    for key, value in again.state[p].items():
        assert resumed.state[p][key].dtype == value.dtype
        assert torch.equal(resumed.state[p][key], value)


@pytest.mark.parametrize(
    ("dtype", "beta2", "expected"),
    [
        (torch.float32, 0.999, 0.027),
        (torch.bfloat16, 0.999, 0.26),
        (torch.bfloat16, 0.99, 0.01),
        (torch.bfloat16, 0.95, 0.01),
    ],
)
def test_v_in_bfloat16_stands_still_where_the_page_says_so(dtype, beta2, expected):
    """The figures of docs/precision.md: v in bfloat16 cannot fall at β₂ = 0.999."""
    p = Parameter(torch.ones(256, dtype=dtype))
    group = {"params": [p], "algorithm": "adamw", "lr": 1e-5, "betas": (0.9, beta2)}
    optimizer = Muon([group])
    torch.manual_seed(0)
    for k in range(3000):
        p.grad = torch.randn_like(p) * (1.0 if k < 300 else 0.1)
        optimizer.step()
    v = optimizer.state[p]["exp_avg_sq"].float().mean()
    assert float(v) == pytest.approx(expected, rel=0.05)


# --- momentum


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_momentum_in_fewer_bits(kept, nesterov, nonfinite):
    ends = []
    for dtype in (None, kept):
        params = [Parameter(gaussian(16, 24, seed=k).float()) for k in range(3)]
        optimizer = Muon(
            params,
            lr=0.02,
            polar=POLAR,
            nesterov=nesterov,
            momentum_dtype=dtype,
            nonfinite=nonfinite,
        )
        for k in range(20):
            for i, p in enumerate(params):
                p.grad = gaussian(16, 24, seed=10 * k + i).float()
            optimizer.step()
        ends.append([p.detach() for p in params])
    state = optimizer.state[params[0]]
    assert state["momentum_buffer"].dtype == kept
    bytes_kept = sum(
        state[key].nbytes for key in ("momentum_buffer", "momentum_scale") if key in state
    )
    most = {torch.bfloat16: 2.0, torch.int8: 1 + 4 / BLOCK}[kept]
    assert bytes_kept <= most * params[0].numel()
    for a, b, p in zip(*ends, range(3), strict=True):
        travelled = (b - gaussian(16, 24, seed=p).float()).norm()
        assert 0 < (a - b).norm() < 0.05 * travelled


def test_eight_bits_are_within_half_a_scale():
    C = torch.cat([gaussian(200).float(), torch.zeros(100), torch.tensor([1e-30, 1e30])])
    W = Parameter(torch.zeros(302, 1))
    optimizer = Muon([W], polar=Exact(), momentum_dtype=torch.int8)
    W.grad = C[:, None].clone()
    optimizer.step()
    state = optimizer.state[W]
    read = momentum_of(W, state, torch.int8)[:, 0]
    half = state["momentum_scale"].repeat_interleave(BLOCK)[:302] / 2
    assert torch.all((read - C).abs() <= half * (1 + 1e-5))
    assert torch.all(read[C == 0] == 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_in_eight_bits(bad):
    W = Parameter(gaussian(4, 3).float())
    optimizer = Muon([W], polar=POLAR, momentum_dtype=torch.int8)
    W.grad = torch.full_like(W, bad)
    optimizer.step()
    assert not momentum_of(W, optimizer.state[W], torch.int8).isfinite().any()


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_run_goes_on_from_its_checkpoint(kept, dtype, tmp_path):
    def steps(optimizer: Muon, model: SmallGPT, ks: range) -> list[Tensor]:
        for k in ks:
            for i, p in enumerate(model.parameters()):
                p.grad = gaussian(*p.shape, seed=100 * k + i).to(p.dtype)
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    torch.manual_seed(0)
    model = SmallGPT("untied").to(dtype)
    options = {"momentum_dtype": kept, "rounding": "compensated", "polar": POLAR}
    optimizer = muon_for(model, **options)
    steps(optimizer, model, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "c.pt")
    middle = copy.deepcopy(model.state_dict())
    expected = steps(optimizer, model, range(3, 6))
    model.load_state_dict(middle)
    again = muon_for(model)
    again.load_state_dict(torch.load(tmp_path / "c.pt", weights_only=True))
    assert again.param_groups[0]["momentum_dtype"] == kept
    found = steps(again, model, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_precision_may_change_between_steps():
    W = Parameter(gaussian(8, 8).float())
    optimizer = Muon([W], polar=POLAR)
    for kept in (None, torch.int8, torch.bfloat16, torch.int8, None):
        optimizer.param_groups[0]["momentum_dtype"] = kept
        W.grad = gaussian(8, 8).float()
        optimizer.step()
        assert optimizer.state[W]["momentum_buffer"].dtype == (kept or torch.float32)
        assert ("momentum_scale" in optimizer.state[W]) == (kept == torch.int8)


def test_momentum_in_eight_bits_fades_too():
    """A matrix whose gradient is zero for good comes to rest, as with other precisions."""
    W = Parameter(gaussian(6, 4).float())
    optimizer = Muon([W], momentum=0.5, polar=POLAR, momentum_dtype=torch.int8)
    W.grad = gaussian(6, 4).float()
    optimizer.step()
    W.grad.zero_()
    for _ in range(129):
        optimizer.step()
    at = W.detach().clone()
    optimizer.step()
    assert torch.equal(W.detach(), at)


def test_the_table_says_so():
    W = Parameter(gaussian(8, 8).bfloat16())
    optimizer = Muon([W], momentum_dtype=torch.int8, rounding="compensated")
    assert "momentum in int8, rounding compensated" in optimizer.routes.rows[0].polar
    assert "momentum" not in Muon([W]).routes.rows[0].polar


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "compensated"])
@pytest.mark.parametrize("rule", [AdamW(), SGD()], ids=["AdamW", "SGD"])
def test_a_model_may_change_its_precision_between_two_steps(to, rounding, rule):
    torch.manual_seed(0)
    model = SmallGPT("untied")
    optimizer = muon_for(model, others=rule, rounding=rounding)
    twin = copy.deepcopy(model)
    beside = muon_for(twin, others=rule, rounding=rounding)
    for step in range(4):
        if step == 2:
            model.to(to)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = gaussian(*q.shape, seed=step).float()
            p.grad = q.grad.to(p.dtype)
        optimizer.step()
        beside.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.float(), q, rtol=0.02, atol=2e-3)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch 2.9 has no grad_dtype")
@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("held", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("algorithm", ["muon", "adamw", "sgd"])
def test_a_gradient_may_have_a_precision_of_its_own(given, held, algorithm):
    ends = []
    for dtype in (given, held):
        W = Parameter(gaussian(8, 6, seed=1).to(held))
        W.grad_dtype = None
        optimizer = Muon([{"params": [W], "algorithm": algorithm, "lr": 0.1}])
        for step in range(2):
            W.grad = gaussian(8, 6, seed=step + 2).bfloat16().to(dtype)
            optimizer.step()
        ends.append(W.detach().float())
    torch.testing.assert_close(*ends, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("algorithm", ["muon", "adamw", "sgd"])
@pytest.mark.parametrize("entry", [0.0, float("nan")], ids=["zero", "skipped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_step_that_changes_nothing_leaves_a_parameter_midway_alone(algorithm, entry, dtype):
    """R is half the distance to the next number, which is even: X + R is rounded to that one."""
    eps = torch.finfo(dtype).eps
    W = Parameter(torch.full((4, 3), 1 + eps, dtype=dtype))
    optimizer = Muon(
        [{"params": [W], "algorithm": algorithm}], rounding="compensated", nonfinite="skip"
    )
    for first in (True, False):
        W.grad = torch.zeros_like(W)
        if not first:
            R = optimizer.state[W]["rounding_error"].fill_(eps / 2)
            W.grad[0, 0] = entry
        optimizer.step()
    assert W.detach().float().eq(1 + eps).all()
    assert R.float().eq(eps / 2).all()
