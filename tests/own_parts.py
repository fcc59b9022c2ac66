"""Polar maps, a sketch, range finders and rules as a user would write them, and runs with the maps.

The library knows nothing of these classes. tests/optim and tests/kernels train with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import polarstep as ps
from polarstep.maps import Draw, Finder, MapState, Polar, Traits, wide
from polarstep.maps.full_space import lift_of
from polarstep.maps.subspace import Basis, orthonormalize
from polarstep.momentum import put

# Two parameters share a shape, so that they are one batch. Rows are multiples of 16 bytes.
SHAPES = [(12, 20), (12, 20), (20, 12), (2, 12, 16)]
FIRST_STEPS = 3  # before a checkpoint, a bad gradient or a parameter's first gradient


@dataclass(frozen=True)
class Leading(ps.PolarMap):
    """T = uvᵀ, the leading singular pair alone, by one power iteration from the last step's v."""

    traits = Traits(carries=("v",), rounds_input=True)

    def init(
        self, batch: int, m: int, n: int, device: torch.device, dtype: torch.dtype
    ) -> MapState:
        return MapState(v=torch.full((batch, n, 1), n**-0.5, device=device, dtype=dtype))

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        v = carry["v"].to(M.dtype)
        u = normalize(M @ v, dim=-2)
        new = normalize(M.mT @ u, dim=-2)
        return Polar(M, u @ new.mT), MapState(v=torch.where(new.any(-2, keepdim=True), new, v))

    def flops(self, m: int, n: int) -> int:
        return 6 * m * n


@dataclass(frozen=True)
class Steady(ps.PolarMap):
    """T·min(1, a/‖M‖_F) with a the average norm so far, which a step updates in its place."""

    decay: float = 0.75
    inner: ps.PolarMap = field(default_factory=lambda: ps.NewtonSchulz(3, "quintic"))

    traits = Traits(carries=("average",), rounds_input=True, ignores_scale=False)

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        norm = torch.linalg.vector_norm(M, dim=(-2, -1), keepdim=True)
        if not carry:
            carry = MapState(average=norm.clone())
        average = carry["average"]
        mixed = torch.lerp(norm, average.to(norm.dtype), self.decay).to(average.dtype)
        if draw.finite is not None:
            mixed = torch.where(draw.finite.reshape(-1, 1, 1) != 0, mixed, average)
        average.copy_(mixed)
        short = (average / norm.clamp_min(1e-30)).clamp_max(1)
        polar, _ = self.inner.step(M, MapState(), draw)
        return Polar(M, polar.dense * short.to(M.dtype)), carry

    def flops(self, m: int, n: int) -> int:
        return self.inner.flops(m, n)


