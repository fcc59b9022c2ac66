"""A warm step without Z: as accurate as Algorithm 1, fused or plain, with a state that keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.recorded import record_momentum
from tests.resuming import gone_on_beside
from tests.spectra import with_singular_values
from torch import Tensor, nn

import polarstep as ps
from polarstep import rng
from polarstep.maps import Draw, MapState, Polar
from polarstep.maps.coefficients import evaluate
from polarstep.maps.subspace import whitened_polynomials
from polarstep.ops import ops_of

# One step on B and three on its Gram matrix: Z is never made.
INNER = ps.NewtonSchulz(4, "polar-express-sketch")
POLAR = ps.LowRank(12, 4, sketch=ps.Warm(), inner=INNER, always_sketch=True)
# A restart in between, or as many rows as the inner map in full space: Z as it always was.
WITH_Z = replace(POLAR, inner=ps.NewtonSchulz(7, "quintic"))

SHAPES = [(48, 64), (64, 48), (48, 64), (2, 48, 96)]
ON_GPU = torch.cuda.is_available()


def parameters(device: torch.device) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=g).to(device)) for s in SHAPES]


def set_gradients(params: list[Tensor], step: int, poison: int | None = None) -> None:
    """Of decaying spectrum, a part of it the same at every step."""
    for i, p in enumerate(params):
        m, n = p.shape[-2:]
        sigma = torch.arange(1, min(m, n) + 1, dtype=torch.float64) ** -0.7
        count = p.numel() // (m * n)
        seeds = [(i, j) for j in range(count)]
        G = [
            with_singular_values(sigma, m, n, 1 + 7 * a + b)
            + 0.3 * with_singular_values(sigma, m, n, 100 + 31 * step + 7 * a + b)
            for a, b in seeds
        ]
        p.grad = torch.stack(G).reshape(p.shape).to(p)
        if i == poison:
            p.grad.view(-1)[3] = float("inf")


def run(
    device: torch.device, steps: int, polar: ps.LowRank = POLAR, **options: Any
) -> tuple[list[Tensor], ps.Muon]:
    params = parameters(device)
    opt = ps.Muon(params, lr=0.1, polar=polar, **options)
    for step in range(steps):
        set_gradients(params, step)
        opt.step()
    return params, opt


def stepped(
    polar: ps.LowRank, M: Tensor, carry: MapState, generator: torch.Generator
) -> tuple[Tensor, Polar, MapState]:
    """One step from ``carry``: T in float64 on the CPU, T as the step returned it, the next carry."""
    numbers = polar.numbers(*M.shape[-2:], generator)
    made, carry = polar.step(M, carry, Draw(numbers))
    return made.dense.double().cpu(), made, carry


def close(a: list[Tensor], b: list[Tensor]) -> bool:
    """To float32's rounding on a CPU; on a GPU plain momentum is not rounded to bfloat16."""
    tolerance = 0.05 if a[0].is_cuda else 1e-4
    return all((x - y).norm() < tolerance * x.norm() for x, y in zip(a, b, strict=True))


