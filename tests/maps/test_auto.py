"""``Auto``: which map it chooses, what it says about it, and that an optimizer runs that map."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.resuming import gone_on_beside
from tests.spectra import gaussian
from torch import nn

import polarstep as ps
from polarstep.maps import Warm, auto
from polarstep_lab import records

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = [(300, 280), (280, 300), (2, 270, 272), (24, 40)]
FULL = ps.NewtonSchulz(5, "polar-express")
BUDGETS = ("full", "balanced", "cheap")


pytestmark = pytest.mark.usefixtures("no_tiles")


@pytest.fixture(params=auto.ROWS)
def kind(request, monkeypatch):
    """Choices as on a device that is not here."""
    monkeypatch.setattr(auto, "_kind_of", lambda device: request.param)
    monkeypatch.setattr(auto, "_CHOICES", {})
    return request.param


def deflated(m, n):
    return auto._map("deflated", m, n)


def documented(polar):
    """The map without ``always_sketch``, which Auto sets where a LowRank map alone would not sketch."""
    if isinstance(polar, ps.Deflated):
        return replace(polar, head=documented(polar.head))
    return replace(polar, always_sketch=False) if isinstance(polar, ps.LowRank) else polar


def place(kind):
    return CPU if kind.startswith("cpu") else CUDA


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8, 50])
def test_a_device_sketches_from_some_row_on_and_longer_matrices_earlier(kind, ratio):
    for budget in ("balanced", "cheap"):
        chosen = [auto._chosen(budget, m, ratio * m, place(kind))[0] for m in range(1, 1100)]
        assert chosen == sorted(chosen, reverse=budget == "balanced") or budget == "cheap"
        full = chosen.count("full")
        assert set(chosen[:full]) == {"full"}
        assert 0 < full < 1000
        shorter = [auto._chosen(budget, m, m, place(kind))[0] for m in range(1, 1100)]
        assert full <= shorter.count("full")


def test_what_is_chosen_is_what_runs(kind):
    for shape in ((4096, 4096), (14336, 4096), (3072, 1024)):
        assert ps.Auto().on(*shape, place(kind)) == deflated(*shape)
    for shape in ((1, 1), (16, 16), (48, 4096), (64, 64)):
        assert ps.Auto().on(*shape, place(kind)) == FULL
    for m in range(32, 1056, 32):
        for budget in BUDGETS:
            chosen = ps.Auto(budget).on(m, 4 * m, place(kind))
            assert documented(chosen) == auto._map(
                auto._chosen(budget, m, 4 * m, place(kind))[0], m, 4 * m
            )
            assert chosen.on(m, 4 * m, place(kind)) is chosen


def test_the_choice_depends_on_the_device_and_not_on_the_side():
    assert ps.Auto().on(512, 512, CPU) == deflated(512, 512)
    assert ps.Auto().on(512, 512, CUDA) == FULL  # too few products for their launches
    assert ps.Auto().on(4096, 1024, CPU) == ps.Auto().on(1024, 4096, CPU)


def step_times(part, workload):
    """What ``benchmarks/step_cost.py`` measured: milliseconds of whole steps by optimizer.

    Of the host or of the device, whichever is less: a small step is over on the device before its host
    has launched the next one.
    """
    return {
        line["variant"]: min(line["result"]["ms"], line["result"].get("device_ms", math.inf))
        for line in records.read(Path(__file__).parents[2] / "results" / "step-cost")
        if (line["kind"], line["part"]) == ("time", part)
        and line["config"].get("workload") == workload
    }


@pytest.mark.parametrize("kind", ["H200"], indirect=True)
@pytest.mark.parametrize("width", [384, 512, 576, 640, 704, 768])
def test_on_an_h200_what_is_deflated_was_measured_to_take_less_time(kind, width):
    """Of shapes that the record has in one step: where one of them is deflated, deflating both paid."""
    found = step_times("h200-between", f"width {width}" if width < 768 else "nanoGPT")
    share = found["Deflated, ℓ = a sixth"] / found["full space, PolarExpress 5"]
    chosen = [ps.Auto().on(*shape, CUDA) for shape in ((width, width), (4 * width, width))]
    assert any(polar != FULL for polar in chosen)
    assert share < 0.9


def test_a_gpu_of_unknown_kind_sketches_only_what_pays_on_the_others(monkeypatch):
    shapes = [(m, ratio * m) for m in range(32, 2080, 32) for ratio in (1, 4)]
    sketched = {}
    for name in ("cuda", "H200", "H100", "A100"):
        monkeypatch.setattr(auto, "_kind_of", lambda _, name=name: name)
        sketched[name] = {s for s in shapes if auto._chosen("balanced", *s, CUDA)[0] == "deflated"}
    unknown = sketched.pop("cuda")
    assert len(unknown) > 50
    assert all(unknown <= known for known in sketched.values())


def test_a_run_in_full_space_goes_on_with_a_map_that_is_chosen_now(monkeypatch):
    """As a checkpoint of a version that did not sketch under 768 rows on a GPU, with no basis in it."""
    monkeypatch.setattr(auto, "_CHOICES", {("balanced", 300, 280, CPU): ("full", False, "")})
    p = nn.Parameter(torch.zeros(300, 280))
    optimizer = ps.Muon([p], polar="auto", seed=3)
    set_gradients([p], 0)
    optimizer.step()
    assert "basis" not in optimizer.state[p]
    auto._CHOICES.clear()
    other = nn.Parameter(p.detach().clone())
    resumed = ps.Muon([other], polar="auto", seed=3)
    resumed.load_state_dict(optimizer.state_dict())
    set_gradients([other], 1)
    resumed.step()
    assert "basis" in resumed.state[other]
    assert bool(other.isfinite().all())
    assert not torch.equal(p, other)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("shape", [(200, 260), (260, 200), (24, 40)])
def test_it_computes_what_the_chosen_map_computes(budget, shape):
    M, polar = gaussian(3, *shape), ps.Auto(budget)
    ours, chosen = (
        each(M, generator=torch.Generator().manual_seed(1))
        for each in (polar, polar.on(*shape, CPU))
    )
    assert torch.equal(ours, chosen)
    assert polar.flops(*shape) == polar.on(*shape, CPU).flops(*shape)
    assert polar.traits.rank_of(*shape) >= polar.on(*shape, CPU).traits.rank_of(*shape)
    numbers = None
    if polar.on(*shape, CPU).traits.draws != "never":
        numbers = polar.numbers(*shape, torch.Generator().manual_seed(1), torch.float64)
    T, left = polar.step(M, ps.maps.MapState(), ps.maps.Draw(numbers))
    assert torch.allclose(T.dense, chosen, atol=1e-6)
    assert set(left) <= set(polar.traits.carries)
    if left:
        assert polar.resumes(left, *shape)
        assert not polar.resumes(left, shape[0] + 100, shape[1] + 100)


def test_the_maps_to_choose_from_are_the_documented_ones():
    full = ps.NewtonSchulz(5, "polar-express")
    assert auto._map("full", 64, 64) == full
    inner = ps.NewtonSchulz(4, "polar-express-sketch")
    # A sixth of the short side, rounded up to a multiple of 16, or 256; never less than an eighth.
    widths = {
        64: 16,
        96: 16,
        97: 32,
        768: 128,
        1536: 256,
        2048: 256,
        2049: 320,
        4096: 512,
        5120: 640,
    }
    for short, width in (widths | {9000: 1152, 16384: 2048, 40000: 2048}).items():
        head = ps.LowRank(width - 8, 8, sketch=Warm(), inner=inner)
        for shape in ((short, 90000), (90000, short)):
            assert deflated(*shape) == ps.Deflated(head, ps.NewtonSchulz(1, "flat"), full)
    # A quarter of the short side, rounded up to a multiple of 16, at most 256; no power iteration.
    widths = {64: 16, 65: 32, 128: 32, 768: 192, 1024: 256, 5000: 256}
    for short, width in widths.items():
        for shape in ((short, 6000), (6000, short)):
            assert auto._map("low-rank", *shape) == ps.LowRank(width - 8, 8, 0, inner=inner)


@pytest.mark.parametrize("always", [False, True])
def test_a_chosen_map_is_found_under_torch_compile(always, monkeypatch):
    key = ("balanced", 48, 40, CPU)
    monkeypatch.setattr(auto, "_CHOICES", {key: ("deflated", always, "as given")})
    M, polar = gaussian(48, 40), ps.Auto()
    inside = torch.compile(
        lambda M: M * polar.on(*M.shape, M.device).traits.rank_of(*M.shape),
        backend="eager",
        fullgraph=True,
    )
    assert torch.equal(inside(M), 40 * M)


def test_a_bad_budget():
    with pytest.raises(ValueError, match="budget='tiny': expected one of full, balanced, cheap"):
        ps.Auto("tiny")


def parameters():
    return [nn.Parameter(gaussian(*shape, seed=i).float()) for i, shape in enumerate(SHAPES)]


def set_gradients(params, step):
    for i, p in enumerate(params):
        p.grad = gaussian(*p.shape, seed=10 * step + i).to(p.dtype)


def test_the_optimizer_takes_the_name():
    params = parameters()
    optimizer = ps.Muon(
        [{"params": params[:2]}, {"params": params[2:], "polar": FULL}], polar="auto"
    )
    assert [group["polar"] for group in optimizer.param_groups] == [ps.Auto(), FULL]
    assert optimizer.defaults["polar"] == ps.Auto()
    optimizer.param_groups[1]["polar"] = "auto"  # between steps, as other options
    set_gradients(params, 0)
    seen = []
    optimizer.register_polar_hook(lambda bucket: seen.append(type(bucket.map)))
    optimizer.step()
    assert sorted(each.__name__ for each in seen) == ["Deflated"] * 3 + ["NewtonSchulz"]
    assert ps.Muon(parameters()).param_groups[0]["polar"] == FULL  # the default is what it was


def test_other_strings_are_refused():
    with pytest.raises(TypeError, match=r"polar='best': expected a polar map .* or \"auto\""):
        ps.Muon(parameters(), polar="best")


def test_routes_say_what_was_taken_and_why():
    layers = [nn.Linear(300, 320), nn.Tanh(), nn.Linear(320, 40), nn.Tanh(), nn.Linear(40, 3)]
    optimizer = ps.muon_for(nn.Sequential(*layers), transform=None, rules=[("4.*", ps.AdamW())])
    large, small = (optimizer.routes[name].polar for name in ("0.weight", "2.weight"))
    assert large.startswith("Deflated: LowRank(56+8")
    assert large.endswith("; auto: pays from 176 rows on; tried in training from width 384 on")
    assert small.startswith("NewtonSchulz(5 × polar-express")
    assert small.endswith("; auto: a sketch pays from 128 rows on")
    widths = {m: ps.Auto().describe(m, 2 * m, CUDA) for m in (544, 1536, 2048, 4096, 32768)}
    for tried in (544, 1536, 2048):
        assert widths[tried].endswith("; auto: pays from 520 rows on")
    told = "of the short side, tried in training with 12.5% of 2048"
    assert widths[4096].endswith(f"ℓ is 12.5% {told}")
    assert widths[32768].endswith(f"ℓ is 6.2% {told}")
    assert "auto: budget full" in ps.Auto("full").describe(300, 320)
    assert "auto: a sketch pays from 176 rows on" in ps.Auto().describe(100, 100)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_run_resumes_bit_for_bit_from_a_file(budget):
    """The map travels as plain data, and a warm sketch goes on from the last step's factor."""
    params = parameters()
    optimizer = ps.Muon(params, lr=0.1, polar=ps.Auto(budget), seed=3)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = ps.Muon(parameters())
    other.load_state_dict(torch.load(file))  # weights_only
    assert other.param_groups[0]["polar"] == ps.Auto(budget)
    assert ("basis" in optimizer.state[params[0]]) == (budget == "balanced")
    assert "basis" not in optimizer.state[params[3]]
    copies = gone_on_beside(
        params, optimizer, lambda these: these, set_gradients, range(3, 5), polar="auto", seed=3
    )
    assert all(map(torch.equal, params, copies))


