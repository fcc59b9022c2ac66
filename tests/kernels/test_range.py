"""Fused steps over the range of gradients, as tests/optim/test_range.py has it for plain steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import polarstep as ps
from polarstep.kernels.momentum import LEAST, MOST, to_unit_size
from polarstep.ops import ops_of

MAPS = {
    "full space": ps.NewtonSchulz(5, "quintic"),
    "full space, Gram form": ps.NewtonSchulz(5, "quintic", form="gram"),
    "spectral": ps.NewtonSchulz(5, "quintic", delta="spectral"),
    "polar express": ps.NewtonSchulz(5, "polar-express"),
    "sketched": ps.LowRank(4, 4, always_sketch=True),
    "sketched, h=0": ps.LowRank(4, 4, power=0, always_sketch=True),
    "sketched, h=½": ps.LowRank(4, 4, power=0.5, always_sketch=True),
    "sampled": ps.LowRank(4, 4, sketch=ps.Kaczmarz(), always_sketch=True),
    "warm": ps.LowRank(4, 4, sketch=ps.Warm(), always_sketch=True),
    "whitened": ps.LowRank(
        4,
        4,
        sketch=ps.Warm(),
        inner=ps.NewtonSchulz(4, "polar-express-sketch"),
        always_sketch=True,
    ),
    "deflated": ps.Deflated(ps.LowRank(4, 4, always_sketch=True), ps.NewtonSchulz(1, "flat")),
    "auto": ps.Auto(),
}
# Maps that are tried with bfloat16 parameters, too.
IN_16_BITS = ("full space", "whitened", "deflated")
# Gradients of usual size first. float32 loses digits below 1e-38, and C is up to 20 G.
EXPONENTS = [0, -119, -41, 119]


@pytest.fixture
def as_on_a_gpu(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreted kernels take a GPU's path, which looks at no value on the way.

    A CPU would scale a matrix where it sees that a product has left the range of float32.
    """
    if device.type == "cpu":
        kind = type(ops_of(device))
        monkeypatch.setattr(kind, "host_reads_are_free", False)
        monkeypatch.setattr(kind, "orthonormalization", "products")
        monkeypatch.setattr(kind, "fuses_first_step", lambda self, m, _, first: len(first) <= 3)


