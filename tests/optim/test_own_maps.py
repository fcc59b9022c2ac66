"""Slips in a map or a transform of one's own are named, before a step changes a parameter."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.spectra import gaussian

import polarstep as ps
from polarstep.maps import MapState, Polar, Traits
from polarstep.maps.base import Factors, Lift


@dataclass(frozen=True)
class Stateful(ps.PolarMap):
    """A map whose ``step`` is ``made``."""

    made: Any
    names: Any = ()

    @property
    def traits(self):
        return Traits(carries=self.names)

    def step(self, M, carry, draw):
        return self.made(M)


@dataclass(frozen=True)
class Changed(ps.Transform):
    """A transform whose ``step`` is ``made``."""

    made: Any
    names: Any = ()

    @property
    def carries(self):
        return self.names

    def step(self, T, M, carry):
        return self.made(T)


NO_PAIR = "expected a pair, T and a MapState"
OTHER_SHAPE = r"returned a T of shape \(2, 6, 1\) for matrices of shape \(2, 6, 9\)"
UNKNOWN = r"left 'rows' in its carry, and carries={}: .* as carries = \('rows',\)"


def factored(rows=6, columns=9, ell=4):
    """A map whose step returns factors of these shapes for matrices 6×9."""

    def made(M):
        Q, B, Z = M.new_zeros(2, rows, ell), M.new_zeros(2, 4, columns), M.new_zeros(2, 4, columns)
        return Polar(M, factors=Factors(Q, B, Lift(Z), 4, orthonormal=True)), MapState()

    return Stateful(made)


SLIPS = [
    (
        Stateful(lambda M: (Polar(M), MapState())),
        r"step returned a Polar without T and .*: expected Polar",
    ),
    (
        Stateful(lambda M: (Polar(M, "T"), MapState())),
        "Stateful.step returned a str: expected T, a tensor",
    ),
    (
        Stateful(lambda M: (M, MapState())),
        r"returned T as a Tensor: expected polarstep\.maps\.Polar\(M",
    ),
    (
        Stateful(lambda M: (Polar(None, M), MapState())),
        "a Polar whose M is None for matrices of shape",
    ),
    (
        Stateful(lambda M: (Polar(M[:1], M), MapState())),
        r"a Polar whose M is of shape \(1, 6, 9\) for mat",
    ),
    (
        Stateful(lambda M: (Polar(M, M, squared_norm=3.0), MapState())),
        r"squared_norm is a float: expected a function without arguments",
    ),
    (
        Stateful(lambda M: (Polar(M, factors=(M, M)), MapState())),
        r"returned factors as a tuple: expected polarstep\.maps\.base\.Factors",
    ),
    (factored(rows=5), r"returned factors \(2, 5, 4\) and \(2, 4, 9\) .*: expected \(2, 6, ℓ\)"),
    (factored(columns=8), r"returned factors \(2, 6, 4\) and \(2, 4, 8\)"),
    (factored(ell=3), r"returned factors \(2, 6, 3\) and \(2, 4, 9\)"),
    (
        Stateful(lambda M: (Polar(M, M[:1]), MapState())),
        r"shape \(1, 6, 9\) for matrices of shape \(2, 6, 9\)",
    ),
    (Stateful(lambda M: Polar(M, M)), f"Stateful.step returned a Polar: {NO_PAIR}"),
    (Stateful(lambda M: (Polar(M, M), None)), rf"returned \(Polar, NoneType\): {NO_PAIR}"),
    (Stateful(lambda M: (Polar(M, M[..., :1]), MapState())), f"Stateful.step {OTHER_SHAPE}"),
    (Stateful(lambda M: (Polar(M, M), MapState(rows=M[..., 0]))), UNKNOWN.format(r"\(\)")),
    (Stateful(lambda M: (Polar(M, M), MapState(rows=M[..., 0])), "rows"), UNKNOWN.format("'rows'")),
    (Changed(lambda T: T), f"Changed.step returned a Tensor: {NO_PAIR}"),
    (Stateful(lambda M: [Polar(M, M), MapState()]), f"Stateful.step returned a list: {NO_PAIR}"),
    (Changed(lambda T: (T[..., :1], MapState())), f"Changed.step {OTHER_SHAPE}"),
    (
        Changed(lambda T: (Polar(T, T), MapState())),
        "Changed.step returned a Polar: expected T, a tensor",
    ),
    (Changed(lambda T: (T, MapState(rows=T[..., 0]))), UNKNOWN.format(r"\(\)")),
    (
        Changed(lambda T: (T, MapState(rows=T.sum())), ("rows",)),
        r"left 'rows' of shape \(\) in its carry: expected a tensor whose first dimension is the batch",
    ),
]


@pytest.mark.parametrize(("own", "message"), SLIPS)
def test_what_a_step_may_not_return(own, message):
    params = [torch.nn.Parameter(gaussian(6, 9, seed=seed).float()) for seed in (0, 1)]
    for p in params:
        p.grad = torch.ones_like(p)
    before = [p.clone() for p in params]
    option = "transform" if isinstance(own, ps.Transform) else "polar"
    optimizer = ps.Muon(params, **{option: own})
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer.step()
    assert all(torch.equal(p, start) for p, start in zip(params, before, strict=True))


@pytest.mark.parametrize("layout", ["auto", "transposed"])
def test_what_a_step_may_not_return_before_a_transform(layout):
    p = torch.nn.Parameter(gaussian(6, 9).float())
    p.grad = torch.ones_like(p)
    polar = Stateful(lambda M: (Polar(M), MapState()))
    optimizer = ps.Muon([p], polar=polar, transform=ps.NormalizedRows(), layout=layout)
    with pytest.raises(ValueError, match=r"Stateful\.step returned a Polar without T"):
        optimizer.step()
    assert torch.equal(p, gaussian(6, 9).float())


def test_what_a_call_may_not_return():
    with pytest.raises(ValueError, match=r"Stateful\.step returned a Polar without T"):
        Stateful(lambda M: (Polar(M), MapState()))(gaussian(6, 9))


@dataclass
class Thawed(ps.Transform):
    def step(self, T, M, carry):
        return T, MapState()


@dataclass(frozen=True)
class Listed(ps.Transform):
    numbers: list = field(default_factory=list)

    def step(self, T, M, carry):
        return T, MapState()


@pytest.mark.parametrize("own", [Thawed(), Listed()])
def test_a_transform_that_cannot_be_a_key_is_refused_when_the_optimizer_is_made(own):
    W = torch.nn.Parameter(gaussian(3, 4).float())
    with pytest.raises(
        TypeError, match=r"transform=.* cannot be hashed .* @dataclass\(frozen=True\)"
    ):
        ps.Muon([W], transform=own)
    with pytest.raises(TypeError, match=r"polar=.* cannot be hashed"):
        ps.Muon([W], polar=Stateful(lambda M: M, ["rows"]))


@dataclass(frozen=True)
class StepAlone(ps.PolarMap):
    """A map that has what a map must have, and nothing else."""

    def step(self, M, carry, draw):
        return ps.Exact().step(M, carry, draw)


def test_a_map_has_a_step_and_needs_nothing_else():
    with pytest.raises(TypeError, match=r"abstract .*step"):
        ps.PolarMap()
    M = gaussian(4, 6)
    assert torch.equal(StepAlone()(M), ps.Exact()(M))
    assert torch.equal(StepAlone()(M.mT), ps.Exact()(M.mT))
    assert pickle.loads(pickle.dumps(StepAlone())) == copy.deepcopy(StepAlone()) == StepAlone()
    assert "StepAlone()" in StepAlone().describe(4, 6)
    assert StepAlone().flops(4, 6) > 0
    W = torch.nn.Parameter(torch.zeros(4, 6, dtype=M.dtype))
    W.grad = M
    ps.Muon([W], polar=StepAlone(), lr=1.0, shape_scale="none", nesterov=False).step()
    torch.testing.assert_close(-W.detach(), ps.Exact()(M))


@dataclass(frozen=True)
class Vector(ps.PolarMap):
    """A map with state that says in ``init`` what it begins with."""

    traits = Traits(carries=("v",))

    def init(self, batch, m, n, device, dtype):
        return MapState(v=torch.ones(batch, n, device=device, dtype=dtype))

    def step(self, M, carry, draw):
        return Polar(M, M * 0), MapState(v=carry["v"] + 1)


def test_a_map_resumes_from_what_has_the_shapes_of_its_init():
    polar = Vector()
    assert polar.resumes(MapState(v=torch.ones(7, 5)), 3, 5)
    assert not polar.resumes(MapState(v=torch.ones(7, 4)), 3, 5)
    assert not polar.resumes(MapState(w=torch.ones(7, 5)), 3, 5)


def test_a_random_map_without_numbers_is_named():
    @dataclass(frozen=True)
    class Drawing(StepAlone):
        traits = Traits(draws="every step")

    with pytest.raises(TypeError, match="Drawing draws 'every step', but it has no method numbers"):
        Drawing()(gaussian(4, 6))