def falling(m, n):
    """A matrix whose singular values fall as those of the momentum of a GPT with large batches did."""
    parts, logs = [0, 0.0625, 0.25, 0.5, 0.75, 0.9, 1], [3.7, 0.0, -1.3, -2.3, -3.3, -4.3, -7]
    at = torch.linspace(0, 1, m, dtype=torch.float64)
    steps = zip(zip(parts, logs, strict=True), zip(parts[1:], logs[1:], strict=True), strict=False)
    sigma = torch.zeros_like(at)
    for (left, high), (right, low) in steps:
        inside = (at >= left) & (at <= right)
        sigma[inside] = (high + (low - high) * (at[inside] - left) / (right - left)).exp()
    U, V = (torch.linalg.qr(gaussian(side, m)).Q for side in (m, n))
    return U, V, (U * sigma) @ V.mT


@pytest.mark.parametrize("shape", [(768, 768), (768, 1100)])
def test_a_sixth_of_the_width_is_lifted_as_far_as_in_full_space(shape):
    """⟨uᵢ, Tvᵢ⟩ over the lower half of M's singular directions; a narrow head reaches far less."""
    U, V, M = falling(*shape)

    def lifted(polar):
        T = polar(M, generator=torch.Generator().manual_seed(1))
        along = ((U.mT @ T) * V.mT).sum(-1)
        return float(along[len(along) // 2 :].mean()), float(along[: len(along) // 16].mean())

    narrow = ps.LowRank(24, 8, inner=auto.INNER)
    (wide, head), (full, _), (thin, _) = map(
        lifted, (deflated(*shape), FULL, ps.Deflated(narrow, ps.NewtonSchulz(1, "flat")))
    )
    assert wide > 0.9 * full
    assert thin < 0.7 * wide
    assert 0.86 < head < 1.14
