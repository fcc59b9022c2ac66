"""Apple's GPUs, which have no float64: maps, steps and measurements do without it.

A stand-in of Apple's GPU (tests/apple.py) computes on the CPU, as a GPU without kernels does.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.apple import MPS, Apple, OnApple, on_apple
from tests.own_parts import sketched
from tests.solvers import SOLVERS
from tests.spectra import gaussian, matrix
from torch import Tensor, nn

import polarstep as ps
from polarstep import numerics, ops, rng
from polarstep.certificate import Monitor, certified, cheap_certificate
from polarstep.certificate.exact import update_ratio
from polarstep.numerics import (
    fitting,
    frexp,
    frobenius_norm,
    has_float64,
    in_float64,
    unit_scale,
    widest,
)
from polarstep.ops.cuda import Cuda
from polarstep.theory.tail_index import hill

# Float32 in place of float64, in sums and in matrices of 16 rows.
CLOSE = 1e-3


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers as on a CPU, for which torch has a generator, and a CPU with a GPU's operations."""
    made = rng.generator
    monkeypatch.setattr(rng, "generator", lambda *key, device="cpu": made(*key))
    monkeypatch.setattr(ops, "_CPU", Cuda())


def of(found: Tensor) -> Tensor:
    """The numbers of a tensor of the GPU."""
    assert isinstance(found, OnApple)
    return found.there


def test_the_stand_in_refuses_what_the_gpu_refuses():
    X = on_apple(torch.ones(2, 2))
    for refused in (X.double, lambda: X + torch.ones(2, 2), lambda: torch.frexp(X)):
        with pytest.raises((TypeError, RuntimeError)):
            refused()
    with Apple(), pytest.raises(TypeError):
        torch.zeros(2, device=MPS, dtype=torch.float64)


# A map for each way through the operations of a GPU without kernels.
SOME = [
    "exact",
    "newton-schulz quintic plain frobenius",
    "newton-schulz quintic gram spectral",
    "low-rank gaussian h=1",
    "low-rank kaczmarz h=0",
    "low-rank warm h=1",
    "low-rank products h=0.5",
    "low-rank kaczmarz of operator",
    "deflated flat warm",
    "auto balanced",
]
over_some = pytest.mark.parametrize(
    "solver", [s for s in SOLVERS if s.name in SOME], ids=lambda s: s.name
)


@over_some
def test_a_map_gives_what_it_gives_on_a_cpu(solver):
    M = matrix("power-law", 12, 20).float()
    with Apple():
        found = of(solver.map(on_apple(M)))
    assert torch.allclose(found, solver.map(M), atol=CLOSE)


@over_some
@pytest.mark.parametrize("scale", [1e-36, 1e36])
def test_a_map_ignores_the_scale_of_the_matrix(solver, scale):
    M = matrix("power-law", 12, 20).float()
    with Apple():
        found, expected = (of(solver.map(on_apple(c * M))) for c in (scale, 1.0))
    assert torch.allclose(found, expected, atol=CLOSE)


@pytest.mark.parametrize("size", [1e-36, 1.0, 5e37])
def test_a_norm_and_a_matrix_of_norm_one(size):
    X = size * gaussian(3, 40, 50, seed=1).float()
    norm = torch.linalg.matrix_norm(X.double(), keepdim=True)
    with Apple():
        found = of(frobenius_norm(on_apple(X)))
        one = of(Cuda().normalized(on_apple(X), torch.float32))
    largest = torch.finfo(torch.float32).max
    assert torch.allclose(found.double(), norm.where(norm < largest, torch.inf), rtol=1e-6)
    assert torch.allclose(one.double(), X.double() / norm, rtol=1e-5)


def test_a_norm_of_many_entries_keeps_its_digits():
    """One sum of 2²⁴ squares in float32 may be off by a thousandth."""
    X = torch.full((1, 4096, 4096), 0.1)
    with Apple():
        found = float(of(frobenius_norm(on_apple(X))))
    assert found == pytest.approx(float(X[0, 0, 0]) * 4096, rel=1e-5)


def test_frexp_by_bits():
    x = torch.tensor([0.0, 1.0, 0.75, 3e-38, 1e-20, 12345.678, 3e38])
    mantissa, exponent = torch.frexp(x)
    with Apple():
        found = [of(each) for each in frexp(on_apple(x))]
    assert torch.equal(found[0], mantissa)
    assert torch.equal(found[1], exponent)
    tiny = torch.tensor([[1e-40]])
    with Apple():
        scale = float(of(unit_scale(on_apple(tiny))))
    assert math.log2(scale).is_integer()
    assert scale > 1e30


def steps(options: dict[str, Any], *, apple: bool) -> tuple[list[Tensor], Monitor | None]:
    """Weights after three steps, and the monitor if there is one."""
    options = dict(options)
    exact = options.pop("exact", None)
    shapes = [(16, 24), (24, 16), (16, 24), (5, 7)]
    given = [gaussian(*shape, seed=i).float() for i, shape in enumerate(shapes)]
    given.append(torch.ones(9))
    params = [nn.Parameter(on_apple(X) if apple else X.clone()) for X in given]
    *matrices, gain = params
    groups = [{"params": matrices} | options, {"params": [gain], "algorithm": "adamw"}]
    optimizer = ps.Muon(groups, lr=0.1)
    monitor = None if exact is None else Monitor(optimizer, every=1, exact=exact)
    for step in range(3):
        for i, p in enumerate(params):
            G = gaussian(*p.shape, 1, seed=10 * step + i).float()[..., 0]
            p.grad = on_apple(G) if apple else G
        optimizer.step()
    return [of(p.detach()) if apple else p.detach() for p in params], monitor


