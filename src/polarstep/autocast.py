"""Keep ``torch.autocast`` and ``torch.inference_mode`` out of arithmetic.

A step inside ``with torch.autocast(...)`` would multiply in bfloat16 where float32 is needed: in the
small matrices of a sketch, in the polynomials, in the bounds of a certificate. A step inside
``with torch.inference_mode()`` would make a state that no step outside can change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

__all__ = ["autocast_off", "autocast_off_on", "inference_mode_off"]

# The kinds of devices that parameters lie on and that have autocast; the meta device, e.g., has none.
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


@contextmanager
def inference_mode_off() -> Iterator[None]:
    """A context that makes ordinary tensors, and in ``torch.inference_mode()`` keeps gradients off."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield
