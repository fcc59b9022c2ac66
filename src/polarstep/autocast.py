"""Keep ``torch.autocast`` out of arithmetic that chooses its own precision.

A step inside ``with torch.autocast(...)`` would multiply in bfloat16 where float32 is needed: in the
small matrices of a sketch, in the polynomials, in the bounds of a certificate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

__all__ = ["autocast_off", "autocast_off_on"]

# The kinds of devices that parameters lie on. The meta device, as an example, has no autocast.
KINDS = ("cpu", "cuda", "mps", "xpu")


def autocast_off_on(device: torch.device) -> AbstractContextManager[object]:
    """A context in which autocast does nothing to tensors on ``device``; torch.compile traces it."""
    if device.type in KINDS and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


@contextmanager
def autocast_off() -> Iterator[None]:
    """A context in which autocast does nothing on any device."""
    with ExitStack() as stack:
        for kind in KINDS:
            stack.enter_context(autocast_off_on(torch.device(kind)))
        yield