def test_it_is_for_the_maps_that_it_suits(device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def applies(polar: ps.LowRank, m: int = 48, n: int = 64, dtype: torch.dtype = dtype) -> bool:
        sides = min(m, n), max(m, n)
        return polar.finder.leaves_factors(polar.inner, *sides, polar.width, dtype, device)

    assert applies(POLAR)
    assert applies(POLAR, 64, 48)
    assert not applies(POLAR, 40, 64)  # steps on a Gram matrix want three times as many columns
    assert not applies(WITH_Z)
    assert not replace(POLAR, sketch=ps.Gaussian()).traits.carries  # nothing to leave factors of
    assert not applies(replace(POLAR, sketch=ps.Warm(noise=0.2)))
    assert not applies(replace(POLAR, inner=ps.Exact()))
    assert not applies(replace(POLAR, inner=replace(INNER, delta=1.0)))
    assert not applies(replace(POLAR, inner=ps.NewtonSchulz(1, "quintic")))
    assert not applies(replace(POLAR, orth="householder"))
    assert not applies(POLAR, dtype=torch.float64)
    assert applies(replace(POLAR, rank=764), 4096, 4096)
    assert not applies(replace(POLAR, rank=765), 4096, 4096)
    assert "whitened" in POLAR.describe(48, 64, device)
    assert "whitened" not in WITH_Z.describe(48, 64, device)


@pytest.mark.nightly
def test_a_wide_basis_is_not_made_by_halves_of_products(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P and G commute up to rounding only. With mirrored halves of PW and PG ‖Q‖_op is 1.016."""
    monkeypatch.setattr("polarstep.kernels.product.FEWEST_TILES", 0)
    m, n = 528, 1600
    sigma = torch.where(torch.arange(m) < 16, 1.0, 3e-3)
    Y = with_singular_values(sigma.double(), m, n, 5).to(device, torch.bfloat16)[None]
    Q, halves = ops_of(device).whitened_basis(Y, whitened_polynomials())
    assert Q.dtype == torch.bfloat16
    assert torch.linalg.matrix_norm(halves.double(), 2) < 1.01


@pytest.mark.parametrize("towers", [1, 8])
def test_a_few_directions_that_tower_take_no_step_from_the_others(
    device: torch.device, towers: int
) -> None:
    """Rows of the basis that are left short would hold a part of the towers, which the rest then has."""
    sigma = torch.where(torch.arange(96) < towers, 1.0, 1e-3).double()
    M = with_singular_values(sigma, 96, 96, 5)[None]
    polar = ps.Deflated(replace(POLAR, rank=28))
    carry, g = MapState(), rng.generator("warm", device=device)
    numbers = polar.numbers(96, 96, g)
    for _ in range(4):
        polar_of_M, carry = polar.step(M.float().to(device), carry, Draw(numbers))
        gamma = 1 - (M * polar_of_M.dense.double().cpu()).sum() / sigma.sum()
        assert gamma < 0.15


SPECTRA = {
    "k^-0.5": lambda k: k**-0.5,
    "k^-1": lambda k: 1 / k,
    "flat": torch.ones_like,
    "low rank and noise": lambda k: torch.where(k <= len(k) // 6, 1.0, 1e-3),
    "one towers": lambda k: torch.where(k == 1, 1.0, 1e-2),
}


@pytest.mark.parametrize("turn", [0.0, 0.1], ids="turns by {}".format)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_as_accurate_as_algorithm_1_in_float64(
    device: torch.device, spectrum: str, turn: float
) -> None:
    """Step after step, beside matrices that are zero, of rank one, or zero until the third step."""
    # In 16 bits the rounding of few entries averages out less: real sketches have hundreds of rows.
    (m, n, rank), steps = ((384, 768, 92) if device.type == "cuda" else (48, 96, 12)), 6
    polar = replace(POLAR, rank=rank)
    sigma = SPECTRA[spectrum](torch.arange(1, m + 1, dtype=torch.float64))
    carry = MapState()
    g = rng.generator("warm", device=device)
    for step in range(steps):
        M = with_singular_values(sigma, m, n)
        M = (1 - turn) * M + turn * with_singular_values(sigma, m, n, 50 + step)
        one = torch.outer(M[:, 0], M[0])
        batch = torch.stack([M, torch.zeros_like(M), one, M * (step > 2)])
        T, _, carry = stepped(polar, batch.float().to(device), carry, g)
        assert set(carry) == {"basis", "whitening"}
        assert bool(torch.isfinite(T).all())
        assert torch.linalg.matrix_norm(T, 2).max() <= 1.01
        reference = ps.LowRank(rank, 4, always_sketch=True)(batch)
        nuclear = torch.linalg.svdvals(batch).sum(-1)
        for i, scale in enumerate(nuclear.tolist()):
            if scale == 0:
                assert (T[i] == 0).all()
            elif not (i == 3 and step == 3):  # woken up: one step from the noise alone
                aligned = [float((batch[i] * t[i]).sum()) / scale for t in (T, reference)]
                assert aligned[0] > aligned[1] - 0.02


def _spike(M: Tensor) -> Tensor:
    return M + 100 * torch.outer(M[:, 3], M[5]) / (M[:, 3].norm() * M[5].norm())


SHOCKS = {
    "another matrix": lambda M, other: [M, M, other, other, other, other],
    "its negative": lambda M, other: [M, M, -M, -M],
    "nothing for two steps": lambda M, other: [M, M, 0 * M, 0 * M, M, M, M],
    "a million times as large": lambda M, other: [M, 1e6 * M, 1e-6 * M, M],
    "a spike": lambda M, other: [M, M, _spike(M), M, M, M],
    "rank one, then all": lambda M, other: [torch.outer(M[:, 0], M[0]), *[M] * 4],
}


@pytest.mark.parametrize("shock", SHOCKS)
def test_what_a_start_does_not_foresee_costs_two_steps(device: torch.device, shock: str) -> None:
    m, n = 48, 96
    sigma = torch.arange(1, m + 1, dtype=torch.float64) ** -1
    carry, aligned = MapState(), []
    for M in SHOCKS[shock](*(with_singular_values(sigma, m, n, seed) for seed in (1, 2))):
        g = rng.generator("warm", device=device)
        (T,), _, carry = stepped(POLAR, M[None].float().to(device), carry, g)
        assert torch.linalg.matrix_norm(T, 2) <= 1.02
        best = torch.linalg.svdvals(M)[:16].sum()
        aligned.append(float((M * T).sum() / best) if best > 0 else float(T.norm() == 0))
    assert min(aligned) > 0.7
    assert aligned[-1] > 0.95


def test_on_momentum_of_a_real_network_from_its_first_step(device: torch.device) -> None:
    """Where W₁ and W₂ are both large, which no smooth spectrum makes them."""
    steps = 8 if ON_GPU else 5
    for shape, matrices in record_momentum(steps, tuple(range(steps))).items():
        m, n = map(int, shape.split("x"))
        carry = MapState()
        for step, M in enumerate(matrices.reshape(steps, -1, m, n)):
            g = rng.generator("warm", device=device)
            T, _, carry = stepped(POLAR, M.to(device), carry, g)
            # ν of sixteen rows in 16 bits is 0.0126; with (W₂W₁)X₁ it would be several times that.
            assert torch.linalg.matrix_norm(T, 2).max() <= 1.02
            reference = ps.LowRank(12, 4, always_sketch=True)(M.double())
            scale = torch.linalg.svdvals(M.double()).sum(-1).clamp_min(1e-30)
            behind = ((reference - T) * M).sum((-2, -1)) / scale
            # Zero-initialized projections turn all gradients about at the second step.
            assert behind.max() < (0.03 if step > 2 else 0.1)


def test_v_is_what_the_start_lacks(device: torch.device) -> None:
    """If M stands still, V(SMᵀ) has the spread of the inner map's first step, and noise adds to it."""
    sigma = torch.arange(1, 49, dtype=torch.float64) ** -1
    M = with_singular_values(sigma, 48, 96)[None].float().to(device)
    polar = replace(POLAR, sketch=ps.Warm(noise=1e-4))
    _, made, carry = stepped(polar, M, MapState(), rng.generator("V", device=device))
    assert made.factors is not None
    S, V = carry["basis"].double(), carry["whitening"].double()
    spread = [
        float(x[0] / x[-1])
        for x in map(torch.linalg.svdvals, ((S @ M.double().mT)[0], (V @ S @ M.double().mT)[0]))
    ]
    x = torch.linalg.svdvals(made.factors.B.double())[0].cpu()
    gain = evaluate(INNER.polynomials[:1], x / x.norm()) / (x / x.norm())
    assert spread[1] < 1.2 * float(gain.max() / gain.min())
    assert spread[0] > 1.5 * spread[1]
    # A map that makes Z goes on from the same Ωᵀ = V·S, whether or not it is multiplied out.
    numbers = polar.numbers(48, 96, rng.generator("V", device=device))
    plain = replace(polar, sketch=ps.Warm(noise=0.2))
    starts = (carry, MapState(basis=(V @ S).to(M.dtype)))
    T = [plain.step(M, each, Draw(numbers))[0].dense for each in starts]
    assert (T[0] - T[1]).norm() < (2e-2 if device.type == "cuda" else 1e-4) * T[1].norm()


def test_fused_equals_plain(device: torch.device) -> None:
    steps = 6 if ON_GPU else 4  # a GPU captures its steps after the fourth
    fused, opt = run(device, steps)
    plain, other = run(device, steps, fused=False)
    assert opt._replayed.buckets
    assert not other._replayed.buckets
    assert close(fused, plain)
    for p in fused:
        assert opt.state[p]["whitening"].shape[-2:] == (16, 16)


def test_a_resumed_run_goes_on_bit_for_bit(device: torch.device) -> None:
    saved, ended = (3, 6) if ON_GPU else (2, 4)
    params, opt = run(device, saved)
    options = {"lr": 0.1, "polar": POLAR}
    copies = gone_on_beside(params, opt, list, set_gradients, range(saved, ended), **options)
    if device.type == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(params, copies, strict=True))
    else:
        assert close(params, copies)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("maps", [(POLAR, WITH_Z), (WITH_Z, POLAR)], ids=["to Z", "from Z"])
def test_either_kind_of_start_goes_on_with_the_other_map(
    device: torch.device, maps: tuple[ps.LowRank, ps.LowRank], fused: bool
) -> None:
    """A checkpoint of a GPU on a CPU, or another inner map: no step is worse than before."""
    params, opt = run(device, 5, maps[0], fused=fused, momentum=0.0)
    for group in opt.param_groups:
        group["polar"] = maps[1]
    aligned: list[float] = []

    def look(bucket: Any) -> None:
        M, T = bucket.M.double(), bucket.T.double()
        best = torch.linalg.svdvals(M)[:, :16].sum(-1)
        aligned.extend(((M * T).sum((-2, -1)) / best).tolist())

    opt.register_polar_hook(look)
    set_gradients(params, 5)
    opt.step()
    assert len(aligned) == 5
    assert min(aligned) > 0.85
    assert all(("whitening" in opt.state[p]) == (maps[1] is POLAR) for p in params)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("when", [0, 2])
def test_a_skipped_parameter_keeps_its_start(device: torch.device, when: int, fused: bool) -> None:
    params = parameters(device)
    opt = ps.Muon(params, lr=0.1, polar=POLAR, nonfinite="skip", fused=fused, shape_scale="none")
    for step in range(4):
        kept = [
            {key: v.clone() for key, v in opt.state[p].items() if key != "momentum_buffer"}
            for p in params
        ]
        before = [p.detach().clone() for p in params]
        set_gradients(params, step, poison=1 if step == when else None)
        opt.step()
        for i, (p, x, known) in enumerate(zip(params, before, kept, strict=True)):
            skipped = i == 1 and step == when
            assert torch.equal(p, x) == skipped
            moved = torch.linalg.matrix_norm(p.detach() - x, 2).min()
            assert skipped or moved > 0.09  # a whole step, also after one that was skipped
            for key in known:
                assert torch.equal(opt.state[p][key], known[key]) == skipped


def test_a_hook_sees_the_step_and_does_not_change_it(device: torch.device) -> None:
    ends = []
    for watched in (True, False):
        params = [nn.Parameter(torch.zeros_like(p)) for p in parameters(device)]
        opt = ps.Muon(params, lr=1.0, shape_scale="none", polar=POLAR)

        def look(bucket: Any) -> None:
            T = bucket.factors.Q @ bucket.factors.Z
            T = T if bucket.M.shape[-2] <= bucket.M.shape[-1] else T.mT
            assert (T - bucket.T).norm() < 0.02 * T.norm()
            assert bucket.factors.Z.shape[1] == 16

        if watched:
            opt.register_polar_hook(look)
        for step in range(4):
            set_gradients(params, step)
            opt.step()
        ends.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_one_that_joins_later_and_one_that_rests(device: torch.device) -> None:
    ends = []
    for fused in (True, False):
        params = [nn.Parameter(torch.zeros(48, 64, device=device)) for _ in range(3)]
        opt = ps.Muon(params, lr=0.1, polar=POLAR, fused=fused)
        for step in range(7):
            set_gradients(params, step)
            params[step % 3].grad = None
            opt.step()
        ends.append([p.detach() for p in params])
        assert len(opt._replayed.buckets) == fused
    assert close(*ends)


def test_rows_that_were_added_for_tensor_cores_stay_zero(device: torch.device) -> None:
    """ℓ = 14 is worked on as 16 rows on a GPU; the state has fourteen."""
    polar = replace(POLAR, oversample=2)
    params, opt = run(device, 4, polar)
    width = 16 if device.type == "cuda" else 14
    for p in params:
        assert opt.state[p]["basis"].shape[-2] == 14
        assert opt.state[p]["whitening"].shape[-2:] == (width, width)
    for end, start in zip(params, parameters(device), strict=True):
        assert (end - start).norm() > 0.02 * start.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "width", "n"), [(16, 16, 96), (70, 66, 300), (5, 5, 2100)])
