"""Triton kernels for the parts of a GPU step where torch's own operations cost too much.

Every operation by kernels has a plain torch twin with the same contract, which is the reference in the
tests and runs where Triton is missing. The exception is a whitened warm sketch
(:mod:`polarstep.maps.subspace`), which only kernels make; elsewhere a warm sketch stores Ωᵀ itself.
Importing this package needs neither Triton nor a GPU.

momentum, rows, update   passes over a bucket, whose matrices are found by their addresses
product, small, float8   products
norms                    norms of matrices, and estimates of norms for deflated steps

**Tables of addresses** (:func:`shared_table`): one launch for a whole bucket of parameters that lie
anywhere in memory. Each program of a kernel reads the address of its matrix from the table. So matrices
are not copied together first, and there is no launch per parameter. The table keeps its place on the
device, which a captured CUDA graph relies on. All buckets of a device share one table: scheduled
learning rates are copied to it at every step, and a copy takes as long for one bucket as for all.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from polarstep.context import constant, in_a_graph

__all__ = [
    "MOST_ENTRIES",
    "MOST_MATRICES",
    "available",
    "capability",
    "interpreted",
    "part_sizes",
    "refreshed",
    "shared_table",
]

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


# Parts of a shared table begin at multiples of this many entries, which are 16 bytes or more.
# Triton compiles a kernel once for addresses so aligned, and again for other addresses.
ALIGNED = 4

_READ_BY_GRAPHS: list[Tensor] = []


def refreshed(table: Tensor, values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """``values`` on the table's device, in the table's memory if they fit; never waits for it."""
    host = torch.tensor(values, dtype=dtype, device="cpu")
    if table.is_cuda:
        host = host.pin_memory()  # a copy from pageable memory would wait for the device
        if in_a_graph():
            _READ_BY_GRAPHS.append(host)  # kept for good: every replay reads it, and more may come
    if table.shape != host.shape or table.dtype != dtype:
        table = torch.empty(host.shape, dtype=dtype, device=table.device)
    return table.copy_(host, non_blocking=True)


def shared_table(
    table: Tensor, parts: Sequence[Sequence[Sequence[float]]], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """One :func:`refreshed` table with all ``parts`` side by side, and a view of each part."""
    rows: list[list[float]] = [[] for _ in parts[0]]
    firsts = []
    for part in parts:
        firsts.append(len(rows[0]))
        for row, values in zip(rows, part, strict=True):
            row += [*values, *[0] * (-len(values) % ALIGNED)]
    table = refreshed(table, rows, dtype)
    return table, [
        table[:, first : first + len(part[0])] for first, part in zip(firsts, parts, strict=True)
    ]
