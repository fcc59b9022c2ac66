"""``shape_scale="rms"``: the entries of an update have a root mean square of 0.2·lr.

With low-rank maps that is so on every spectrum with ‖T‖²_F ≥ ℓ/9, with full-space maps where most
singular values are lifted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import get_args

import pytest
import torch
from tests.solvers import HEADS
from tests.spectra import gaussian, with_singular_values
from torch import nn

import polarstep as ps
from polarstep.maps import base
from polarstep.rates import SCALES, ShapeScale

INNER = ps.NewtonSchulz(4, "polar-express-sketch")


def low_rank(rank, **options):
    return ps.LowRank(rank, 8, **({"inner": INNER, "always_sketch": True} | options))


MAPS = {
    "exact": ps.Exact(),
    "PolarExpress": ps.NewtonSchulz(5, "polar-express"),
    "quintic": ps.NewtonSchulz(7, "quintic"),
    "jordan": ps.NewtonSchulz(5, "jordan"),
    "the paper's": ps.LowRank(16, 4, always_sketch=True),
    **{f"rank {rank}": low_rank(rank) for rank in (2, 8, 24)},
    **{f"{name}": low_rank(16, **options) for name, options in HEADS.items()},
    "beyond the sides": ps.LowRank(200),
    "deflated": ps.Deflated(low_rank(8), ps.NewtonSchulz(1, "flat")),
    "deflated warm": ps.Deflated(low_rank(8, sketch=ps.Warm()), ps.NewtonSchulz(1, "flat")),
    "two quintics": ps.Deflated(low_rank(8), ps.NewtonSchulz(2, "quintic")),
    "two of Jordan's": ps.Deflated(low_rank(8), ps.NewtonSchulz(2, "jordan")),
    **{f"auto {budget}": ps.Auto(budget) for budget in ("full", "balanced", "cheap")},
}
SHAPES = {"tall": (160, 64), "wide": (64, 160), "square": (96, 96), "stack": (3, 48, 80)}
# Gaussian gradients. The square ones have singular values down to zero, which seven quintic steps leave
# at three fifths of one or less; Jordan's coefficients end between 0.7 and 1.2.
TOLERANCE = 0.15

over_maps = pytest.mark.parametrize("polar", MAPS.values(), ids=MAPS.keys())


def updates(polar, gradients, lr=0.5, **options):
    """The root mean square of every step's update, over lr."""
    p = nn.Parameter(torch.zeros_like(gradients[0]))
    optimizer = ps.Muon([p], lr=lr, polar=polar, **({"shape_scale": "rms"} | options))
    found = []
    for gradient in gradients:
        before, p.grad = p.detach().clone(), gradient
        optimizer.step()
        found.append((p.detach() - before).square().mean().sqrt().item() / lr)
    return found


@over_maps
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_updates_have_the_rms_of_adamw(polar, shape):
    gradients = [gaussian(*shape, seed=step).float() for step in range(3)]
    assert updates(polar, gradients) == pytest.approx([0.2] * 3, rel=TOLERANCE)


@over_maps
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_updates_have_it_in_other_precisions(polar, dtype):
    gradient = gaussian(96, 64).to(dtype)
    assert updates(polar, [gradient]) == pytest.approx([0.2], rel=TOLERANCE)


@pytest.mark.usefixtures("no_tiles")
def test_auto_on_matrices_that_it_sketches():
    gradients = [gaussian(200, 260, seed=step).float() for step in range(2)]
    for budget in ("balanced", "cheap"):
        assert ps.Auto(budget).on(200, 260, torch.device("cpu")).traits.draws != "never"
        assert updates(ps.Auto(budget), gradients) == pytest.approx([0.2] * 2, rel=TOLERANCE)


@pytest.mark.parametrize("leading", [1, 30, 100])
def test_deflated_maps_whose_head_is_not_lifted_to_one(leading):
    """Four directions are so long that the inner map leaves the others of the head below one."""
    sigma = torch.ones(64, dtype=torch.float64)
    sigma[:4] = leading
    gradients = [with_singular_values(sigma, 64, 160, seed=step).float() for step in range(2)]
    found = updates(ps.Deflated(low_rank(24)), gradients)
    assert found == pytest.approx([0.2] * 2, rel=0.05)