DEFLATED = ps.Deflated(sketched(ps.Gaussian()))
STEPS: dict[str, dict[str, Any]] = {
    "default": {},
    "auto": {"polar": "auto"},
    "exact": {"polar": ps.Exact()},
    "low-rank": {"polar": sketched(ps.Gaussian())},
    "warm": {"polar": sketched(ps.Warm())},
    "kaczmarz": {"polar": sketched(ps.Kaczmarz())},
    "deflated": {"polar": DEFLATED},
    "flat": {"polar": ps.Deflated(sketched(ps.Gaussian()), ps.NewtonSchulz(1, "flat"))},
    "rows": {"transform": ps.NormalizedRows()},
    "skip": {"nonfinite": "skip"},
    "rms": {"shape_scale": "rms"},
    "rms deflated": {"shape_scale": "rms", "polar": DEFLATED},
    "compensated": {"rounding": "compensated"},
    "eight bits": {"momentum_dtype": torch.int8},
    "monitor": {"exact": True},
    "cheap monitor": {"exact": False},
    "cheap monitor, deflated": {"exact": False, "polar": DEFLATED},
    "cheap monitor, low-rank": {"exact": False, "polar": sketched(ps.Gaussian())},
}


@pytest.mark.parametrize("options", STEPS.values(), ids=list(STEPS))
def test_steps_are_those_of_a_cpu(options):
    with Apple():
        found, seen = steps(options, apple=True)
    expected, watched = steps(options, apple=False)
    for p, q in zip(found, expected, strict=True):
        assert torch.allclose(p, q, atol=CLOSE)
    if seen is not None and watched is not None:
        columns = ("gamma", "nu", "update_ratio")
        for row, other in zip(seen.rows, watched.rows, strict=True):
            assert row.keys() == other.keys()
            for column in columns:
                if column in row:
                    assert row[column] == pytest.approx(other[column], abs=CLOSE)


@pytest.mark.parametrize("name", ["deflated", "flat"])
def test_a_deflated_step_is_the_same_over_the_range(name):
    """Energies of entries of 1e25 leave float32, unless they are scaled before."""
    ends = []
    for scale in (1e-25, 1.0, 1e25):
        W = nn.Parameter(on_apple(torch.zeros(16, 24)))
        optimizer = ps.Muon([W], lr=0.1, **STEPS[name])
        with Apple():
            W.grad = on_apple(scale * gaussian(16, 24, seed=1).float())
            optimizer.step()
        ends.append(of(W.detach()))
    for end in ends:
        assert torch.allclose(end, ends[1], atol=1e-6)


def test_certificates_of_a_gpu_without_float64():
    M = matrix("power-law", 80, 96).float()
    polar = ps.NewtonSchulz(3, "jordan")
    with Apple():
        T, bound = certified(polar, on_apple(M))
        plain = cheap_certificate(on_apple(M), T)
        exact = ps.certify(on_apple(M), T)
        ratio = update_ratio(T, T)
    there = ps.certify(M, of(T))
    assert exact.worst == pytest.approx(there.worst)
    for cheap in (bound, plain):
        assert all(math.isfinite(x) for x in cheap.worst)
        assert all(x >= y for x, y in zip(cheap.worst, there.worst, strict=True))
    assert float(ratio) == 1


def test_the_tail_of_a_gradient():
    x = gaussian(5000, seed=1).float()
    with Apple():
        found = hill(on_apple(x))
    assert found == hill(x)


def test_numbers_drawn_elsewhere_fit_the_gpu():
    """A generator of the CPU, as a user gives, draws in float64 for a Kaczmarz sketch."""
    drawn = torch.rand(3, dtype=torch.float64)
    with Apple():
        assert of(fitting(drawn, MPS)).dtype == torch.float32
        assert of(fitting(drawn.float(), MPS)).dtype == torch.float32
        generator = torch.Generator().manual_seed(0)
        M = on_apple(matrix("power-law", 12, 20).float())
        assert of(sketched(ps.Kaczmarz())(M, generator=generator)).isfinite().all()
    assert fitting(drawn, torch.device("cpu")) is drawn


def test_where_there_is_float64(monkeypatch):
    devices = {"cpu": True, "cuda": True, "meta": True, "mps": False}
    for kind, has in devices.items():
        assert has_float64(torch.device(kind)) == has
        assert widest(torch.device(kind)) == (torch.float64 if has else torch.float32)
    for told, has in (({"has_fp64": True}, True), ({"has_fp64": False}, False), ({}, True)):
        monkeypatch.setattr(numerics, "_INTELS", {})
        monkeypatch.setattr(torch.xpu, "get_device_capability", lambda _, told=told: told)
        assert has_float64(torch.device("xpu", 0)) == has
    with Apple():
        assert type(in_float64(on_apple(torch.ones(2)))) is Tensor
