"""‖Y‖_F² as the trace of YYᵀ, for kernels that divide by ‖Y‖_F and do not read Y."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["squared_norm"]


@triton.jit
def squared_norm(diagonal):
    """t = tr YYᵀ, a power of two near 1/t, and whether t is known; an unknown t is set to one.

    t is a little more than the trace, so that the rounded norm of Y/√t stays below one. The power
    of two scales YYᵀ without losing a bit.
    """
    t = tl.sum(diagonal.to(tl.float32), axis=0) * (1 + 2.0**-7)
    known = (t > 1e-36) & (t < 1e36)
    t = tl.where(known, t, 1.0)
    return t, tl.exp2(-tl.floor(tl.log2(t))), known
