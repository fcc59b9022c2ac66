"""Steps on a CPU in the precisions of a GPU, so that its rounding errors are seen without one.

Through Triton's interpreter a CPU computes in float32 otherwise, where a GPU rounds M, a basis and most
products to bfloat16 or float16, and factors of float32 to tf32. QᵀQ = I to seven digits then, and to
two on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polarstep import ops
from polarstep.ops.triton import Triton

__all__ = ["round_as_a_gpu"]


class Rounding(Triton):
    """What a GPU does, with kernels that are interpreted. torch's own products round as a GPU's do."""

    def dtype(self, given: torch.dtype) -> torch.dtype:
        """bfloat16, as on every GPU that multiplies it."""
        return torch.float64 if given == torch.float64 else torch.bfloat16


def round_as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have steps on a CPU round what steps on a GPU round."""
    monkeypatch.setitem(ops._BY_KERNELS, "cpu", Rounding())
    _multiply_in_tf32(monkeypatch)


def _multiply_in_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round the float32 factors of a product to ten bits, where the kernel does not ask for all."""
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    dot, handle = interpreter.InterpreterBuilder.create_dot, interpreter.TensorHandle

    def in_tf32(x: Any) -> Any:
        bits = x.data.view(np.uint32)
        bits = (bits + np.uint32(0xFFF) + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)
        return handle(np.where(np.isfinite(x.data), bits.view(np.float32), x.data), x.dtype)

    def multiplied(self: Any, a: Any, b: Any, d: Any, precision: Any, most: Any) -> Any:
        if a.dtype.scalar == tl.float32 and str(precision).upper().endswith("TF32"):
            a, b = in_tf32(a), in_tf32(b)
        return dot(self, a, b, d, precision, most)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiplied)
