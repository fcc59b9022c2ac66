"""Triton kernels for the parts of a GPU step where torch's own operations cost too much.

Every operation by kernels has a plain torch twin with the same contract, which is the reference in the
tests and runs where Triton is missing. The exception is a whitened warm sketch
(:mod:`polarstep.maps.subspace`), which only kernels make; elsewhere a warm sketch stores Ωᵀ itself.
Importing this package needs neither Triton nor a GPU.

Passes over a bucket   momentum, unit_size, normalize, rows, update; pointers and elements have the
                       addresses that they read
Products               product, polynomial, small_gram, blend, float8; tile_order, descriptors and trace
                       have parts of them
Estimates of norms     rest_size and flat_step_norms for deflated steps; few_columns has the
                       products that they are made of
"""

from __future__ import annotations

import importlib.util
import os

import torch

from polarstep.context import constant

__all__ = ["MOST_ENTRIES", "MOST_MATRICES", "available", "capability", "interpreted", "part_sizes"]

# A kernel's matrices are along the second dimension of its grid, which CUDA limits to 65,535: a launch
# on more matrices fails as "invalid argument". A step on more matrices runs in parts.
MOST_MATRICES = 65_535

# Kernels find an entry of a matrix by 32 bits, with a sign.
MOST_ENTRIES = 2**31 - 1

# The first NVIDIA GPUs with products in bfloat16, which most kernels are made of: Ampere. Triton has no
# support for older ones.
FIRST_CAPABILITY = (8, 0)

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run on the CPU through Triton's interpreter, as in the tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def available(device: torch.device) -> bool:
    """Whether the kernels work on tensors on ``device``: an NVIDIA GPU from Ampere on, with Triton.

    All other devices, AMD's GPUs among them, take torch's own operations: the kernels were never run
    there.
    """
    if not _HAS_TRITON or device.type not in ("cpu", "cuda"):
        return False
    return interpreted() or capability(device) >= FIRST_CAPABILITY


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of an NVIDIA GPU, and (0, 0) for all other devices.

    Where no GPU is found, as on the machine on which somebody plans, it is that of an H100.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return (0, 0)
    return _capability_of(device.index)


_CAPABILITIES: dict[int | None, tuple[int, int]] = {}


@constant
def _capability_of(index: int | None) -> tuple[int, int]:
    if index not in _CAPABILITIES:
        found = torch.cuda.is_available()
        _CAPABILITIES[index] = torch.cuda.get_device_capability(index) if found else (9, 0)
    return _CAPABILITIES[index]


def part_sizes(count: int, device: torch.device) -> list[int]:
    """How many matrices each part of a step on ``count`` matrices on ``device`` has."""
    if count <= MOST_MATRICES or not available(device):
        return [count]
    return [min(MOST_MATRICES, count - first) for first in range(0, count, MOST_MATRICES)]
