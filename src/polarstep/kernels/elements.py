"""Triton's names for the element types that kernels read through addresses."""

from __future__ import annotations

import torch
import triton.language as tl

__all__ = ["ELEMENTS"]

ELEMENTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
