"""Tables of addresses: one launch for a whole bucket of parameters that lie anywhere in memory.

A kernel that takes a table reads the address of its matrix from it, so nothing is copied together
first and nothing is launched per parameter. The table lives on the device and keeps its place, which
a captured CUDA graph relies on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polarstep.capture import in_a_graph

__all__ = ["refreshed"]

_READ_BY_GRAPHS: list[Tensor] = []


def refreshed(table: Tensor, values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """``values`` on the table's device, in its place if they fit; without waiting for the device."""
    host = torch.tensor(values, dtype=dtype)
    if table.is_cuda:
        host = host.pin_memory()  # a copy from pageable memory would wait for the device
        if in_a_graph():
            _READ_BY_GRAPHS.append(host)  # at every replay, and nobody says which is the last
    if table.shape != host.shape or table.dtype != dtype:
        table = torch.empty(host.shape, dtype=dtype, device=table.device)
    return table.copy_(host, non_blocking=True)
