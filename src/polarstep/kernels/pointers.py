"""Tables of addresses: one launch for a whole bucket of parameters that lie anywhere in memory.

Each program of a kernel reads the address of its matrix from the table. So matrices are not copied
together first, and there is no launch per parameter. The table keeps its place on the device, which
a captured CUDA graph relies on. All buckets of a device share one table: scheduled learning rates
are copied to it at every step, and a copy takes as long for one bucket as for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polarstep.cuda_graphs import in_a_graph

__all__ = ["refreshed", "shared_table"]

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
