"""float64 where a device has it. Apple's GPUs have none, and some of Intel's.

Sums and small matrices that a step computes in float64 are in float32 there, of numbers that are scaled
to unit size first. Measurements, which are rare, are computed on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep.torch_compile import constant

__all__ = ["fitting", "has_float64", "in_float64", "widest"]


def has_float64(device: torch.device) -> bool:
    """Whether tensors on ``device`` can be in float64."""
    if device.type == "xpu":
        return _of_intel(device.index)
    return device.type != "mps"


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device without it."""
    return torch.float64 if has_float64(device) else torch.float32


def in_float64(X: Tensor) -> Tensor:
    """``X`` in float64: on its device, or on the CPU if its device has no float64."""
    return (X if has_float64(X.device) else X.cpu()).to(torch.float64)


def fitting(X: Tensor, device: torch.device) -> Tensor:
    """``X`` on ``device``, in float32 if it is in float64 and the device has none."""
    narrower = X.dtype == torch.float64 and not has_float64(device)
    return (X.float() if narrower else X).to(device)


_INTELS: dict[int | None, bool] = {}


@constant
def _of_intel(index: int | None) -> bool:
    if index not in _INTELS:
        _INTELS[index] = bool(torch.xpu.get_device_capability(index).get("has_fp64", True))
    return _INTELS[index]
