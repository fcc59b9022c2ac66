"""The operations that a polar step is made of, one implementation for each kind of device.

A polar map asks :func:`of` for the operations of its matrices' device and writes its formulas with
them. The mathematics is in the maps; the rules of precision, alignment and launches are here:

* :mod:`~polarstep.products.base`: what every device can do, in torch's own operations;
* :mod:`~polarstep.products.rest_norm` and :mod:`~polarstep.products.flat_step`: the same for the
  operations that only deflated steps need, the size of the rest and the step on X₀;
* :mod:`~polarstep.products.cpu`: half of a symmetric product, bfloat16 tiles, free value checks;
* :mod:`~polarstep.products.cuda`: bfloat16 products with float32 sums;
* :mod:`~polarstep.products.triton`: the kernels of :mod:`polarstep.kernels`.
"""

from __future__ import annotations

import torch

from polarstep import kernels
from polarstep.products.base import Products
from polarstep.products.cpu import Cpu
from polarstep.products.cuda import Cuda

__all__ = ["Products", "of"]

_CPU, _CUDA = Cpu(), Cuda()
_BY_KERNELS: dict[str, Products] = {}


def of(device: torch.device) -> Products:
    """The operations for tensors on ``device``."""
    if not kernels.available(device):
        return _CPU if device.type == "cpu" else _CUDA
    if not _BY_KERNELS:
        from polarstep.products.triton import InterpretedTriton, Triton

        _BY_KERNELS.update(cpu=InterpretedTriton(), cuda=Triton())
    return _BY_KERNELS[device.type]