RECORDED = {  # the least and the greatest RMS that docs/coming-from.md gives
    "PolarExpress": (0.15, 0.20),
    "quintic": (0.11, 0.19),
    "rank 8": (0.20, 0.20),
    "the paper's": (0.20, 0.20),
    "warm": (0.20, 0.20),
    "deflated": (0.19, 0.21),
    "deflated warm": (0.19, 0.21),
}


@pytest.mark.parametrize(("name", "ends"), RECORDED.items(), ids=RECORDED)
def test_the_rms_on_recorded_momentum_is_what_the_page_says(name, ends, momentum):
    """Full-space maps keep the factor of torch and Moonlight; sketched maps measure ‖T‖_F."""
    found = [
        rms
        for stack in momentum.values()
        for M in stack
        if M.any()
        for rms in updates(MAPS[name], [M], momentum=0.0, nesterov=False)
    ]
    assert len(found) == 100
    assert (min(found), max(found)) == pytest.approx(ends, abs=0.004)
    page = (Path(__file__).parents[2] / "docs/coming-from.md").read_text()
    low, high = (f"{end:.3f}" if ends[0] == ends[1] else f"{end:.2f}" for end in ends)
    told = low if low == high else f"{low} to {high}"
    assert told in " ".join(page.split())


SPIKED = {  # how many directions tower over the others, and by how much
    "four of 100": (4, 100.0),
    "one of 100": (1, 100.0),
    "four of 1000": (4, 1000.0),
    "rank four": (4, math.inf),
    "rank one": (1, math.inf),
    "none": (0, 1.0),
}
LOW_RANK = {
    "the paper's": MAPS["the paper's"],
    **{f"rank {rank}": low_rank(rank) for rank in (2, 8, 24, 40)},
    **{name: low_rank(24, **options) for name, options in HEADS.items()},
    "warm, the paper's steps": low_rank(24, sketch=ps.Warm(), inner=ps.NewtonSchulz(7, "quintic")),
    "plain steps": low_rank(24, inner=ps.NewtonSchulz(7, "quintic", form="plain")),
    "a restart": low_rank(24, inner=ps.NewtonSchulz(12, "quintic", form="gram")),
    "Jordan's": low_rank(24, inner=ps.NewtonSchulz(5, "jordan")),
    "spectral": low_rank(24, inner=ps.NewtonSchulz(5, "quintic", delta="spectral")),
    "of exact": low_rank(24, inner=ps.Exact()),
    "of products": low_rank(24, orth="products"),
}


def spiked(name, m, n, seed=0):
    count, leading = SPIKED[name]
    sigma = torch.ones(min(m, n), dtype=torch.float64)
    if leading == math.inf:
        sigma[count:] = 0
    else:
        sigma[:count] = leading
    return with_singular_values(sigma, m, n, seed)


SIDES = ((64, 160), (160, 64), (96, 96))

in_both_precisions = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


def by_the_bound(polar, T):
    """0.2·√(mn)/max(‖T‖_F, √ℓ/3), the factor on T of a low-rank map."""
    return 0.2 * math.sqrt(T.numel()) / max(float(T.norm()), math.sqrt(polar.width) / 3)


def moved(polar, gradient, shape_scale):
    """The first step of a zero matrix, times −1."""
    p = nn.Parameter(torch.zeros_like(gradient))
    p.grad = gradient.clone()
    ps.Muon([p], lr=1.0, polar=polar, shape_scale=shape_scale).step()
    return -p.detach().double()


@in_both_precisions
@pytest.mark.parametrize("spectrum", SPIKED)
@pytest.mark.parametrize("polar", LOW_RANK.values(), ids=LOW_RANK.keys())
def test_a_low_rank_step_is_as_long_as_the_formula_says(polar, spectrum, dtype):
    """0.2·√(mn)·T/max(‖T‖_F, √ℓ/3), at most three times 0.2·√(mn/ℓ)·T; T is the step without a scale."""
    rounding = {torch.float32: 1e-3, torch.bfloat16: 2e-2}[dtype]
    for shape in SIDES:
        gradient = spiked(spectrum, *shape).to(dtype)
        step, T = (moved(polar, gradient, shape_scale) for shape_scale in ("rms", "none"))
        factor = by_the_bound(polar, T)
        assert float((step - factor * T).norm() / step.norm()) < rounding, shape
        assert factor <= 3 * 0.2 * math.sqrt(T.numel() / polar.width) * (1 + 1e-12)


