"""An upper bound on ‖T‖_op for any T, from products of T with 16 random columns.

Let T = UΣVᵀ have d₀ rows and at least as many columns, and W of d₀×16 independent normal entries.
For α > 0 and the Chebyshev polynomial C_D of an odd degree D the bound is made from

    P = V·C_D(Σ/α)·UᵀW.

Let u and v be the singular vectors of σ₁ = ‖T‖_op. Then vᵀP = C_D(σ₁/α)·uᵀW. As T does not depend on W,
the 16 entries of uᵀW are independent normal numbers, and for q = ½

    Pr(‖uᵀW‖ < q) ≤ (q²/2)⁸/8! = 1.5e-12,

which is the χ² distribution of 16 degrees without its factor e^(−x/2) ≤ 1. In all other cases
C_D(σ₁/α) ≤ ‖P‖_op/q. Since C_D(cosh θ) = cosh Dθ, this says

    ‖T‖_op ≤ α·cosh(arcosh(max(1, ‖P‖_op/q))/D).

No α enters the probability, so it holds for all α at once, even if they are chosen after a look at TᵀW.
The least of the bounds over several α is taken. It is close where α is a little above σ₁: |C_D| ≤ 1 on
[0, 1], so that ‖P‖_op ≤ ‖W‖_op, about √d₀ + 4, and for D = 15 and d₀ = 768 the bound is at most 1.053·α.
Directions with σ = 0 count for nothing, as C_D(0) = 0.

The columns are S₀ = W, S₁ = TᵀW/α, and S_{j+1} = 2TS_j/α − S_{j−1} for odd j, with Tᵀ for even j.
P is S_D, after D products. The first five are powers of T, as α is not known yet: the largest Rayleigh
quotient of TTᵀ at the columns of (TTᵀ)²W gives α₀² ≤ σ₁². S₁ to S₅ for α₀ are sums of these powers. P
for another α = ρα₀ is a sum of the S_j for α₀, since C_D(x/ρ) is a sum of the C_j(x). For ρ ≥ 1 its
coefficients are at most 2 in size, so that little is lost to rounding.

A matrix with few rows needs none of this: ‖TTᵀ‖_op is the largest eigenvalue.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from polarstep import rng
from polarstep.products.sizes import frobenius_norm, unit_scale_for, unit_scaled

__all__ = ["norm_bound"]

# Reading T takes most of the time on a CPU: a product with 8 columns takes as long as one with 16.
COLUMNS = 16
# On flat spectra of 768 rows degrees 11, 13, 15 and 17 give 1.10, 1.07, 1.05 and 1.04 times ‖T‖_op.
DEGREE = 15
# The q above.
LEAST = 0.5
# C_0 to C_5: the coefficients of 1, x, x², …
CHEBYSHEV = ((1,), (0, 1), (-1, 0, 2), (0, -3, 0, 4), (1, 0, -8, 0, 8), (0, 5, 0, -20, 0, 16))
START = len(CHEBYSHEV) - 1
# α/α₀, in steps of 3%. The last is σ₁/α₀ or more unless all columns have next to nothing of u.
RATIOS = tuple(1.4 ** (i / 11) for i in range(12))
# At this size the eigenvalues of TTᵀ take a quarter of the time of 15 products on a CPU. At 192 rows
# both take about the same there; on a GPU neither was timed.
FEW_ROWS = 64


def norm_bound(T: Tensor) -> Tensor:
    """A bound on ‖T‖_op of each matrix, at most a few percent above it, in T's precision.

    It holds with a probability of at least 1 − 1.5e-12 for each matrix that does not depend on W, and
    with certainty for one of at most ``FEW_ROWS`` rows or columns. W is the same in every call, so that
    equal matrices have equal bounds. The bound of a matrix that is not finite is NaN.

    Args:
        T: matrices of shape ``(batch, m, n)``, in float32 or float64.

    >>> T = torch.linalg.qr(torch.randn(1, 256, 256, generator=rng.generator(0))).Q
    >>> 1 <= norm_bound(T).item() <= 1.05
    True
    """
    X = T if T.shape[-2] <= T.shape[-1] else T.mT
    d0 = X.shape[-2]
    if d0 <= FEW_ROWS:
        X, s = unit_scaled(X)  # squares of 1e-30 or 1e30 would leave float32's range
        bound = _norm(X.mT) / s[:, 0, 0]
    else:
        numbers = rng.generator("norm bound", d0, device=T.device)
        W = torch.randn(d0, COLUMNS, generator=numbers, device=T.device, dtype=torch.float32)
        bound = _by_columns(X, W.to(T.dtype), LEAST)
    return bound.to(T.dtype) * (1 + 64 * torch.finfo(T.dtype).eps)


def _by_columns(X: Tensor, W: Tensor, least: float) -> Tensor:
    """The least bound on ‖X‖_op over all α, provided that ‖uᵀW‖ ≥ ``least``, in float64."""
    powers, r = _powers(X, W)
    squares = [Y.square().sum(-2) for Y in powers[-2:]]
    quotient = torch.where(squares[0] == 0, 0, squares[1] / squares[0]).amax(-1).sqrt()
    zero = quotient == 0  # then so are all powers
    alpha = torch.where(zero, 1, quotient)[:, None, None]
    S = [
        sum(
            (c * powers[i] / alpha**i for i, c in enumerate(row) if c),
            start=torch.zeros_like(alpha),
        )
        for row in CHEBYSHEV
    ]
    for j in range(START, DEGREE):
        S.append(2 * _turn(X, S[j] * (r / alpha), j) - S[j - 1])
    odd = torch.stack(S[1::2], 1)  # (batch, (D + 1)/2, n, columns)
    C = torch.tensor(_coefficients(), dtype=X.dtype).to(X.device)
    P = (C @ odd.flatten(2)).reshape(len(X), len(C), *odd.shape[2:])
    # Each product is off by a few units of rounding, and what follows multiplies that by at most D.
    # Where α₀ is far below σ₁ the S_j are long, and most of their length cancels in P.
    sizes = torch.linalg.vector_norm(odd, dim=(-2, -1))
    room = DEGREE**2 * torch.finfo(X.dtype).eps * (sizes @ C.abs().mT)
    tau = ((_norm(P) + room) / least).clamp_min(1)
    ratios = torch.tensor(RATIOS, dtype=torch.float64).to(X.device)
    factor = (ratios * torch.cosh(torch.acosh(tau) / DEGREE)).amin(-1)
    return torch.where(zero, 0, factor * alpha[:, 0, 0] / r[:, 0, 0].double())


def _powers(X: Tensor, W: Tensor) -> tuple[list[Tensor], Tensor]:
    """W, (rX)ᵀW, (rX)(rX)ᵀW, … and a power of two r with which they stay within float32's range.

    r is multiplied into the columns, as to scale X would take as long as a product.
    """
    W = W.expand(len(X), -1, -1)
    # ‖XᵀW‖_F is about √16·‖X‖_F, so that 8‖Y‖_F is about the root mean square of X's singular values.
    small = 1 / (8 * math.sqrt(W.shape[-2] * W.shape[-1]))
    Y = _turn(X, small * W, 0)
    r = unit_scale_for(8 * frobenius_norm(Y).to(X.dtype), X.dtype)
    powers = [W, (Y * r) / small]
    for j in range(1, START):
        powers.append(_turn(X, powers[j] * r, j))
    return powers, r


def _turn(X: Tensor, S: Tensor, j: int) -> Tensor:
    """XᵀS for even j, XS for odd j: a product that reads X by rows as it is stored.

    The other order of the two factors takes twice as long on a CPU.
    """
    A = X if j % 2 else X.mT
    return A @ S if A.is_contiguous() else (S.mT.contiguous() @ A.mT).mT


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


def _norm(P: Tensor) -> Tensor:
    """‖P‖_op of matrices with few columns, in float64; NaN where P or its squares are not finite."""
    G = (P.mT @ P).double()
    finite = G.isfinite().all((-2, -1), keepdim=True)  # LAPACK refuses the whole batch otherwise
    largest = torch.linalg.eigvalsh(torch.where(finite, G, 0))[..., -1]
    return torch.where(finite[..., 0, 0], largest.clamp_min(0).sqrt(), torch.nan)
