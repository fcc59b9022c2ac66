"""Tables of addresses: one launch for a whole bucket of parameters that lie anywhere in memory.

A kernel that takes a table reads the address of its matrix from it, so nothing is copied together
first and nothing is launched per parameter. The table lives on the device and keeps its place, which
a captured CUDA graph relies on; it is written again only when an address has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["Table"]


class Table:
    """Numbers on the device, one row per matrix, refreshed from the host without waiting."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._known: Sequence[float] = ()
        self.tensor = torch.empty(0, dtype=dtype, device=device)

    def fill(self, values: Sequence[float]) -> None:
        """Hold ``values``; they are copied over only if they differ from what is held."""
        if values == self._known:
            return
        if len(values) != len(self._known):
            self.tensor = torch.empty(len(values), dtype=self._dtype, device=self._device)
        host = torch.tensor(values, dtype=self._dtype)
        if self._device.type == "cuda":
            host = host.pin_memory()  # a copy from pageable memory would wait for the device
        self.tensor.copy_(host, non_blocking=True)
        self._known = values
