"""Triton kernels for the parts of a GPU step where torch's own operations cost too much.

Every operation by kernels has a plain torch twin with the same contract, which is the reference in the
tests and runs where Triton is missing. The exception is a whitened warm sketch
(:mod:`polarstep.polar.finders.warm`), which only kernels make; elsewhere a warm sketch stores Ωᵀ itself.
Importing this package needs neither Triton nor a GPU.
"""

from __future__ import annotations

import importlib.util
import os

import torch

__all__ = ["MOST_ENTRIES", "MOST_MATRICES", "available", "in_parts", "interpreted"]

# A kernel's matrices are along the second dimension of its grid, which CUDA limits to 65,535: a launch
# on more matrices fails as "invalid argument". A step on more matrices runs in parts.
MOST_MATRICES = 65_535

# Kernels find an entry of a matrix by 32 bits, with a sign.
MOST_ENTRIES = 2**31 - 1

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run on the CPU through Triton's interpreter, as in the tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def available(device: torch.device) -> bool:
    """Whether the kernels can work on tensors on ``device``."""
    return _HAS_TRITON and (device.type == "cuda" or interpreted())


def in_parts(count: int, device: torch.device) -> list[int]:
    """How many matrices each part of a step on ``count`` matrices on ``device`` has."""
    if count <= MOST_MATRICES or not available(device):
        return [count]
    return [min(MOST_MATRICES, count - first) for first in range(0, count, MOST_MATRICES)]
