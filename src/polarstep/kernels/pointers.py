"""Tables of addresses: one launch for a whole bucket of parameters that lie anywhere in memory.

A kernel that takes a table reads the address of its matrix from it, so nothing is copied together
first and nothing is launched per parameter. The table lives on the device and keeps its place, which
a captured CUDA graph relies on. All buckets of a device share one, since a learning rate that follows
a schedule is copied there at every step, and a copy takes as long for one bucket as for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polarstep.cuda_graphs import in_a_graph

__all__ = ["refreshed", "shared_table"]

# Parts of a shared table begin at multiples of as many entries, of 16 bytes or more: a kernel is
# compiled once for addresses like those, and again for others.
ALIGNED = 4

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


def shared_table(
    table: Tensor, parts: Sequence[Sequence[Sequence[float]]], dtype: torch.dtype
) -> tuple[Tensor, list[Tensor]]:
    """One table of all ``parts``, side by side and :func:`refreshed`, and where each is in it."""
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
