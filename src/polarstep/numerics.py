"""What maps, operations and kernels share: float64, norms and scales, squarings, vectors to start from.

**float64 where a device has it.** Apple's GPUs have none, and some of Intel's. Sums and small matrices
that a step computes in float64 are in float32 there, of numbers that are scaled to unit size first.
Measurements, which are rare, are computed on the CPU.

**Norms and largest entries**, and scales that keep squares within float32's range.

**Polynomials of a symmetric matrix by repeated squaring** (:func:`squarings`). Horner's rule takes a
product for each power of G after the first. Completing squares takes fewer: every P of degree four in G
is e·S² + b·G + a·I with S = G² + pG + γI, which takes two products. A P of degree eight that is a
polynomial of degree four in S₁ = G² + pG takes three. All these are products of a symmetric matrix with
itself, of which a GPU computes half. The squares also round better than powers do. A P of degree four
that is 8 at zero and 1 at one may have coefficients of ±200, whose sum cancels; e, S and b of the same P
stay below 90, 0.3 and 1.

**The vectors from which norms are estimated** (:func:`start_vectors`, :func:`signs`): sixteen, without a
pattern, the same at every call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep.context import constant

__all__ = [
    "MOST_ENERGY",
    "SIGNS",
    "Polynomial",
    "Squaring",
    "fitting",
    "frexp",
    "frobenius_norm",
    "has_float64",
    "in_float64",
    "largest_entry",
    "leaves_range",
    "norm_products",
    "plain_product",
    "product_like",
    "shrink_of",
    "signs",
    "square_products",
    "squarings",
    "start_vectors",
    "unit_scale",
    "unit_scale_for",
    "unit_scaled",
    "widest",
]


# B = QᵀM has at most the energy of M. With this much more, columns of Q are too long by a tenth, and
# M − DB holds so much of the leading directions that no bound on X₀ is true.
MOST_ENERGY = 1.25
# Entries whose squares a CPU adds up at a time, on one core.
PIECE = 2**15
# Sizes of matrices, by precision, that can be squared, summed and multiplied without loss.
_SAFE = {torch.float64: (2.0**-480, 2.0**480)}
_SAFE_IN_FLOAT32 = (2.0**-90, 2.0**110)


def has_float64(device: torch.device) -> bool:
    """Whether tensors on ``device`` can be in float64."""
    if device.type == "xpu":
        return _of_intel(device.index)
    return device.type != "mps"


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device without it."""
    return torch.float64 if has_float64(device) else torch.float32


def in_float64(X: Tensor) -> Tensor:
    """``X`` in float64: on its device, or on the CPU if its device has no float64."""
    return (X if has_float64(X.device) else X.cpu()).to(torch.float64)


def fitting(X: Tensor, device: torch.device) -> Tensor:
    """``X`` on ``device``, in float32 if it is in float64 and the device has none."""
    narrower = X.dtype == torch.float64 and not has_float64(device)
    return (X.float() if narrower else X).to(device)


_INTELS: dict[int | None, bool] = {}


@constant
def _of_intel(index: int | None) -> bool:
    if index not in _INTELS:
        _INTELS[index] = bool(torch.xpu.get_device_capability(index).get("has_fp64", True))
    return _INTELS[index]


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


Polynomial = tuple[float, ...]
"""(a, b, c, …), meaning φ(x) = a x + b x³ + c x⁵ + …, or P(y) = a + b y + c y² + … in φ(x) = x·P(x²)."""

# A P of degree eight counts as nested if its coefficients are off by at most this part of the largest.
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Squaring:
    """``S_{k+1} = square·S_k² + plus·S_earlier + identity·I``, where S₀ is G."""

    square: float
    plus: float
    identity: float
    earlier: int


def squarings(polynomial: Polynomial) -> tuple[Squaring, ...] | None:
    """The squarings from G to ``P(G) = a₀I + a₁G + a₂G² + …``; ``None`` where there are none for P.

    >>> len(squarings((3.0, -4.0, 2.0))), len(squarings((8.0, -56.0, 167.0, -202.0, 85.0)))
    (1, 2)
    >>> squarings((1.0, 2.0, 3.0, 4.0)) is None
    True
    """
    degree = len(polynomial) - 1
    if degree < 1 or polynomial[-1] == 0:
        return None
    if degree == 2:
        a, b, c = polynomial
        return (Squaring(c, b, a, 0),)
    if degree == 4:
        return _of_degree_four(polynomial, 0)
    if degree == 8:
        half = polynomial[7] / (4 * polynomial[8])
        outer = _in_powers_of(half, polynomial)
        return None if outer is None else (Squaring(1.0, half, 0.0, 0), *_of_degree_four(outer, 1))
    return None


