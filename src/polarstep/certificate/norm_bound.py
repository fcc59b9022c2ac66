"""An upper bound on ‖T‖_op for any T, from products of T with 16 random columns.

Let T = UΣVᵀ have m rows and rank at most d₀, and W of m×16 independent normal entries.
For α > 0 and the Chebyshev polynomial C_D of an odd degree D the bound is made from

    P = V·C_D(Σ/α)·UᵀW.

Let u and v be the singular vectors of σ₁ = ‖T‖_op. Then vᵀP = C_D(σ₁/α)·uᵀW. As T does not depend on W,
the 16 entries of uᵀW are independent normal numbers, and for q = ½

    Pr(‖uᵀW‖ < q) ≤ (q²/2)⁸/8! = 1.5e-12,

which is the χ² distribution of 16 degrees without its factor e^(−x/2) ≤ 1. In all other cases
C_D(σ₁/α) ≤ p/q for any p ≥ ‖P‖_op. Since C_D(cosh θ) = cosh Dθ, this says

    ‖T‖_op ≤ α·cosh(arcosh(max(1, p/q))/D).

No α enters the probability, so it holds for all α at once, even if they are chosen after a look at TᵀW.
The least of the bounds over several α is taken. A bound is close if α is a little above σ₁: |C_D| ≤ 1 on
[0, 1], so that ‖P‖_op ≤ ‖UᵀW‖_op, about √d₀ + 4, and for D = 15 and d₀ = 768 the bound is at most
1.053·α. Directions with σ = 0 count for nothing, as C_D(0) = 0.

p is the Schatten norm (Σᵢ σᵢ(P)⁶⁴)^(1/64), by squarings of PᵀP, which has 16 rows. It is at most
16^(1/64) times ‖P‖_op, so that the bound is at most 0.3% larger than with eigenvalues, for which the CPU
would have to wait for the GPU.

The columns are S₀ = W, S₁ = TᵀW/α, and S_{j+1} = 2TS_j/α − S_{j−1} for odd j, with Tᵀ for even j.
P is S_D, after D products. The first five are powers of T, as α is not known yet: the largest Rayleigh
quotient of TTᵀ at the columns of (TTᵀ)²W gives α₀² ≤ σ₁². S₁, S₃, S₄ and S₅ for α₀ are sums of these
powers. P for another α = ρα₀ is a sum of the S_j for α₀, since C_D(x/ρ) is a sum of the C_j(x). For
ρ ≥ 1 its coefficients are at most 2 in size, so that little is lost to rounding.

The code keeps S_j for odd j and E_j = αS_j for even j, so that one product of two needs no scaling:

    E_{j+1} = 2TS_j − E_{j−1},    S_{j+1} = 2Tᵀ(E_j/α²) − S_{j−1}.

On a GPU the matrices are small, and the time goes by the number of operations.

A matrix with few rows needs none of this: ‖TTᵀ‖_op is the largest eigenvalue.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from polarstep import rng
from polarstep.numerics import frobenius_norm, has_float64, unit_scaled

__all__ = ["norm_bound"]

# Reading T takes most of the time on a CPU: a product with 8 columns takes as long as one with 16.
COLUMNS = 16
# On flat spectra of 768 rows degrees 11, 13, 15 and 17 give 1.10, 1.07, 1.05 and 1.04 times ‖T‖_op.
DEGREE = 15
# The q of the module's docstring.
LEAST = 0.5
# The coefficients of x, x³, x⁵ in C_1, C_3 and C_5, and of 1, x², x⁴ in C_4.
CHEBYSHEV = ((1, 0, 0), (-3, 4, 0), (5, -20, 16), (1, -8, 8))
# W and q are multiplied by this. Products of W with T or 1/α then stay in float32's range for ‖T‖_op
# from 1e-36 to 1e36. Beyond it the bound is larger, or NaN. Below about 1e-42 it is zero, as TᵀW is.
UNIT = 2.0**-6
# p is the Schatten norm of order 4·2^SQUARINGS.
SQUARINGS = 4
# α/α₀, in steps of 3%. The last is σ₁/α₀ or more unless all columns have next to nothing of u.
RATIOS = tuple(1.4 ** (i / 11) for i in range(12))
# At this size the eigenvalues of TTᵀ take a quarter of the time of 15 products on a CPU. At 192 rows
# both take about the same there; on a GPU neither was timed.
FEW_ROWS = 64
# ‖TᵀW‖_F is taken to be at least this, and α₀ at least 2⁻¹⁰ times as much. Then nothing overflows for a
# zero T. α₀ of any other T is about ‖TᵀW‖_F/(4·UNIT·√d₀) or more.
SMALLEST, SMALLEST_RATIO = 2.0**-116, 2.0**-10


@torch.no_grad()
def norm_bound(T: Tensor) -> Tensor:
    """A bound on ‖T‖_op of each matrix, at most a few percent above it, in T's precision.

    It holds with a probability of at least 1 − 1.5e-12 for each matrix that does not depend on W, and
    with certainty for matrices of at most ``FEW_ROWS`` rows or columns. W is the same in every call, so
    that equal matrices, stored alike, have equal bounds. A matrix that is not finite has the bound NaN.

    Args:
        T: matrices of shape ``(batch, m, n)``, in float32 or float64.

    >>> T = torch.linalg.qr(torch.randn(1, 256, 256, generator=rng.generator(0))).Q
    >>> 1 <= norm_bound(T).item() <= 1.05
    True
    """
    if not has_float64(T.device):
        return norm_bound(T.cpu()).to(T.device)
    if min(T.shape[-2:]) <= FEW_ROWS:
        X, s = unit_scaled(T)  # squares of 1e-30 or 1e30 would leave float32's range
        bound = _norm(X if T.shape[-2] > T.shape[-1] else X.mT) / s[:, 0, 0]
    else:
        X = T if T.is_contiguous() else T.mT.contiguous()  # no copy of a transposed view
        m = X.shape[-2]
        numbers = rng.generator("norm bound", m, device=T.device)
        W = torch.normal(
            0, UNIT, (COLUMNS, m), generator=numbers, device=T.device, dtype=torch.float32
        ).mT
        bound = _by_columns(X, W.to(T.dtype), LEAST * UNIT)
    return bound.to(T.dtype) * (1 + 64 * torch.finfo(T.dtype).eps)


def _by_columns(X: Tensor, W: Tensor, least: float) -> Tensor:
    """The least bound on ‖X‖_op over all α, provided that ‖uᵀW‖ ≥ ``least``, in float64."""
    fixed = _fixed(X.dtype, X.device, least)
    odd, alpha, size = _chebyshev(X, W, fixed)
    batch, _, columns, n = odd.shape
    P = (fixed.sums @ odd.flatten(2)).view(-1, columns, n)  # P/q, for every α
    # Each product is off by a few units of rounding, and what follows multiplies that by at most D.
    # Where α₀ is far below σ₁ the S_j are long, and most of their length cancels in P.
    room = torch.linalg.vector_norm(odd, dim=(-2, -1)) @ fixed.room
    tau = (_schatten(P).view(batch, -1) + room).clamp_min_(1)
    factor = tau.acosh_().div_(DEGREE).cosh_().mul_(fixed.ratios).amin(-1)
    return factor * alpha[:, 0, 0] * (size[:, 0, 0] > 0)


def _chebyshev(X: Tensor, W: Tensor, fixed: _Fixed) -> tuple[Tensor, Tensor, Tensor]:
    """S₁, S₃, … S_D as rows, (batch, (D + 1)/2, 16, n), and α₀ and ‖XᵀW‖_F in float64.

    Columns of X's height are multiplied from the left as rows. This reads X by rows as it is stored;
    the other order takes up to twice as long on a CPU. To scale X would take as long as a product, and
    squares of its norm leave float32's range. So columns are scaled, by factors in float64.
    """
    batch, m, n = X.shape
    columns = W.shape[-1]
    powers, odd = X.new_empty(batch, 3, columns, n), X.new_empty(batch, DEGREE // 2 + 1, columns, n)
    even, rows = X.new_empty(batch, 3, m, columns), X.new_empty(batch, columns, m)
    # With r = 1/‖XᵀW‖_F the odd powers are (rX)ᵀW, (rX)ᵀ(rX)(rX)ᵀW, …; the even ones are divided by r.
    first, *others = powers.unbind(1)
    torch.bmm(W.mT.expand_as(rows), X, out=first)
    size = frobenius_norm(first)
    some = size.clamp_min(SMALLEST)
    shrink = some.pow(-2)
    S = first.div_(some)
    E, *others_even = even.unbind(1)
    torch.mul(W, some, out=E)
    for E, after in zip(others_even, others, strict=True):
        torch.bmm(X, S.mT, out=E)
        torch.mul(E.mT, shrink, out=rows)
        S = torch.bmm(rows, X, out=after)
    # Not in float32: the squares of an even power may leave its range.
    longer = torch.linalg.vector_norm(S, dim=-1, dtype=torch.float64)
    length = torch.linalg.vector_norm(E, dim=-2, dtype=torch.float64)
    # α₀ = ‖rows‖/‖columns‖·‖XᵀW‖²_F. Columns of zeros have 0/0, which fmax passes over.
    ratio = torch.fmax(longer / length * some[:, 0], fixed.smallest).amax(-1)[:, None, None]
    alpha = ratio * some
    start = X.new_empty(batch, *fixed.start.shape)
    torch.mul(ratio.pow(fixed.exponents), fixed.start, out=start)
    torch.bmm(start[:, :3], powers.flatten(2), out=odd[:, :3].flatten(2))
    E = torch.bmm(start[:, 3:], even.flatten(2)).view(batch, m, columns)
    shrink = alpha.pow(-2)
    _, _, S, *others = odd.unbind(1)
    for after in others:
        torch.baddbmm(E, X, S.mT, beta=-1, alpha=2, out=E)
        torch.mul(E.mT, shrink, out=rows)
        S = torch.baddbmm(S, rows, X, beta=-1, alpha=2, out=after)
    return odd, alpha, size


class _Fixed(NamedTuple):
    """Constants on a device: made at every call, each would be copied there and waited for."""

    start: Tensor
    """``CHEBYSHEV``, in float64."""
    exponents: Tensor
    """The powers of α₀/‖XᵀW‖_F by which the entries of ``start`` are multiplied."""
    smallest: Tensor
    """``SMALLEST_RATIO``."""
    sums: Tensor
    """The coefficients of P/q in S₁, S₃, …, one row for each ratio."""
    room: Tensor
    """What ‖S₁‖_F, ‖S₃‖_F, … are multiplied by in the bound on rounding errors of P/q."""
    ratios: Tensor
    """``RATIOS``."""


@functools.cache
def _fixed(dtype: torch.dtype, device: torch.device, least: float) -> _Fixed:
    with torch.inference_mode(False):  # other tensors could not be used in a graph later on
        sums = torch.tensor(_coefficients(), dtype=torch.float64) / least
        start = torch.tensor(CHEBYSHEV, dtype=torch.float64)
        exponents = torch.tensor([(-1, -3, -5)] * 3 + [(1, -1, -3)], dtype=torch.float64)
        smallest = torch.tensor(SMALLEST_RATIO, dtype=torch.float64)
        ratios = torch.tensor(RATIOS, dtype=torch.float64)
        room = (DEGREE**2 * torch.finfo(dtype).eps * sums.abs().mT).to(dtype)
        tensors = (start, exponents, smallest, sums.to(dtype), room, ratios)
        return _Fixed(*(tensor.to(device) for tensor in tensors))


@functools.cache
def _coefficients() -> tuple[tuple[float, ...], ...]:
    """c_j in C_D(x/ρ) = Σ_j c_j·C_j(x) over odd j, one row for each ρ of ``RATIOS``."""
    # A sum over the zeros cos(t) of C_N is exact for these polynomials, as their degrees are below N.
    N = DEGREE + 1
    zeros = [math.pi * (i + 0.5) / N for i in range(N)]

    def coefficient(rho: float, j: int) -> float:
        values = (math.cos(DEGREE * math.acos(math.cos(t) / rho)) * math.cos(j * t) for t in zeros)
        return 2 / N * sum(values)

    return tuple(tuple(coefficient(rho, j) for j in range(1, N, 2)) for rho in RATIOS)


def _schatten(P: Tensor) -> Tensor:
    """(Σᵢ σᵢ(P)^k)^(1/k) ≥ ‖P‖_op of matrices with few rows, k = 4·2^``SQUARINGS``, in float64."""
    G = P @ P.mT
    trace = G.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)
    # A trace of one keeps the powers in range: the largest eigenvalue is between 1/16 and 1.
    G = G / trace.clamp_min(torch.finfo(G.dtype).tiny)[:, None, None]
    for _ in range(SQUARINGS):
        G = G @ G
    root = torch.linalg.vector_norm(G, dim=(-2, -1)).pow_(0.5 / 2**SQUARINGS)
    return root.mul_(trace.sqrt_())


def _norm(P: Tensor) -> Tensor:
    """‖P‖_op of matrices with few columns, in float64; NaN where P or its squares are not finite."""
    G = (P.mT @ P).double()
    finite = G.isfinite().all((-2, -1), keepdim=True)  # LAPACK refuses the whole batch otherwise
    largest = torch.linalg.eigvalsh(torch.where(finite, G, 0))[..., -1]
    return torch.where(finite[..., 0, 0], largest.clamp_min(0).sqrt(), torch.nan)
