"""Tensor descriptors, which operands can be read through them, and which GPUs take large tiles.

With a descriptor a Hopper GPU copies whole tiles; without, threads spend time on addresses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton
    TensorDescriptor = None

from polarstep.kernels import capability, interpreted

__all__ = ["describable", "describe", "takes_large_tiles"]


def describable(*tensors: Tensor) -> bool:
    """Whether contiguous ``tensors`` can be read through descriptors.

    The GPU must support descriptors, and rows must take a multiple of 16 bytes. Always false while
    torch.compile traces, because addresses are not known then.
    """
    if TensorDescriptor is None or torch.compiler.is_compiling():
        return False
    if not interpreted() and capability(tensors[0].device) < (9, 0):
        return False
    return all(X.data_ptr() % 16 == 0 and X.shape[-1] * X.element_size() % 16 == 0 for X in tensors)


def takes_large_tiles(device: torch.device) -> bool:
    """Whether a program may have some 200 KiB of shared memory, and multiplies what lies there.

    NVIDIA's Hopper and Blackwell GPUs for servers do: compute capability 9 and 10. Blackwell GPUs for
    desktops (12) have descriptors too, but 99 KiB, and copy both factors of a product to registers.
    """
    return interpreted() or capability(device)[0] in (9, 10)


def describe(X: Tensor, block: list[int]) -> Any:
    """A descriptor of contiguous ``X``, to be read in tiles of shape ``block``."""
    return TensorDescriptor.from_tensor(X, block)