def square_products(polynomial: Polynomial) -> int:
    """How many products of square matrices ``P(G)`` takes: by squarings, else by Horner's rule."""
    chain = squarings(polynomial)
    return len(polynomial) - 2 if chain is None else len(chain)


def _of_degree_four(q: tuple[float, ...], of: int) -> tuple[Squaring, Squaring]:
    """q₀ + q₁S + … + q₄S⁴ as q₄(S² + pS + γ)² + b·S + a, where S is S_of."""
    p = q[3] / (2 * q[4])
    gamma = (q[2] / q[4] - p * p) / 2
    last = Squaring(q[4], q[1] - 2 * q[4] * p * gamma, q[0] - q[4] * gamma * gamma, of)
    return Squaring(1.0, p, gamma, of), last


def _in_powers_of(p: float, polynomial: Polynomial) -> tuple[float, ...] | None:
    """q₀, …, q₄ with P(y) = Σqₖ(y² + py)ᵏ; ``None`` if P has no such form."""
    left, outer = list(polynomial), [0.0] * 5
    for k in (4, 3, 2, 1, 0):
        outer[k] = left[2 * k]
        power = [1.0]  # (y² + py)ᵏ, lowest coefficient first
        for _ in range(k):
            longer = [0.0] * (len(power) + 2)
            for i, c in enumerate(power):
                longer[i + 1] += p * c
                longer[i + 2] += c
            power = longer
        for i, c in enumerate(power):
            left[i] -= outer[k] * c
    size = max(abs(c) for c in polynomial)
    return tuple(outer) if max(map(abs, left)) <= TOLERANCE * size else None


# The columns of signs() and start_vectors(): the least that a GPU multiplies at full rate.
SIGNS = 16


def start_vectors(rows: int, device: torch.device) -> Tensor:
    """(1, rows, 16) entries between −1 and 1 without a pattern, the same at every call.

    Entries of ±1 would not do. Among 768 rows of 16 signs some are equal, and some opposite. The columns
    are then orthogonal to the difference of the two rows, or to their sum, which may well be what a
    gradient moves: two neurons that are copies of one another move in this way.
    """
    bits = _hashed(rows * SIGNS, device) >> 8
    return (bits.to(torch.float32) * 2.0**-23 - 1).view(1, rows, SIGNS)


def norm_products(rows: int) -> int:
    """How many products with G = XXᵀ of so many rows the estimate of ‖G‖_op takes: 5, or 7 for many.

    A start vector holds about 1/rows of a leading direction that it knows nothing of, and every product
    raises this part. :mod:`polarstep.maps.deflated` has the bound.
    """
    return 5 if rows <= 1024 else 7


def signs(rows: int, device: torch.device) -> Tensor:
    """(1, rows, 16) entries of ±1 without a pattern, the same at every call."""
    return ((_hashed(rows * SIGNS, device) & 1) * 2 - 1).view(1, rows, SIGNS)


def _hashed(count: int, device: torch.device) -> Tensor:
    """Murmur3's finalizer of 0, 1, 2, …, which has 32 bits; a kernel computes it as well."""
    x = torch.arange(count, device=device)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ (x >> shift)) * factor & 0xFFFFFFFF
    return x


def product_like(X: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """``AB`` in the memory layout of ``X``, which has the same shape.

    Tall matrices come as transposed views, and results made from them should be transposed views, too.
    Adding a result to its parameter takes a CPU ten times as long if their memory layouts differ.
    """
    return (B.mT @ A.mT).mT if X.mT.is_contiguous() else A @ B


def plain_product(A: Tensor, B: Tensor, plus: Tensor | None, alpha: float, beta: float) -> Tensor:
    """``alpha·AB + beta·plus``, without use of symmetry."""
    if plus is None:
        C = torch.bmm(A, B)  # what A @ B calls, without its views
        return C if alpha == 1 else alpha * C
    return torch.baddbmm(plus, A, B, beta=beta, alpha=alpha)
