"""Convolutions, experts, fused projections and batches: each equals doing the pieces by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from tests.spectra import gaussian
from torch.nn import Parameter

from polarstep import Exact, LowRank, Muon, NewtonSchulz, PolarMap, rng
from polarstep.engines.torch import ParameterUpdate
from polarstep.maps import Warm, wide


@dataclass(frozen=True)
class Counted(PolarMap):
    """A polar map that remembers what it was called on."""

    calls: list[tuple[int, ...]] = field(default_factory=list, hash=False, compare=False)

    def step(self, M, carry, draw):
        self.calls.append(tuple(wide(M).shape))
        return Exact().step(M, carry, draw)


def step(*params, steps=3, **options):
    """A few steps with fixed gradients, each parameter's a function of its shape."""
    optimizer = Muon(params, **({"polar": Exact(), "lr": 0.1, "weight_decay": 0.1} | options))
    for k in range(steps):
        for p in params:
            p.grad = gaussian(*p.shape, seed=k).to(p.dtype)
        optimizer.step()
    return optimizer


def by_hand(pieces, gradients, **options):
    """The same steps with every matrix as a parameter of its own."""
    params = [Parameter(piece.clone()) for piece in pieces]
    optimizer = Muon(params, **({"polar": Exact(), "lr": 0.1, "weight_decay": 0.1} | options))
    for gradient in gradients:
        for p, g in zip(params, gradient, strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in params]


def flat(X):
    """A filter as one matrix."""
    return [X.reshape(X.shape[0], -1)]


def stacked(X):
    """The matrices of a stack."""
    return [*X.reshape(-1, *X.shape[-2:])]


# The shape of a parameter, options that say how it is read, and its matrices.
READ = {
    "filters": ((8, 3, 2, 2), {}, flat),
    "filters in three dimensions": ((4, 2, 2, 2, 2), {}, flat),
    "filters in one dimension": ((8, 3, 2), {"layout": "conv"}, flat),
    "experts": ((2, 3, 5, 7), {"layout": "stack"}, stacked),
    **{
        f"parts {split} of {shape}": (
            shape,
            {"split_sizes": split},
            lambda X, split=split: [part for M in stacked(X) for part in M.split(split)],
        )
        for split in ((6, 3, 3), (4, 4, 4), (12,), (1, 11))
        for shape in ((12, 5), (2, 12, 5))
    },
}


@pytest.mark.parametrize(("shape", "options", "matrices"), READ.values(), ids=READ)
@pytest.mark.parametrize("scale", ["spectral", "rms"])
def test_each_matrix_steps_as_if_it_were_alone(shape, options, matrices, scale):
    W = Parameter(gaussian(*shape, seed=9))
    start = matrices(W.detach().clone())
    step(W, shape_scale=scale, **options)
    gradients = [matrices(gaussian(*shape, seed=k)) for k in range(3)]
    expected = by_hand(start, gradients, shape_scale=scale)
    for found, alone in zip(matrices(W.detach()), expected, strict=True):
        torch.testing.assert_close(found, alone)


def test_channels_last_is_the_same_and_stays_so():
    W = Parameter(gaussian(8, 3, 2, 2, seed=9))
    L = Parameter(W.detach().clone(memory_format=torch.channels_last))
    optimizer = Muon([W, L], lr=0.1, polar=NewtonSchulz())
    for k in range(3):
        W.grad = gaussian(8, 3, 2, 2, seed=k)
        L.grad = W.grad.clone(memory_format=torch.channels_last)
        optimizer.step()
    torch.testing.assert_close(L, W)
    assert L.is_contiguous(memory_format=torch.channels_last)
    buffer = optimizer.state[L]["momentum_buffer"]
    assert buffer.is_contiguous(memory_format=torch.channels_last)


def test_equal_shapes_are_one_call_whichever_groups_they_are_in():
    polar = Counted()
    groups = [
        {"params": [Parameter(gaussian(4, 6)), Parameter(gaussian(6, 4))]},
        {"params": [Parameter(gaussian(4, 6))], "lr": 0.5, "momentum": 0.5, "nesterov": False},
        {"params": [Parameter(gaussian(4, 3, 2))], "layout": "conv"},
        {"params": [Parameter(gaussian(5, 4, 6))]},
        {"params": [Parameter(gaussian(12, 6))], "split_sizes": (4, 4, 4)},
        {"params": [Parameter(gaussian(4, 6).float())]},
    ]
    optimizer = Muon(groups, polar=polar)
    for group in groups:
        for p in group["params"]:
            p.grad = gaussian(*p.shape, seed=3).to(p.dtype)
    optimizer.step()
    assert sorted(polar.calls) == [(1, 4, 6), (1, 4, 6), (11, 4, 6)]  # float32, transposed, rest


