"""The operations that a polar step is made of, one implementation for each kind of device.

A polar map asks :func:`ops_of` for the operations of its matrices' device and writes its formulas with
them. The mathematics is in the maps; the rules of precision, alignment and launches are here:

* :mod:`~polarstep.ops.base`: what every device can do, in torch's own operations;
* :mod:`~polarstep.ops.cpu`: half of a symmetric product, bfloat16 tiles, free value checks;
* :mod:`~polarstep.ops.cuda`: bfloat16 products with float32 sums;
* :mod:`~polarstep.ops.triton`: the kernels of :mod:`polarstep.kernels`, and a step in eight bits;
* :mod:`~polarstep.ops.lazy`: matrices that are not multiplied out.
"""

from __future__ import annotations

import torch

from polarstep import kernels
from polarstep.ops.base import Products
from polarstep.ops.cpu import Cpu
from polarstep.ops.cuda import Cuda

__all__ = ["Products", "ops_of"]

_CPU, _CUDA = Cpu(), Cuda()
_INTERPRETED = kernels.interpreted()  # Triton too reads it once
_BY_KERNELS: dict[str, Products] = {}


def ops_of(device: torch.device) -> Products:
    """The operations for tensors on ``device``."""
    if device.type == "cpu" and not _INTERPRETED:
        return _CPU
    if not kernels.available(device):
        return _CPU if device.type == "cpu" else _CUDA
    if not _BY_KERNELS:
        from polarstep.ops.triton import InterpretedTriton, Triton

        _BY_KERNELS.update(cpu=InterpretedTriton(), cuda=Triton())
    return _BY_KERNELS[device.type]
