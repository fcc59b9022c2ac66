"""``nonfinite="skip"``: as if the step had not been for that parameter, decided on the device."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from tests.counting import Operations
from tests.own_parts import SignDescent
from tests.spectra import gaussian
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from polarstep import LowRank, Muon, NewtonSchulz, gradients, others
from polarstep.maps import Warm

POLARS = [
    NewtonSchulz(),
    LowRank(3, 2, orth="products", always_sketch=True),
    LowRank(3, 2, sketch=Warm(), orth="products", always_sketch=True),
]


def model(dtype=torch.float64):
    return [
        Parameter(gaussian(*shape, seed=i).to(dtype))
        for i, shape in enumerate([(8, 12), (8, 12), (5,), (5,), (7,), (7,)])
    ]


def optimizer_of(params, **options):
    groups = [
        {"params": params[:2]},
        {"params": params[2:4], "algorithm": "adamw", "lr": 0.1, "weight_decay": 0.1},
        {"params": params[4:], "algorithm": "sgd", "lr": 0.1, "weight_decay": 0.1},
    ]
    return Muon(groups, weight_decay=0.1, **({"nonfinite": "skip"} | options))


def give_gradients(params, step, spoil=(), value=math.nan):
    for i, p in enumerate(params):
        p.grad = gaussian(*p.shape, seed=100 * step + i).to(p.dtype)
        if i in spoil:
            p.grad.view(-1)[-1] = value


def snapshot(optimizer, p):
    return copy.deepcopy((p.detach(), dict(optimizer.state[p])))


def same(a, b):
    return (
        torch.equal(a[0], b[0])
        and a[1].keys() == b[1].keys()
        and all(torch.equal(a[1][key], b[1][key]) for key in a[1])
    )


@pytest.mark.parametrize("polar", POLARS, ids=str)
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "polyak"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_affected_are_left_alone_and_the_others_are_not(polar, nesterov, value):
    params, clean = model(), model()
    optimizer, reference = (
        optimizer_of(ps, polar=polar, nesterov=nesterov) for ps in (params, clean)
    )
    for step in range(2):
        give_gradients(params, step)
        give_gradients(clean, step)
        optimizer.step()
        reference.step()
    spoilt = (0, 2, 4)
    before = {i: snapshot(optimizer, params[i]) for i in spoilt}
    give_gradients(params, 2, spoilt, value)
    give_gradients(clean, 2)
    optimizer.step()
    reference.step()
    for i, p in enumerate(params):
        if i in spoilt:
            assert same(snapshot(optimizer, p), before[i]), f"parameter {i} was changed"
        else:
            assert same(snapshot(optimizer, p), snapshot(reference, clean[i]))


@pytest.mark.parametrize("step_of_trouble", [0, 2])
def test_afterwards_all_goes_on_as_if_nothing_had_been(step_of_trouble):
    # A deterministic map: a sketch is a function of the step, which goes on counting.
    params, clean = model(), model()
    optimizer, reference = optimizer_of(params), optimizer_of(clean)
    for step in range(5):
        give_gradients(params, step, range(6) if step == step_of_trouble else ())
        optimizer.step()
        if step != step_of_trouble:
            give_gradients(clean, step)
            reference.step()
    for p, q in zip(params, clean, strict=True):
        assert same(snapshot(optimizer, p), snapshot(reference, q))
    assert optimizer.param_groups[0]["step"] == reference.param_groups[0]["step"] + 1


def test_without_trouble_it_changes_nothing():
    for dtype in (torch.float64, torch.float32):
        skipping, plain = model(dtype), model(dtype)
        optimizers = [optimizer_of(skipping), optimizer_of(plain, nonfinite="propagate")]
        for step in range(4):
            for params, optimizer in zip((skipping, plain), optimizers, strict=True):
                give_gradients(params, step)
                optimizer.step()
        for p, q in zip(skipping, plain, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-6)


def test_propagate_is_what_torch_does():
    params = model()
    optimizer = optimizer_of(params, nonfinite="propagate", polar=LowRank(3, 2, always_sketch=True))
    give_gradients(params, 0, (0, 2, 4))
    optimizer.step()
    for i, p in enumerate(params):
        assert p.isfinite().all() == (i not in (0, 2, 4))


def test_large_is_not_infinite_and_empty_is_not_either():
    W, E, F = (Parameter(torch.zeros(shape)) for shape in ((3, 4), (0, 4), (4, 0)))
    optimizer = Muon([W, E, F], nonfinite="skip", polar=NewtonSchulz())
    W.grad = torch.full((3, 4), 1e36)
    E.grad, F.grad = torch.zeros_like(E), torch.zeros_like(F)
    optimizer.step()
    assert W.any()


class NoSync(TorchDispatchMode):
    """Fail where a value is brought to the host, which on a GPU waits for it."""

    SYNCS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item", "masked_select")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.SYNCS, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("polar", POLARS, ids=str)
@pytest.mark.parametrize("nonfinite", ["skip", "propagate"])
def test_nothing_waits_for_the_device(polar, nonfinite, monkeypatch):
    # A CPU looks at norms, as that costs it nothing.
    monkeypatch.setattr("polarstep.ops.cpu.Cpu.host_reads_are_free", False)
    params = model(torch.float32)
    optimizer = optimizer_of(params, polar=polar, nonfinite=nonfinite)
    for step in range(3):
        give_gradients(params, step, (0, 2, 4) if nonfinite == "skip" else ())
        # The first step of a process computes coefficients, on the host.
        with NoSync() if step else nullcontext():
            optimizer.step()
    with NoSync(), pytest.raises(AssertionError, match="waits for the device"):
        params[0].sum().item()


def launches_of_a_step(
    count: int, size: int, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Operations of a step on ``count`` vectors of two sizes, found finite as on a GPU."""
    monkeypatch.setattr(gradients, "_by_norms", lambda device: True)
    params = [Parameter(torch.ones(size + i % 2)) for i in range(count)]
    optimizer = Muon([{"params": params, "algorithm": algorithm}], nonfinite="skip")
    for _ in range(2):  # the first step makes the states
        give_gradients(params, 0, spoil=(1,))
        with Operations() as ops:
            optimizer.step()
    assert optimizer.state[params[1]].keys() == optimizer.state[params[0]].keys()
    assert torch.equal(params[1], torch.ones(size + 1))
    assert not torch.equal(params[0], torch.ones(size))
    return ops.launches


