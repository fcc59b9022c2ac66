"""Compile the kernels of whole steps for a Hopper GPU, where there is none. Nothing is launched.

    python -m tests.hopper              # all maps, a minute or two
    python -m tests.hopper auto rest    # these alone
    python -m tests.hopper sm_120 full  # for a desktop's Blackwell GPU

A step runs on a CPU as it would on a GPU, with two changes: a launch compiles its kernel, with the very
arguments of the launch, and goes no further; and products in 16 bits by torch, which a CPU is slow at,
return memory as it is. So the numbers mean nothing. What Triton's interpreter cannot tell is whether a
kernel compiles: types that do not go together, shapes that tensor cores refuse, more shared memory than
there is.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import polarstep as ps
from polarstep import kernels, ops
from polarstep.kernels import product as descriptors
from polarstep.ops.triton import Triton

__all__ = ["MAPS", "main"]

SHAPES = ((512, 512), (1024, 512))  # the fewest rows for which products run in eight bits
INNER = {"inner": ps.NewtonSchulz(4, "polar-express-sketch"), "always_sketch": True}
WARM = ps.LowRank(48, 8, sketch=ps.Warm(), **INNER)
MAPS: dict[str, ps.PolarMap] = {
    "auto": ps.Deflated(WARM, ps.NewtonSchulz(1, "flat")),
    "16 bits": ps.Deflated(WARM, ps.NewtonSchulz(1, "flat"), float8=False),
    "low rank": ps.LowRank(48, 8, **INNER),
    "full": ps.NewtonSchulz(5, "polar-express"),
}
# Bytes of shared memory that a program may have.
GPUS = {"sm_90": 232_448, "sm_120": 101_376}
# Endings of a name for the same map with another option of the optimizer.
OPTIONS: dict[str, dict[str, Any]] = {
    " with rows": {"transform": ps.NormalizedRows()},
    " with rms": {"shape_scale": "rms"},
}


class _Hopper:
    """As much of a driver of Triton as compiling needs."""

    def __init__(self, gpu: str) -> None:
        self.capability = int(gpu.removeprefix("sm_"))

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _OnHopper(Triton):
    def dtype(self, given: torch.dtype) -> torch.dtype:
        return given if given == torch.float64 else torch.bfloat16


class _WithoutProducts(TorchDispatchMode):
    """Products in 16 bits return memory as it is."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        is_product = function.overloadpacket.__name__ in ("bmm", "mm", "baddbmm", "addmm")
        if not is_product or args[-1].dtype.itemsize != 2:
            return function(*args, **kwargs)
        A, B = args[-2:]
        return kwargs.get("out", A.new_empty(*A.shape[:-1], B.shape[-1]))


def compiled(polar: ps.PolarMap, options: dict[str, Any], room: int) -> Counter[str]:
    """The kernels of two steps with ``polar`` and ``options``, and how often each is launched.

    Raises if a kernel needs more shared memory than ``room``, as its launch would.
    """
    found: Counter[str] = Counter()
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> Any:
        found[kernel.fn.__name__] += 1
        made = run(kernel, *args, grid=grid, warmup=True, **given)
        assert made.metadata.shared <= room, f"{kernel.fn.__name__}: {made.metadata.shared} bytes"
        return made

    JITFunction.run = compile_only
    try:
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        optimizer = ps.Muon(params, lr=0.01, polar=polar, **options)
        for _ in range(2):  # a warm map begins with a fresh sketch
            for p in params:
                p.grad = torch.ones_like(p)
            with _WithoutProducts():
                optimizer.step()
        assert optimizer._replayed.buckets, "the step was not fused"
    finally:
        JITFunction.run = run
    return found


def main(*names: str) -> None:
    """Compile for the maps of these names, or for all; a kernel that does not compile raises.

    The first name may be a key of ``GPUS``.
    """
    gpu = names[0] if names and names[0] in GPUS else "sm_90"
    names = tuple(name for name in names if name != gpu)
    driver.set_active(_Hopper(gpu))
    kernels.available = lambda device: True
    kernels.capability = lambda device: divmod(_Hopper(gpu).capability, 10)
    descriptors.capability = kernels.capability
    ops._CPU = _OnHopper()
    for name in names or [each + ending for ending in ("", *OPTIONS) for each in MAPS]:
        ending = next((each for each in OPTIONS if name.endswith(each)), "")
        polar, options = MAPS[name.removesuffix(ending)], OPTIONS.get(ending, {})
        counts = compiled(polar, options, GPUS[gpu]).most_common()
        print(
            f"{name}: " + ", ".join(f"{count} × {kernel}" for kernel, count in counts), flush=True
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