@pytest.mark.parametrize("rank", [1, 3, 4, 5, 16, 36])
def test_the_scale_of_momentum_of_rank_r_is_that_of_a_ninth_of_l_at_least(rank):
    """ℓ = 36 with exact singular values of one: 0.2·√(mn/max(r, ℓ/9)), and ‖T‖_op = 1."""
    polar = low_rank(28, inner=ps.Exact())
    sigma = (torch.arange(64) < rank).double()
    step = moved(polar, with_singular_values(sigma, 64, 160), "rms")
    scale = 0.2 * math.sqrt(64 * 160 / max(rank, 4))
    assert float(torch.linalg.matrix_norm(step, 2)) == pytest.approx(scale, rel=1e-6)
    rms = float(step.square().mean().sqrt())
    assert rms == pytest.approx(0.2 * min(1, math.sqrt(rank / 4)), rel=1e-6)


DEFLATED = {
    "rest lifted": ps.Deflated(low_rank(24), ps.NewtonSchulz(1, "flat")),
    "rest lifted twice": ps.Deflated(low_rank(24), ps.NewtonSchulz(2, "quintic")),
}


@in_both_precisions
@pytest.mark.parametrize("polar", DEFLATED.values(), ids=DEFLATED.keys())
def test_deflated_steps_are_no_longer_than_with_a_ninth_of_the_head(polar, dtype):
    """At most 0.2·√(mn/(ℓ/9))·T, and on float32 of rank one, which has no rest, exactly so."""
    for shape, spectrum in product(SIDES, SPIKED):
        gradient = spiked(spectrum, *shape).to(dtype)
        step, T = (moved(polar, gradient, shape_scale) for shape_scale in ("rms", "none"))
        most = 0.6 * math.sqrt(T.numel() / 32)
        found = float(step.norm() / T.norm())
        assert found <= most * (1 + 1e-2)
        if spectrum == "rank one" and dtype == torch.float32:
            assert found == pytest.approx(most, rel=2e-2)


@pytest.mark.parametrize("name", ["PolarExpress", "quintic", "jordan", "beyond the sides"])
def test_in_full_space_the_scale_is_that_of_other_libraries_on_every_spectrum(name):
    """0.2·√max(m, n), with which runs of torch and Moonlight are continued; the RMS may be less."""
    for spectrum in SPIKED:
        gradient = spiked(spectrum, 64, 160).float()
        [found] = updates(MAPS[name], [gradient])
        [without] = updates(MAPS[name], [gradient], shape_scale="none")
        assert found == pytest.approx(0.2 * math.sqrt(160) * without, rel=1e-5)


def test_a_low_rank_update_is_scaled_matrix_by_matrix():
    """Of a stack, and where torch cannot add the product of the factors to the parameter."""
    stack = torch.stack([spiked(name, 48, 80).float() for name in SPIKED])
    for layout in (torch.Tensor.contiguous, lambda X: X.mT.contiguous().mT):
        found, T = (moved(low_rank(24), layout(stack), name) for name in ("rms", "none"))
        factors = [by_the_bound(low_rank(24), each) for each in T]
        assert max(factors) > 1.5 * min(factors)
        expected = torch.stack([f * each for f, each in zip(factors, T, strict=True)])
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@dataclass(frozen=True)
class Measured(ps.PolarMap):
    """A map of a user's own that says its norm, which is zero for a zero matrix."""

    def step(self, M, carry, draw):
        polar, left = ps.NewtonSchulz().step(M, carry, draw)
        T = polar.dense
        return base.Polar(M, T, squared_norm=lambda: T.square().sum((-2, -1))), left


def test_a_map_that_says_that_its_norm_is_zero_moves_nothing():
    W = nn.Parameter(torch.ones(4, 6))
    W.grad = torch.zeros(4, 6)
    ps.Muon([W], lr=0.1, polar=Measured(), shape_scale="rms").step()
    assert torch.equal(W, torch.ones(4, 6))


