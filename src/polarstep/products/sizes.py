"""Norms and largest entries of matrices, and scales that keep their squares within float32's range."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from polarstep.float64 import has_float64

__all__ = [
    "frexp",
    "frobenius_norm",
    "largest_entry",
    "leaves_range",
    "shrink_of",
    "unit_scale",
    "unit_scale_for",
    "unit_scaled",
]

# Entries whose squares a CPU adds up at a time, on one core.
PIECE = 2**15
# Sizes of matrices, by precision, that can be squared, summed and multiplied without loss.
_SAFE = {torch.float64: (2.0**-480, 2.0**480)}
_SAFE_IN_FLOAT32 = (2.0**-90, 2.0**110)


def frobenius_norm(X: Tensor) -> Tensor:
    """‖X‖_F of shape (batch, 1, 1), in float64: squares of 1e-30 or 1e30 leave the range of float32.

    On a device without float64 it is in float32, of X scaled to unit size, and of rows first, as a sum
    of millions of squares would lose digits.
    """
    large = X.device.type == "cpu" and X.shape[-2:].numel() > PIECE
    if large and not torch.compiler.is_compiling():
        # A CPU makes a copy in float64 first. In pieces it stays in the cache: a fourth of the time.
        matrices = X if X.is_contiguous() else X.mT
        norms = [_norm_of_parts(torch.split(x.reshape(-1), PIECE)) for x in matrices]
        return torch.stack(norms)[:, None, None] if norms else X.new_zeros(0, 1, 1).double()
    if has_float64(X.device):
        return torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    X, s = unit_scaled(X.float())
    rows = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    return torch.linalg.vector_norm(rows, dim=-2, keepdim=True) / s


def _norm_of_parts(parts: Iterable[Tensor]) -> Tensor:
    """‖X‖_F in float64 of a matrix in parts. torch makes a float64 copy of each part."""
    norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
    return torch.linalg.vector_norm(torch.stack(norms))


def largest_entry(X: Tensor) -> Tensor:
    """max |X_ij| of shape (batch, 1, 1)."""
    # torch's norm of order inf takes twenty times as long on a CPU.
    return torch.maximum(X.amax((-2, -1), keepdim=True), -X.amin((-2, -1), keepdim=True))


def leaves_range(size: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether matrices in ``dtype`` must be scaled before products; ``size`` is a norm of theirs.

    False for a size of zero and for NaN.
    """
    least, most = _SAFE.get(dtype, _SAFE_IN_FLOAT32)
    return ((size < least) & (size > 0)) | (size > most)


def unit_scaled(X: Tensor) -> tuple[Tensor, Tensor]:
    """``(sX, s)`` with a power of two ``s`` per matrix that puts its largest entry in [½, 1).

    Without it, norms and Gram matrices of entries like 1e-30 or 1e30 leave the range of float32.
    Scaling by a power of two is exact, so T(cM) = T(M) is kept. A zero matrix has s = 1.
    """
    s = unit_scale(X)
    return X * s, s


def unit_scale(X: Tensor) -> Tensor:
    """The ``s`` of :func:`unit_scaled`, for ``X`` of shape (..., m, n)."""
    return unit_scale_for(largest_entry(X), X.dtype)


def unit_scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The powers of two, all finite in ``dtype``, that put each entry of ``largest`` in [½, 1).

    The power for zero is one.
    """
    _, exponent = frexp(largest)
    limit = math.frexp(torch.finfo(dtype).max)[1] - 2
    return torch.ldexp(torch.ones_like(largest), -exponent.clamp(-limit, limit))


def frexp(x: Tensor) -> tuple[Tensor, Tensor]:
    """``torch.frexp(x)``, which torch does not have on Apple's GPUs, for x ≥ 0.

    There the mantissa of a number below 2⁻¹²⁶ is below ½.
    """
    if x.device.type != "mps":
        mantissa, exponent = torch.frexp(x)
        return mantissa, exponent
    exponent = (x.float().view(torch.int32) >> 23) - 126
    exponent = torch.where(x == 0, 0, exponent)
    return torch.ldexp(x, -exponent), exponent


def shrink_of(dtype: torch.dtype) -> float:
    """The factor on a norm of one that keeps it at most one when it is rounded to ``dtype``."""
    return 1 - torch.finfo(dtype).eps / 2 if dtype.itemsize < 4 else 1.0
