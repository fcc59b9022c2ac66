"""Sharded parameters in a world of one rank take the fused step, with the result of plain ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from polarstep import LowRank, Muon
from polarstep.maps import Warm

STEPS = 4
SHAPES = ((32, 48), (48, 32), (3, 32, 48))


@pytest.fixture
def mesh(device, tmp_path):
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    if device.type == "cuda" and not distributed.is_nccl_available():
        pytest.skip("needs torch.distributed with NCCL")
    from torch.distributed.device_mesh import init_device_mesh

    store = tmp_path / "store"
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh(device.type, (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [{}, {"polar": LowRank(12, 4, sketch=Warm(), always_sketch=True)}],
    ids=["full", "warm"],
)
def test_the_fused_step_of_plain_parameters(device, mesh, options) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    def gradient(i: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * step + i)
        return torch.randn(SHAPES[i], generator=generator).to(device)

    plain = [Parameter(gradient(i, 99)) for i in range(len(SHAPES))]
    sharded = [Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(0)])) for p in plain]
    one, other = Muon(plain, **options), Muon(sharded, **options)
    for step in range(STEPS):
        for i, (p, q) in enumerate(zip(plain, sharded, strict=True)):
            p.grad = gradient(i, step)
            q.grad = distribute_tensor(p.grad.clone(), mesh, [Shard(0)])
        one.step()
        before = other._replayed._plan
        other.step()
    # A plan, and the graph that is captured for it, lasts as long as the parameters' memory.
    assert other._replayed._plan is before
    assert len(other._distribution._local) == len(SHAPES)
    assert len(other._replayed.buckets) == len(one._replayed.buckets) > 0
    assert all("fused; local" in route.polar for route in other.routes)
    for p, q in zip(plain, sharded, strict=True):
        assert torch.equal(q.to_local(), p)
        assert other.state[q].keys() == one.state[p].keys()
        assert isinstance(other.state[q]["momentum_buffer"], DTensor)
        for key, value in one.state[p].items():
            mine = other.state[q][key]
            mine = mine.to_local() if isinstance(mine, DTensor) else mine
            assert torch.equal(mine, value), key