@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
@pytest.mark.parametrize("size", [5, 100_000])
def test_many_vectors_take_as_many_launches_as_a_few(size, algorithm, monkeypatch):
    few, many = (launches_of_a_step(count, size, algorithm, monkeypatch) for count in (4, 40))
    assert many == few < 40


def test_a_rule_that_may_look_at_all_gradients_is_called_for_one_parameter_at_a_time(monkeypatch):
    """With the gradient of a skipped parameter beside it, its other parameters could become NaN."""
    calls, update = [], SignDescent.update

    def counted(group, params, *rest, **options):
        calls.append(len(params))
        update(group, params, *rest, **options)

    monkeypatch.setattr(SignDescent, "update", staticmethod(counted))
    params = [Parameter(torch.ones(5)) for _ in range(3)]
    optimizer = Muon([{"params": params, "algorithm": SignDescent.algorithm}], nonfinite="skip")
    give_gradients(params, 0)
    optimizer.step()
    assert calls == [1, 1, 1]


@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_parameters_that_are_stepped_together_step_as_they_would_alone(
    algorithm, dtype, monkeypatch
):
    """To the last bit, with empty parameters and filters in ``channels_last`` among them."""
    ends = []
    shapes = [(5,), (1,), (64,), (6, 7), (5,), (4, 3, 2, 2), (33,), (0,)]
    for most in (others.MOST_TOGETHER, 70, 0):
        monkeypatch.setattr(others, "MOST_TOGETHER", most)
        params = [Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
        params[5].data = params[5].data.to(memory_format=torch.channels_last)
        options = {"algorithm": algorithm, "weight_decay": 0.1, "lr": 0.1}
        optimizer = Muon([{"params": params} | options], nonfinite="skip")
        for step in range(4):
            give_gradients(params, step, spoil={step, 6})
            optimizer.step()
        states = [optimizer.state[p][key] for p in params for key in sorted(optimizer.state[p])]
        ends.append([p.detach() for p in params] + states)
        assert torch.equal(params[6], torch.ones(33, dtype=dtype))
    for other in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], other, strict=True))