def test_zero_matrices_stay_beside_others():
    p = nn.Parameter(torch.ones(2, 48, 80))
    p.grad = torch.stack([torch.zeros(48, 80), gaussian(48, 80).float()])
    ps.Muon([p], lr=1.0, polar=low_rank(24), shape_scale="rms").step()
    assert torch.equal(p[0], torch.ones(48, 80))
    assert p[1].detach().sub(1).square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-3)


@pytest.mark.parametrize("polar", [low_rank(24), *DEFLATED.values()], ids=["low rank", *DEFLATED])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_moves_nothing_else(polar, bad):
    """A matrix with a NaN becomes NaN, as without a scale; the others of its stack step as ever."""
    stack = torch.stack([gaussian(48, 80, seed=i).float() for i in range(2)])
    alone = moved(polar, stack[1:], "rms")
    stack[0, 3, 5] = bad
    with_scale, without = (moved(polar, stack, scale) for scale in ("rms", "none"))
    torch.testing.assert_close(with_scale[1:], alone, atol=1e-4, rtol=0)
    assert torch.equal(with_scale[0].isfinite(), without[0].isfinite())


@pytest.mark.parametrize("name", ["rank 8", "deflated", "PolarExpress"])
def test_normalized_rows_keep_the_promise(name):
    gradients = [gaussian(64, 160, seed=step).float() for step in range(3)]
    found = updates(MAPS[name], gradients, transform=ps.NormalizedRows())
    assert found == pytest.approx([0.2] * 3, rel=TOLERANCE)


@pytest.mark.parametrize("name", ["rank 8", "deflated"])
def test_parts_of_a_fused_projection_each_have_it(name):
    p = nn.Parameter(torch.zeros(160, 64))
    p.grad = gaussian(160, 64).float()
    ps.Muon([p], lr=1.0, polar=MAPS[name], shape_scale="rms", split_sizes=(96, 40, 24)).step()
    parts = [part.square().mean().sqrt().item() for part in p.detach().split((96, 40, 24))]
    assert parts == pytest.approx([0.2] * 3, rel=TOLERANCE)


def test_only_groups_that_ask_for_it_are_scaled_by_the_norm():
    """Matrices of one bucket, in groups with different scales."""
    first, second = (nn.Parameter(torch.zeros(64, 160)) for _ in range(2))
    alone = nn.Parameter(torch.zeros(64, 160))
    for p in (first, second, alone):
        p.grad = gaussian(64, 160).float()
    groups = [
        {"params": [first], "shape_scale": "rms"},
        {"params": [second], "shape_scale": "none"},
    ]
    ps.Muon(groups, lr=1.0, polar=MAPS["deflated"]).step()
    ps.Muon([alone], lr=1.0, polar=MAPS["deflated"], shape_scale="none").step()
    assert first.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=TOLERANCE)
    assert torch.allclose(second, alone, atol=1e-6)


def test_an_editor_completes_every_name():
    names, _ = get_args(ShapeScale)
    assert get_args(names) == tuple(SCALES)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (lambda m, n: float("nan"), ValueError, r"shape_scale\(4, 6\) is nan: expected a finite"),
        (lambda m, n: -1.0, ValueError, r"shape_scale\(4, 6\) is -1\.0"),
        (lambda m, n: "0.2", ValueError, r"shape_scale\(4, 6\) is '0\.2'"),
        (lambda m: 1.0, TypeError, "positional argument"),
    ],
    ids=["nan", "negative", "text", "of one argument"],
)
def test_a_function_that_gives_no_factor_is_refused_before_anything_changes(scale, error, message):
    X, Y, empty = (nn.Parameter(torch.zeros(*shape)) for shape in ((4, 6), (4, 6), (0, 6)))
    groups = [{"params": [X]}, {"params": [Y], "shape_scale": scale}]
    optimizer = ps.Muon([*groups, {"params": [empty], "shape_scale": lambda m, n: n / m}])
    for p in (X, Y, empty):
        p.grad = torch.ones_like(p)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert not X.any()
    assert not optimizer.state
    optimizer.param_groups[1]["shape_scale"] = "none"
    optimizer.step()
    assert X.all()
