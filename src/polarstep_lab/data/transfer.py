"""From the host to a device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sent_to"]


def sent_to(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` on ``device``. A copy from pageable memory would wait for all that is in its queue."""
    if device.type != "cuda":
        return tuple(t.to(device) for t in tensors)
    return tuple(t.pin_memory().to(device, non_blocking=True) for t in tensors)