def test_product_and_blend(
    device: torch.device, rows: int, width: int, n: int, dtype: torch.dtype
) -> None:
    from polarstep.kernels.small import product_and_blend

    g = torch.Generator().manual_seed(0)
    H, B, N, start = (
        torch.randn(s, generator=g).to(device)
        for s in [(2, rows, rows), (2, rows, n), (n, width), (2, width, n)]
    )
    H, B, before = H.to(dtype), B.to(dtype), start.clone()
    finite = torch.tensor([1.0, 0.0], device=device)
    options = {"numbers": N, "scale": 0.25, "finite": finite}
    X = product_and_blend(H, B, start, torch.float32, **options)
    want = H.double() @ B.double()
    tolerance = 1e-5 if dtype == torch.float32 and device.type == "cpu" else 2e-2
    assert (X - want).abs().max() < tolerance * want.abs().max()
    assert torch.allclose(start[0], X[0, :width] + 0.25 * N.mT, atol=1e-5)
    assert torch.equal(start[1], before[1])
    product_and_blend(H, B, start, torch.float32)
    assert torch.equal(start, X[:, :width])


def test_a_warm_step_without_z_leaves_scaled_noise(device: torch.device) -> None:
    """S = X + noise·Nᵀ/√n: what two sizes of noise leave differs by their difference times Nᵀ/√n."""
    g = torch.Generator().manual_seed(0)
    M, numbers = torch.randn(2, 48, 96, generator=g), torch.randn(96, 16, generator=g)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    M, numbers = M.to(device, dtype), numbers.to(device)
    left: list[Tensor] = []
    for noise in (0.1, 0.05):
        polar = replace(POLAR, sketch=ps.Warm(noise))
        _, carry = polar.step(M, MapState(), Draw(numbers))
        assert "whitening" in carry
        left.append(carry["basis"].float())
    want = ((0.1 - 0.05) * numbers.mT / math.sqrt(96)).expand(2, -1, -1)
    # On a GPU S is rounded to bfloat16, which moves entries of X by a part of the noise.
    tolerance = 0.5 if device.type == "cuda" else 1e-4
    assert (left[0] - left[1] - want).norm() <= tolerance * want.norm()