def trained(
    device: torch.device, polar: ps.PolarMap, scales: list[float], dtype: torch.dtype, steps: int
) -> tuple[list[Tensor], ps.Muon]:
    """Parameters of one shape after some steps with the same gradients times a scale each."""
    g = torch.Generator().manual_seed(3)
    params = [nn.Parameter(torch.zeros(24, 32, device=device, dtype=dtype)) for _ in scales]
    optimizer = ps.Muon(params, lr=1e-3, polar=polar)
    common = torch.randn(24, 32, generator=g)
    for _ in range(steps):
        G = (common + 0.2 * torch.randn(24, 32, generator=g)).clamp(-3, 3) / 3
        for p, scale in zip(params, scales, strict=True):
            p.grad = G.to(device, dtype) * scale
        optimizer.step()
    return [p.detach() for p in params], optimizer


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("dtype", "polar"),
    [
        *((torch.float32, polar) for polar in MAPS.values()),
        *((torch.bfloat16, MAPS[name]) for name in IN_16_BITS),
    ],
    ids=[*MAPS, *(f"{name} in 16 bits" for name in IN_16_BITS)],
)
def test_steps_do_not_depend_on_the_scale_of_gradients(
    device: torch.device, dtype: torch.dtype, polar: ps.PolarMap
) -> None:
    (usual, *others), optimizer = trained(device, polar, [2.0**e for e in EXPONENTS], dtype, 2)
    assert optimizer._replayed.buckets  # fused
    assert usual.any()
    for exponent, X in zip(EXPONENTS[1:], others, strict=True):
        assert X.isfinite().all(), exponent
        # bfloat16 has few digits below 1e-38, which the small entries of gradients are near; and on a
        # GPU a bucket holds M in bfloat16.
        rounds = dtype == torch.bfloat16 or (device.type == "cuda" and exponent < -100)
        tolerance = 2e-2 if rounds else 1e-3
        assert (X - usual).norm() <= tolerance * usual.norm(), exponent


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_number_for_delta_is_on_the_scale_of_m(device: torch.device) -> None:
    """T of such a map depends on the size of M, which must not be changed."""
    polar = ps.NewtonSchulz(1, "quintic", delta=100.0)
    (X, small), optimizer = trained(device, polar, [1.0, 2.0**-41], torch.float32, 1)
    assert optimizer._replayed.buckets
    assert small.any()
    assert (X - small * 2.0**41).norm() < 1e-2 * X.norm()  # the polynomial is almost linear here


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_matrix_out_of_range_beside_one_that_is_not_finite(
    device: torch.device, bad: float
) -> None:
    X, broken = (nn.Parameter(torch.zeros(24, 32, device=device)) for _ in range(2))
    optimizer = ps.Muon([X, broken], lr=1e-3, polar=MAPS["sketched"])
    G = torch.randn(24, 32, generator=torch.Generator().manual_seed(3)).to(device)
    X.grad, broken.grad = G * 1e-30, G * 1e-30
    broken.grad[2, 3] = bad
    optimizer.step()
    assert optimizer._replayed.buckets
    assert X.isfinite().all()
    assert X.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_to_unit_size(device: torch.device, dtype: torch.dtype) -> None:
    """The largest entry of a matrix out of range is between one and two; others are not changed."""
    sizes = [0.0, LEAST, LEAST / 2, MOST, 2 * MOST, 2.0**-110, 2.0**127, torch.inf]
    if dtype == torch.float32:  # Triton's interpreter has no denormal numbers in bfloat16
        sizes += [2.0**-133]
    M = torch.randn(len(sizes), 40, 72, generator=torch.Generator().manual_seed(0))
    M = M.clamp(-2, 2) / 2  # largest entries are exactly one
    M = torch.where(M.abs() < 2.0**-10, 0.0, M).to(dtype)
    before = (M.double() * torch.tensor(sizes).double()[:, None, None]).to(device, dtype)
    before.nan_to_num_(nan=3.0, posinf=torch.inf, neginf=-torch.inf)  # 0·∞
    after = before.clone()
    parts = torch.split(before.abs().flatten(1).float(), 1024, dim=1)
    squares = torch.stack([part.double().square().sum(1) for part in parts], dim=1)
    to_unit_size(after, torch.stack([part.amax(1) for part in parts], dim=1), squares)
    for size, old, new, added in zip(sizes, before, after, squares.sum(1), strict=True):
        torch.testing.assert_close(added, new.double().square().sum(), rtol=1e-12, atol=0)
        if LEAST <= size <= MOST or size in (0.0, torch.inf):
            assert torch.equal(new, old)
            continue
        largest = float(new.abs().max())
        # The scale is at most 2¹²⁶, which does not bring a denormal number to one.
        assert largest == (2.0**-7 if size == 2.0**-133 else 2.0 if size == 2.0**127 else 1.0)
        assert torch.equal(new.double(), old.double() * (largest / size))


def test_momentum_tells_the_largest_entry_and_the_squares_of_each_block(
    device: torch.device,
) -> None:
    from polarstep.kernels.momentum import BLOCK, momentum, parts_of

    g = torch.Generator().manual_seed(0)
    G, C = (torch.randn(2, 50, 60, generator=g).to(device) for _ in range(2))
    tables = (torch.tensor([X.data_ptr() for X in XX], device=device) for XX in (G, C))
    M = torch.empty(2, 50, 60, device=device)
    betas = torch.tensor([0.5, 0.9], device=device)
    squares = torch.empty(2, parts_of(50, 60), dtype=torch.float64, device=device)
    largest = momentum(*tables, betas, M, element=torch.float32, nesterov=True, squares=squares)
    blocks = torch.split(M.flatten(1).abs(), BLOCK, dim=1)
    assert torch.equal(largest, torch.stack([block.amax(1) for block in blocks], dim=1))
    exact = torch.stack([block.double().square().sum(1) for block in blocks], dim=1)
    torch.testing.assert_close(squares, exact, rtol=1e-14, atol=0)


@pytest.mark.parametrize("polar", ["full space", "polar express", "sketched", "warm"])
def test_float16_gradients_of_any_size_leave_finite_weights(
    device: torch.device, polar: str
) -> None:
    (X,), optimizer = trained(device, MAPS[polar], [5e3], torch.float16, steps=18)
    assert not optimizer._replayed.buckets  # the kernels have no float16
    assert X.isfinite().all()
    assert X.any()
    assert (
        optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"].isfinite().all()
    )


def test_float32_has_the_squares_of_norms_within_the_limits() -> None:
    """The norm of a sketch is between a hundredth of the largest entry of M and 1e8 times the entry."""
    float32 = torch.finfo(torch.float32)
    smallest, largest = (LEAST / 100) ** 2, (1e8 * MOST) ** 2
    assert smallest > float32.tiny
    assert largest < float32.max
    # Gradients of usual size are within the limits: M need not be scaled.
    assert LEAST < 1e-11
    assert MOST > 1e8
