"""Triton kernels: what a step on a GPU is made of where torch's own operations cost too much.

Every kernel has a plain torch twin with the same contract, which is the reference in the tests and
what runs where there is no Triton. Importing this package needs neither Triton nor a GPU.
"""

from __future__ import annotations

import importlib.util
import os

import torch

__all__ = ["available", "interpreted"]

_HAS_TRITON = importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run on the CPU through Triton's interpreter, as in the tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def available(device: torch.device) -> bool:
    """Whether tensors on ``device`` can be given to the kernels."""
    return _HAS_TRITON and (device.type == "cuda" or interpreted())
