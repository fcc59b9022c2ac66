"""Weights stored inputs × outputs are fused as they are, and so are parts of stored rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import polarstep as ps


def ends(
    device: torch.device, dtype: torch.dtype = torch.float32, **options: object
) -> list[Tensor]:
    """A 32×64 weight after a few fused steps, and after as many plain ones."""
    found = []
    for fused in (True, False):
        g = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(32, 64, generator=g).to(device, dtype))
        opt = ps.Muon([p], lr=0.1, polar=ps.NewtonSchulz(3, "quintic"), fused=fused, **options)
        for _ in range(4):
            p.grad = torch.randn(32, 64, generator=g).to(device, dtype)
            opt.step()
        found.append(p.detach())
        is_fused = ", fused" in opt.routes.rows[0].polar
        assert is_fused == bool(opt._replayed.buckets)
        assert not is_fused or fused
    return found


def is_fused(device: torch.device, dtype: torch.dtype = torch.float32, **options: object) -> bool:
    p = torch.nn.Parameter(torch.zeros(32, 64, device=device, dtype=dtype))
    return (
        ", fused"
        in ps.Muon([p], polar=ps.NewtonSchulz(3, "quintic"), **options).routes.rows[0].polar
    )


@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({"layout": "transposed"}, True),
        ({"layout": "transposed", "lr_factor": 0.25, "transform": ps.NormalizedRows()}, True),
        ({"layout": "transposed", "split_columns": (16, 16)}, True),  # runs of stored rows
        ({"layout": "transposed", "split_sizes": (32, 16, 16)}, True),  # parts of stored rows
        ({"layout": "transposed", "split_sizes": (32, 32)}, True),
        ({"layout": "transposed", "split_sizes": (48, 16), "split_columns": (8, 24)}, True),
        ({"split_columns": (32, 32)}, True),
        ({"split_columns": (62, 2)}, False),  # addresses that are no multiples of 16 bytes
        ({"split_sizes": (4, 4), "split_repeats": 4}, False),
        ({"momentum_dtype": torch.bfloat16}, False),
        ({"momentum_dtype": torch.int8}, False),
        ({"rounding": "compensated"}, True),  # float32 loses nothing
    ],
    ids=str,
)
def test_fused_equals_plain(device, options, fused):
    assert is_fused(device, **options) == fused
    one, other = ends(device, **options)
    tolerance = 1e-5 if device.type == "cpu" else 0.05
    assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("polar", [ps.LowRank(8, 4), ps.NewtonSchulz(3, "quintic")], ids=str)
def test_parts_of_stored_rows_are_in_a_bucket_with_whole_matrices(device, dtype, polar):
    """GPT-2 has both: q, k and v in one weight, inputs × outputs, and a square projection."""
    found = []
    for fused in (True, False):
        g = torch.Generator().manual_seed(0)
        attention, projection, experts = (
            torch.nn.Parameter(torch.randn(shape, generator=g).to(device, dtype))
            for shape in ((32, 96), (32, 32), (2, 32, 96))
        )
        cut = {"layout": "transposed", "split_sizes": (32, 32, 32)}
        groups = [{"params": [attention, experts], **cut}, {"params": [projection]}]
        opt = ps.Muon(groups, lr=0.1, weight_decay=0.1, polar=polar, fused=fused)
        for _ in range(3):
            for p in (attention, projection, experts):
                p.grad = torch.randn(p.shape, generator=g).to(device, dtype)
            opt.step()
        if fused:
            (bucket,) = opt._replayed.buckets.values()
            assert bucket.count == 10
        found.append([attention, projection, experts])
    tolerance = 1e-4 if device.type == "cpu" and dtype == torch.float32 else 0.05
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def test_columns_of_a_channels_last_filter_are_not_cut_by_the_kernels(device):
    p = torch.nn.Parameter(torch.zeros(16, 8, 4, 4, device=device))
    options = {"polar": ps.NewtonSchulz(3, "quintic"), "split_columns": (64, 64)}
    assert ", fused" in ps.Muon([p], **options).routes.rows[0].polar
    p.data = p.data.to(memory_format=torch.channels_last)
    assert ", fused" not in ps.Muon([p], **options).routes.rows[0].polar


def test_compensated_bfloat16_takes_the_plain_path_and_says_so(device):
    options = {"rounding": "compensated"}
    assert is_fused(device, torch.bfloat16)
    assert not is_fused(device, torch.bfloat16, **options)
    p = torch.nn.Parameter(torch.zeros(32, 64, device=device, dtype=torch.bfloat16))
    told = ps.Muon([p], polar=ps.NewtonSchulz(3, "quintic"), **options).routes.rows[0].polar
    assert told.endswith("rounding compensated, so not fused")
    one, other = ends(device, torch.bfloat16, **options)
    assert torch.equal(one, other)