def test_a_group_may_override_everything():
    a, b = (Parameter(gaussian(4, 6)) for _ in range(2))
    own = {
        "lr": 0.3,
        "momentum": 0.5,
        "nesterov": False,
        "polar": NewtonSchulz(3, "cubic"),
        "weight_decay": 0.2,
        "shape_scale": "rms",
    }
    together = Muon([{"params": [a]}, {"params": [b], **own}], polar=Exact())
    c, d = (Parameter(gaussian(4, 6)) for _ in range(2))
    apart = [Muon([c], polar=Exact()), Muon([d], **own)]
    for k in range(3):
        for p in (a, b, c, d):
            p.grad = gaussian(4, 6, seed=k)
        for optimizer in (together, *apart):
            optimizer.step()
    torch.testing.assert_close(a, c)
    torch.testing.assert_close(b, d)


@pytest.mark.parametrize("sketch_of", [LowRank(3, 2, always_sketch=True)], ids=str)
def test_a_sketch_does_not_depend_on_who_else_is_there(sketch_of):
    alone, a, b = (Parameter(gaussian(8, 12)) for _ in range(3))
    with torch.no_grad():
        b.mul_(-3)
    first, both = Muon([alone], polar=sketch_of, seed=5), Muon([b, a], polar=sketch_of, seed=5)
    other = Parameter(gaussian(8, 12))
    seeded = Muon([other], polar=sketch_of, seed=6)
    for k in range(3):
        for p in (alone, a, b, other):
            p.grad = gaussian(8, 12, seed=k) * (1 if p is not b else 0.1)
        for optimizer in (first, both, seeded):
            optimizer.step()
    torch.testing.assert_close(alone, a)
    assert not torch.allclose(alone, other)


def test_the_sketch_of_a_step_can_be_drawn_again():
    W = Parameter(gaussian(8, 12))
    polar = LowRank(3, 2, always_sketch=True)
    optimizer, seen = Muon([W], polar=polar, seed=5), []
    handle = optimizer.register_polar_hook(seen.append)
    for k in range(2):
        W.grad = gaussian(8, 12, seed=k)
        optimizer.step()
    handle.remove()
    optimizer.step()
    assert len(seen) == 2
    for bucket in seen:
        again = polar(bucket.M, generator=rng.generator(*bucket.generator_key))
        assert torch.equal(again, bucket.T)
    assert [bucket.step for bucket in seen] == [0, 1]


@pytest.mark.parametrize(
    "polar",
    [
        LowRank(3, 2, always_sketch=True),
        LowRank(3, 2, sketch=Warm(), always_sketch=True),
        NewtonSchulz(),
    ],
    ids=str,
)
def test_hooks_only_look(polar):
    watched, plain = (Parameter(gaussian(8, 12)) for _ in range(2))
    optimizers = [Muon([watched], polar=polar), Muon([plain], polar=polar)]
    optimizers[0].register_polar_hook(lambda bucket: bucket.T.norm())
    for k in range(3):
        for p, optimizer in zip((watched, plain), optimizers, strict=True):
            p.grad = gaussian(8, 12, seed=k)
            optimizer.step()
    assert torch.equal(watched, plain)


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (2, 3, 8, 12), (8, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_t_that_is_not_stored_is_the_same_step(shape, nonfinite, decay, monkeypatch):
    options = {"layout": "stack" if shape == (2, 3, 8, 12) else "auto", "nonfinite": nonfinite}
    options |= {"polar": LowRank(3, 2, always_sketch=True), "weight_decay": decay}
    ends, taken = [], []
    as_they_are = ParameterUpdate.takes_product
    for takes in (as_they_are, lambda *_: False):

        def noted(*arguments, takes=takes):
            taken.append(takes(*arguments))
            return taken[-1]

        monkeypatch.setattr(ParameterUpdate, "takes_product", noted)
        W = Parameter(gaussian(*shape, seed=9).float())
        step(W, **options)
        ends.append(W.detach())
    assert taken == [True] * 3 + [False] * 3
    torch.testing.assert_close(*ends)


def test_t_is_stored_for_those_that_cannot_take_a_product():
    polar = LowRank(3, 2, always_sketch=True)
    plain = Parameter(gaussian(8, 12, seed=9).float())
    transposed = Parameter(plain.detach().mT.contiguous().mT)
    blocks = Parameter(torch.cat([plain.detach(), torch.ones(9, 12)]))
    rounded = Parameter(plain.detach().bfloat16())
    step(plain, polar=polar)
    step(transposed, polar=polar)
    step(blocks, polar=polar, split_sizes=(8, 9))
    step(rounded, polar=polar)
    adjustable = Parameter(gaussian(8, 12, seed=9).float())
    step(adjustable, polar=polar, lr=torch.tensor(0.1))
    for other in (transposed, adjustable):
        torch.testing.assert_close(other, plain)
    torch.testing.assert_close(rounded.float(), plain.detach(), atol=0.02, rtol=0.02)
    assert blocks.isfinite().all()
    assert not torch.equal(blocks[8:], torch.ones(9, 12))


def test_polyak_leaves_its_buffer_as_it_is():
    # M is the buffer itself here: a map that normalized in place would spoil it.
    for dtype in (torch.bfloat16, torch.float32):
        W = Parameter(gaussian(4, 6).to(dtype))
        optimizer = Muon([W], nesterov=False, momentum=0.9, polar=NewtonSchulz())
        W.grad = gaussian(4, 6).to(dtype)
        optimizer.step()
        assert torch.equal(optimizer.state[W]["momentum_buffer"], W.grad)


def test_a_warm_start_follows_a_change_of_rank():
    W = Parameter(gaussian(8, 12))
    optimizer = Muon([W], polar=LowRank(3, 2, sketch=Warm(), always_sketch=True))
    for rank in (3, 3, 4, 2):
        optimizer.param_groups[0]["polar"] = LowRank(rank, 2, sketch=Warm(), always_sketch=True)
        W.grad = gaussian(8, 12)
        before = W.detach().clone()
        optimizer.step()
        assert torch.linalg.matrix_rank(W.detach() - before, rtol=1e-9) == rank + 2


def test_a_warm_start_captures_a_momentum_that_stands_still():
    M = torch.diag(torch.tensor([8.0, 7, 6, 5, 4, 3, 2, 1]).double())
    W = Parameter(torch.zeros(8, 8).double())
    polar = LowRank(3, 0, power=0, sketch=Warm(noise=0.01), inner=Exact(), always_sketch=True)
    optimizer, aligned = Muon([W], polar=polar, momentum=0.0, nesterov=False), []
    optimizer.register_polar_hook(lambda b: aligned.append(float((b.M * b.T).sum())))
    for _ in range(12):
        W.grad = M.clone()
        optimizer.step()
    assert aligned[0] < aligned[-1]
    assert aligned[-1] > 0.97 * 21  # σ₁ + σ₂ + σ₃


GAPS = {
    "gaps in memory": lambda X: torch.stack([X, X], -1)[..., 0],
    "transposed": lambda X: X.mT.contiguous().mT,
    "contiguous": lambda X: X.contiguous(),
}


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("algorithm", ["adamw", "sgd"])
@pytest.mark.parametrize("parameter", GAPS)
@pytest.mark.parametrize("gradient", GAPS)
def test_elementwise_rules_do_not_depend_on_memory(parameter, gradient, algorithm, nonfinite):
    """torch's fused AdamW and SGD walk through memory and do not look at strides."""
    plain = Parameter(gaussian(6, 4, seed=9))
    W = Parameter(GAPS[parameter](plain.detach().clone()))
    strides = W.stride()
    optimizer = Muon(
        [
            {"params": [p], "algorithm": algorithm, "weight_decay": 0.1, "nonfinite": nonfinite}
            for p in (plain, W)
        ]
    )
    for k in range(3):
        plain.grad = gaussian(6, 4, seed=k)
        W.grad = GAPS[gradient](plain.grad.clone())
        optimizer.step()
        torch.testing.assert_close(W, plain, atol=1e-12, rtol=0)
    assert W.stride() == strides
    for name, value in optimizer.state[plain].items():
        torch.testing.assert_close(optimizer.state[W][name], value, atol=1e-12, rtol=0)
    W.grad[0, 0] = float("nan")
    plain.grad = None
    before = W.detach().clone()
    optimizer.step()
    assert torch.equal(W, before) == (nonfinite == "skip")