@dataclass(frozen=True)
class Jittered(ps.PolarMap):
    """The inner map of M + ε‖M‖_F·N/√(mn), for Gaussian N."""

    size: float = 0.1
    inner: ps.PolarMap = field(default_factory=lambda: ps.NewtonSchulz(3, "quintic"))

    traits = Traits(draws="every step", rounds_input=True)

    def numbers(
        self,
        m: int,
        n: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = torch.empty(min(m, n), max(m, n), dtype=dtype, device=generator.device)
        return out.normal_(generator=generator)

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        assert draw.numbers is not None
        X = wide(M)
        norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
        noise = draw.numbers.to(X.dtype) * (self.size / math.sqrt(draw.numbers.numel()))
        polar, left = self.inner.step(X + norm * noise, MapState(), Draw())
        return Polar.of_wide(M, polar.dense), left

    def flops(self, m: int, n: int) -> int:
        return self.inner.flops(m, n)


@dataclass(frozen=True)
class Remembering(Jittered):
    """The same, and the last numbers are what is left, so that the carry is the buffer of the draw."""

    traits = Traits(draws="every step", rounds_input=True, carries=("last",))

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        assert draw.numbers is not None
        numbers = draw.numbers
        if carry:  # of a batch of matrices the numbers are one matrix
            numbers = (numbers + carry["last"][0].to(numbers.dtype)) / math.sqrt(2)
        polar, _ = super().step(M, MapState(), Draw(numbers))
        return polar, MapState(last=draw.numbers.expand(len(M), -1, -1))


@dataclass(frozen=True)
class Signs(ps.Sketch):
    """Ω with entries ±1."""

    @property
    def is_dense(self) -> bool:
        return True

    def draw(
        self,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = torch.empty(n, width, dtype=dtype, device=generator.device)
        return out.bernoulli_(generator=generator).mul_(2).sub_(1)

    def omega(self, M: Tensor, numbers: Tensor) -> Tensor:
        return numbers.to(M.dtype)

    def times(self, M: Tensor, numbers: Tensor) -> Tensor:
        return M @ numbers.to(M.dtype)

    def flops(self, m: int, n: int, width: int) -> int:
        return 2 * m * n * width


@dataclass(frozen=True)
class Largest(Finder):
    """The span of the ℓ columns of M that have the largest norms: no random numbers, no state."""

    draws = "never"

    def basis(self, A: Tensor, width: int, carry: MapState, draw: Draw) -> Basis:
        at = torch.linalg.vector_norm(A, dim=-2, keepdim=True).topk(width).indices
        Y = A.gather(-1, at.expand(-1, A.shape[-2], -1))
        return Basis(orthonormalize(Y, self.orth))

    def flops(self, m: int, n: int, width: int) -> int:
        return 2 * m * n + ps.flops.qr(m, width)

    def describe(self, m: int, n: int, inner: ps.PolarMap, width: int, device: torch.device) -> str:
        return "Largest columns"


@dataclass(frozen=True)
class Followed(Finder):
    """Subspace iteration: orth(MMᵀQ₋) with the last step's Q₋, from a random start."""

    draws = "once"
    carries = ("followed",)

    def resumes(self, carry: MapState, m: int, n: int, width: int) -> bool:
        return "followed" in carry and carry["followed"].shape[1:] == (m, width)

    def basis(self, A: Tensor, width: int, carry: MapState, draw: Draw) -> Basis:
        assert draw.numbers is not None
        last = carry.get("followed", draw.numbers)
        return Basis(orthonormalize(A @ (A.mT @ last.to(A.dtype)), self.orth))

    def lift(
        self,
        inner: ps.PolarMap,
        B: Tensor,
        basis: Basis,
        width: int,
        carry: MapState,
        draw: Draw,
    ) -> tuple[Any, MapState]:
        return lift_of(inner, B), MapState(followed=basis.Q)

    def numbers(
        self,
        m: int,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        if out is None:
            out = torch.empty(m, width, dtype=dtype, device=generator.device)
        return out.normal_(generator=generator)

    def flops(self, m: int, n: int, width: int) -> int:
        return 4 * m * n * width + ps.flops.qr(m, width)

    def describe(self, m: int, n: int, inner: ps.PolarMap, width: int, device: torch.device) -> str:
        return "Followed"


@dataclass(frozen=True)
class SecondMoment(ps.Transform):
    """T'ᵢⱼ = Tᵢⱼ/(√vᵢⱼ + ε) with vᵢⱼ ← β₂vᵢⱼ + (1 − β₂)T²ᵢⱼ, a number for each entry, as in AdaMuon."""

    beta2: float = 0.9
    eps: float = 1e-8

    carries = ("second_moment",)
    wide_carries = ("second_moment",)

    def step(self, T: Tensor, M: Tensor, carry: MapState) -> tuple[Tensor, MapState]:
        T = T.to(torch.promote_types(T.dtype, torch.float32))
        v = (1 - self.beta2) * T.square()
        if carry:
            v = v + self.beta2 * carry["second_moment"]
        return (T / (v.sqrt() + self.eps)).to(M.dtype), MapState(second_moment=v)

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        return super().resumes(carry, m, n) and carry["second_moment"].shape[1:] == (m, n)


@dataclass(frozen=True)
class PerEntry(ps.Momentum):
    """M divided by the root of a running mean of G², entry by entry."""

    beta2: float = 0.9

    entries = ("square",)

    def step(
        self,
        group: dict[str, Any],
        G: Tensor,
        C: Tensor,
        kept: dict[str, Tensor],
        finite: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        M, v = super().step(group, G, C, kept, finite), kept["square"]
        put(v, torch.lerp(G.to(v.dtype).square(), v, self.beta2), finite)
        return torch.where(v > 0, M * v.rsqrt(), 0)


@dataclass(frozen=True)
class SignDescent(ps.Elementwise):
    """C ← βC + G, X ← X − lr·sign(C), and a count of steps that is no buffer."""

    lr: float = 1e-3
    beta: float = 0.9

    algorithm = "test-sign"
    buffers = ("average",)

    def __post_init__(self) -> None:
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta={self.beta}: expected 0 ≤ beta < 1")

    @staticmethod
    def new_state(p: Tensor) -> dict[str, Any]:
        return {"average": torch.zeros_like(p), "count": torch.zeros((), dtype=torch.int64)}

    @staticmethod
    def update(
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[dict[str, Any]],
        found_inf: Tensor | None = None,
    ) -> None:
        for p, grad, state in zip(params, grads, states, strict=True):
            kept = 1 if found_inf is None else int(1 - found_inf)
            if kept:
                state["average"].mul_(group["beta"]).add_(grad)
                p.sub_(group["lr"] * state["average"].sign())
                state["count"] += 1  # writes the same tensor to the state


def sketched(sketch: ps.Sketch | Finder, **options: Any) -> ps.LowRank:
    """A low-rank map that sketches every shape of :data:`SHAPES`, ℓ = 6."""
    return ps.LowRank(
        4, 2, sketch=sketch, inner=ps.NewtonSchulz(3, "quintic"), always_sketch=True, **options
    )


OWN: dict[str, ps.PolarMap] = {
    "map with a vector": Leading(),
    "map with an average": Steady(),
    "random map": Jittered(),
    "random map with its last numbers": Remembering(),
    "sketch": sketched(Signs()),
    "finder": sketched(Largest()),
    "finder with a basis": sketched(Followed()),
}
# Beside the maps of a user, those of the library that leave something for the next step.
WITH_STATE: dict[str, ps.PolarMap] = {
    "warm": sketched(ps.Warm()),
    "deflated": ps.Deflated(sketched(ps.Warm()), ps.NewtonSchulz(1, "flat")),
    **{name: polar for name, polar in OWN.items() if polar.traits.carries},
}

# Transforms and momentum rules, each as options of Muon. tests/optim/test_second_moment.py steps them
# alone, tests/ranks/test_trajectories.py on ranks, and tests/kernels/test_own_parts.py by kernels.
RULES: dict[str, dict[str, Any]] = {
    "rows": {"transform": ps.NormalizedRows()},
    "second moment of T": {"transform": SecondMoment()},
    "second moment of G": {"momentum_rule": PerEntry()},
}


@dataclass
class Run:
    """Parameters and their optimizer, on gradients that are a function of the step."""

    params: list[Tensor]
    optimizer: ps.Muon

    @classmethod
    def of(cls, polar: ps.PolarMap, device: torch.device | str = "cpu", **options: Any) -> Run:
        """A run at its start; the last parameter is in a group of its own."""
        g = torch.Generator().manual_seed(0)
        params: list[Tensor] = [
            torch.nn.Parameter(torch.randn(s, generator=g).to(device)) for s in SHAPES
        ]
        groups = [{"params": params[:-1]}, {"params": params[-1:], "lr": 0.05}]
        return cls(params, ps.Muon(groups, **({"lr": 0.1, "polar": polar} | options)))

    def go(
        self,
        steps: Iterable[int],
        without: Callable[[int, int], bool] = lambda i, step: False,
        spoilt: Callable[[int, int], bool] = lambda i, step: False,
    ) -> Run:
        """Take ``steps``; parameter i gets no gradient, or a bad one, where the functions say so."""
        for step in steps:
            for i, p in enumerate(self.params):
                g = torch.Generator().manual_seed(100 * step + i)
                p.grad = torch.randn(p.shape, generator=g).to(p)
                if spoilt(i, step):
                    p.grad.view(-1)[3] = math.nan
                if without(i, step):
                    p.grad = None
            self.optimizer.step()
        return self

    def through_a_file(self, path: Path, polar: ps.PolarMap, **options: Any) -> Run:
        """A new run from what ``torch.load`` reads of this one."""
        saved = {
            "params": [p.detach() for p in self.params],
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(saved, path)
        loaded = torch.load(path)
        again = Run.of(polar, self.params[0].device, **options)
        for p, value in zip(again.params, loaded["params"], strict=True):
            p.data.copy_(value)
        again.optimizer.load_state_dict(loaded["optimizer"])
        return again

    def values(self, i: int) -> dict[str, Tensor]:
        """A copy of parameter i and of all that the optimizer keeps for it."""
        p = self.params[i]
        state = {key: value.clone() for key, value in self.optimizer.state[p].items()}
        return {"parameter": p.detach().clone(), **state}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two of :meth:`Run.values` agree bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
