"""Polynomials of a symmetric matrix by repeated squaring.

Horner's rule takes a product for each power of G after the first. Completing squares takes fewer: every
P of degree four in G is e·S² + b·G + a·I with S = G² + pG + γI, which takes two products. A P of degree
eight that is a polynomial of degree four in S₁ = G² + pG takes three. All these are products of a
symmetric matrix with itself, of which a GPU computes half.

The squares also round better than powers do. A P of degree four that is 8 at zero and 1 at one may have
coefficients of ±200, whose sum cancels; e, S and b of the same P stay below 90, 0.3 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Polynomial", "Squaring", "square_products", "squarings"]

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
