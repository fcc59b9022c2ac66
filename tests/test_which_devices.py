"""On which devices kernels run: NVIDIA GPUs from Ampere on. All others take torch's own operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import polarstep as ps
from polarstep import kernels
from polarstep.engines.fused import runs_by_kernels
from polarstep.maps import auto
from polarstep.ops import cuda, ops_of
from polarstep.ops.cuda import Cuda

GPU = torch.device("cuda", 0)
A_GPU = Callable[..., None]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> A_GPU:
    """Have torch say that there is a GPU with a capability, from NVIDIA or AMD."""

    def there_is(capability: tuple[int, int], *, hip: str | None = None) -> None:
        monkeypatch.setattr(kernels, "_CAPABILITIES", {})
        monkeypatch.setattr(kernels, "interpreted", lambda: False)
        monkeypatch.setattr(kernels, "_HAS_TRITON", True)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H100")

    return there_is


@pytest.mark.parametrize(
    ("capability", "hip", "runs"),
    [
        ((6, 0), None, False),
        ((7, 5), None, False),
        ((8, 0), None, True),
        ((9, 0), None, True),
        ((12, 0), None, True),
        ((9, 4), "6.4", False),  # an MI300
    ],
)
def test_kernels_run_from_ampere_on(gpu, capability, hip, runs):
    gpu(capability, hip=hip)
    assert kernels.available(GPU) == runs
    assert runs_by_kernels({"fused": True, "polar": ps.NewtonSchulz()}, GPU) == runs
    assert auto._kind_of(GPU) == ("H100" if runs else "other")
    if not runs:
        assert type(ops_of(GPU)) is Cuda


def test_float8_and_descriptors_ask_the_same_place(gpu):
    pytest.importorskip("triton")
    from polarstep.kernels import product as descriptors
    from polarstep.ops import triton as float8

    X = OnGpu(torch.zeros(2, 512, 512, dtype=torch.bfloat16))
    for capability, hip, has in (((9, 0), None, True), ((8, 9), None, False), ((9, 4), "6", False)):
        gpu(capability, hip=hip)
        if descriptors.interpreted():
            pytest.skip("the interpreter has descriptors whatever the GPU")
        assert descriptors.describable(X) == has
        assert descriptors.takes_large_tiles(GPU) == has
        assert float8.suits_eight_bits(X, (3.0, -4.0, 2.0)) == has


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    device = GPU
    is_cuda = True


@pytest.mark.parametrize("kind", ["cpu", "mps", "xpu", "meta"])
def test_kernels_run_on_no_other_kind_of_device(gpu, kind):
    gpu((9, 0))
    assert not kernels.available(torch.device(kind))


def test_without_triton_no_kernels_run(gpu, monkeypatch):
    gpu((9, 0))
    monkeypatch.setattr(kernels, "_HAS_TRITON", False)
    assert not kernels.available(GPU)


def test_a_plan_for_a_gpu_needs_none(gpu, monkeypatch):
    gpu((6, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.available(torch.device("cuda"))


@pytest.mark.parametrize(("hip", "wide"), [(None, False), ("6.4", True)])
def test_amd_multiplies_a_gram_matrix_in_float32(monkeypatch, hip, wide):
    """There torch refuses a product of 16-bit factors with a result in float32."""
    asked: list[object] = []

    def bmm(A: Tensor, B: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        asked.append(out_dtype)
        return A.float() @ B.float()

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(cuda.torch, "bmm", bmm)
    X = torch.randn(2, 4, 6).to(torch.bfloat16)
    found = Cuda().gram(X.as_subclass(OnGpu)).as_subclass(Tensor)
    assert torch.equal(found, X.float() @ X.float().mT)
    assert asked == ([] if wide else [torch.float32])
