"""Copies from the host to a device that do not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sent_to"]


def sent_to(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` on ``device``, through pinned memory: other copies wait for the device's queue."""
    if device.type != "cuda":
        return tuple(t.to(device) for t in tensors)
    return tuple(t.pin_memory().to(device, non_blocking=True) for t in tensors)
