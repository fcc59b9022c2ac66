"""One polynomial step on a flattened matrix with all products in eight bits.

A deflated step (:mod:`polarstep.maps.deflated`) is T = s·P(s²G)·X₀ with G = X₀X₀ᵀ. Its matrices X₀, G,
the squares S of G, and P can all be float8 numbers with three bits of mantissa. That halves the time of
their products and the bytes between them. Each matrix is stored times a power of two, its unit, so that
its entries lie in the middle of the format's range, [2⁻⁶, 448].

**What rounding does.** X₀ is rounded once, and the X₀ that G is made of is also the one that P is
multiplied with. So T is a polynomial of a matrix near X₀. Rounding G, S and P by 3% an entry is a random
error in P(s²G). On random matrices it lifts ν from 0.14 to 0.30 (768×768) and 0.18 (768×3072), and
changes γ by 0.01.

**What cannot happen.** Numbers above 448 are stored as 448. In X₀ this only makes another X₀. In G it
would hide a leading direction that the head has missed. But no entry of G is above its largest diagonal
entry. So a diagonal entry of 448 shows that G was cut off, and s then comes from the bound
‖X₀‖²_op ≤ ‖X₀‖²_F ≤ ℓ + (m − ℓ)/factor². The step of such a matrix is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polarstep.context import constant
from polarstep.kernels.descriptors import describable
from polarstep.kernels.flat_step_norms import lifted_norm, scale_to_one
from polarstep.kernels.float8 import flattened
from polarstep.kernels.product import DESCRIPTORS_FROM, FLOAT8, product
from polarstep.numerics import Polynomial, Squaring, squarings
from polarstep.ops.lazy import HeadPlusRest, RowProduct

__all__ = ["flat_step", "suits", "units"]


# Units. Entries of X₀ are near √(0.4/n), those of G near 0.4 on the diagonal.
UNIT_OF_X, UNIT_OF_G = 128.0, 64.0
# The largest number of the format.
LARGEST = torch.finfo(FLOAT8).max
# Eigenvalues of s²G reach from below zero, by rounding, to above one, where s is too large.
LOWEST, HIGHEST = -0.05, 1.4
# Where G was cut off and does not show its norm, ‖sX₀‖_op is at most this. P is near P(0) there, and
# ‖T‖_op ≤ 1 for "flat", for which P(0) = 10.
SAFE = 0.1

_UNITS: dict[Polynomial, tuple[float, ...]] = {}


def suits(A: Tensor, polynomial: Polynomial) -> bool:
    """Whether a step on ``A`` (batch, m, n) can run in eight bits, and gains from it.

    It takes a polynomial by squarings, a GPU with tensor descriptors, and rows and columns that are
    multiples of 16. Matrices of few rows gain nothing.
    """
    m, n = A.shape[-2:]
    return (
        A.dtype.itemsize == 2
        and m >= DESCRIPTORS_FROM
        and m % 16 == 0
        and n % 16 == 0
        and squarings(polynomial) is not None
        and describable(A if A.is_contiguous() else A.mT)
    )


@constant
def units(polynomial: Polynomial) -> tuple[float, ...]:
    """A power of two for each square of ``polynomial``, with which its eigenvalues fit the format."""
    if polynomial not in _UNITS:
        if len(_UNITS) >= 256:
            _UNITS.clear()
        chain = squarings(polynomial)
        assert chain is not None
        values = [torch.linspace(LOWEST, HIGHEST, 1025, dtype=torch.float64, device="cpu")]
        for each in chain:
            values.append(
                each.square * values[-1] ** 2 + each.plus * values[each.earlier] + each.identity
            )
        largest = [float(value.abs().max()) for value in values[1:]]
        _UNITS[polynomial] = tuple(2.0 ** math.floor(math.log2(LARGEST / x)) for x in largest)
    return _UNITS[polynomial]


def flat_step(
    flat: HeadPlusRest, polynomial: Polynomial, margin: float, most: float
) -> tuple[RowProduct, Callable[[], Tensor]]:
    """T = s·P(s²G)·X₀ for the X₀ of ``flat``, not multiplied out, and ‖T‖²_F.

    s = 1/(``margin``·√λ) for an estimate λ of ‖G‖_op, and ``most`` bounds ‖X₀‖²_F. ‖T‖²_F is a function
    to call, since few steps need it.
    """
    X, Xt = flattened(flat.A, flat.L, flat.R, flat.inverse, UNIT_OF_X)
    G = product(X, X.mT, alpha=UNIT_OF_G / UNIT_OF_X**2, symmetric=True)
    s = scale_to_one(G, margin, full_at=LARGEST, otherwise=SAFE / math.sqrt(UNIT_OF_G * most))
    chain = squarings(polynomial)
    assert chain is not None
    P, unit = _squared(G, s, chain, units(polynomial))
    # s²G has no unit, so neither has this s·X₀: it is √64 times X₀'s own.
    alpha = math.sqrt(UNIT_OF_G) / (unit * UNIT_OF_X)
    T = RowProduct(P, Xt, s, alpha)
    return T, lambda: lifted_norm(P, G, s, 1 / unit)


def _squared(
    G: Tensor, s: Tensor, chain: tuple[Squaring, ...], stored: tuple[float, ...]
) -> tuple[Tensor, float]:
    """P(s²G) in eight bits, and its unit."""
    S, unit = [G], [1.0]
    for k, (each, own) in enumerate(zip(chain, stored, strict=True)):
        last = S[-1]
        P = product(
            last, last.mT, alpha=each.square * own / unit[-1] ** 2,
            D=S[each.earlier], beta=each.plus * own / unit[each.earlier],
            identity=each.identity * own, symmetric=True,
            scale=s, powers=(4 * (k == 0), 2 * (each.earlier == 0), 0),
        )  # fmt: skip
        S.append(P)
        unit.append(own)
    return S[-1], unit[-1]
