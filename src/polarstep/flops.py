"""Cost formulas in the paper's convention.

A multiply and an add count as one FLOP each, so a product (m×k)(k×n) costs 2mkn; a square root or a
division counts as one. The symmetry of XXᵀ is not used. Drawing random numbers, comparisons and
moving memory are free. Everything here is integer arithmetic on shapes.

Notation as in the paper: M is m×n, d₀ = min(m, n), d₁ = max(m, n), ℓ = s + p is the width of the
sketch, h the number of power iterations and q the number of polynomial steps.
"""

from __future__ import annotations

from polarstep.numerics import norm_products

__all__ = [
    "deflation_parts",
    "gaussian_sketch",
    "gram_newton_schulz",
    "kaczmarz_sketch",
    "low_rank",
    "low_rank_parts",
    "matmul",
    "newton_schulz",
    "normalization",
    "power_products",
    "qr",
]


def matmul(m: int, k: int, n: int) -> int:
    """A product (m×k)(k×n): 2mkn."""
    return 2 * m * k * n


def normalization(m: int, n: int) -> int:
    """Dividing an m×n matrix by its Frobenius norm: a square, an add and a division per entry."""
    return 3 * m * n


def newton_schulz(
    m: int, n: int, steps: int, degree: int = 5, *, products: int | None = None
) -> int:
    """``steps`` odd polynomials of the given degree, applied to the matrix itself.

    The quintic costs q(4d₁d₀² + 2d₀³) (Section 2.2 of the paper): XXᵀ, its square, and their
    combination times X. In general p(X) = r(XXᵀ)X with r of degree (degree − 1)/2. ``products`` is the
    number of d₀×d₀ products for r. ``None`` stands for Horner's rule, where each further degree of r is
    one more product. Repeated squaring needs fewer: two for degree 9, and three for a polynomial of
    degree 17 like ``"flat"`` (:mod:`polarstep.numerics`). The polynomial's d₀² and d₀d₁
    additions are not counted, as in the paper.
    """
    d0, d1 = min(m, n), max(m, n)
    return steps * (4 * d1 * d0**2 + 2 * d0**3 * _products(degree, products))


def gram_newton_schulz(
    m: int, n: int, steps: int, degree: int = 5, *, products: int | None = None
) -> int:
    """The same polynomials iterated on the Gram matrix and applied to the matrix once.

    XXᵀ and the final product cost 2d₁d₀² each, whatever the number of steps. A step on the d₀×d₀
    Gram matrix R forms r(R) by ``products`` products (``None``: Horner's rule), multiplies it into the
    accumulated factor (not in the first step) and updates R ← r(R)²R (not in the last step).
    """
    if steps == 0:
        return 0
    d0, d1 = min(m, n), max(m, n)
    polynomials = steps * _products(degree, products)
    accumulate, update = steps - 1, 2 * (steps - 1)
    return 4 * d1 * d0**2 + 2 * d0**3 * (polynomials + accumulate + update)


def qr(m: int, ell: int) -> int:
    """Householder QR of an m×ℓ matrix, R alone: 2mℓ² − ⅔k³ with k = min(m, ℓ), in whole FLOPs.

    For ℓ ≤ m this is the paper's 2mℓ² − ⅔ℓ³. For ℓ > m it agrees with the paper's Table 2, where
    64-row matrices are sketched with ℓ = 138 (see docs/flops.md).
    """
    return 2 * m * ell**2 - 2 * min(m, ell) ** 3 // 3


def gaussian_sketch(m: int, n: int, ell: int) -> int:
    """MΩ with a dense n×ℓ matrix Ω: 2mnℓ. Drawing Ω is not counted."""
    return matmul(m, n, ell)


def kaczmarz_sketch(m: int, n: int, ell: int) -> int:
    """MΩ as ℓ rescaled columns of M: 2mn for the squared column norms, mℓ for the rescaling."""
    return 2 * m * n + m * ell


def power_products(power: float) -> int:
    """How many products with M or Mᵀ turn MΩ into (MMᵀ)ʰMΩ: 2h.

    h may be a half-integer: the half iteration ends on the other side of the matrix.
    """
    products = 2 * power
    if products < 0 or products != int(products):
        raise ValueError(f"power={power!r}: expected 0, ½, 1, 1½, …; a product by M or Mᵀ counts ½")
    return int(products)


def low_rank_parts(
    m: int,
    n: int,
    ell: int,
    power: float,
    inner_flops: int,
    *,
    sketch_flops: int | None = None,
    orth_flops: int | None = None,
) -> dict[str, int]:
    """Algorithm 1 on an m×n matrix, part by part; :func:`low_rank` is their sum.

    Forming Y = (MMᵀ)ʰMΩ costs 2mnℓ(2h + 1). Q has k = min(m, ℓ) columns, so that B = QᵀM and the
    lift QZ cost 2mnk each. ``inner_flops`` is the cost of the inner map on the k×n matrix B.
    ``sketch_flops`` is the cost of MΩ (default: a dense product; for Algorithm 2 pass
    :func:`kaczmarz_sketch`). ``orth_flops`` is the cost of all orthonormalizations (default: one
    QR).
    """
    k = min(m, ell)
    return {
        "sketch MΩ": gaussian_sketch(m, n, ell) if sketch_flops is None else sketch_flops,
        "power iteration": power_products(power) * matmul(m, n, ell),
        "orthonormal basis": qr(m, ell) if orth_flops is None else orth_flops,
        "projection QᵀM": matmul(k, m, n),
        "polynomial steps": inner_flops,
        "lift QZ": matmul(m, k, n),
    }


def low_rank(
    m: int,
    n: int,
    ell: int,
    power: float,
    inner_flops: int,
    *,
    sketch_flops: int | None = None,
    orth_flops: int | None = None,
) -> int:
    """Algorithm 1 on an m×n matrix: (4h + 6)mnℓ for its products, one QR, and the inner map.

    The paper's example, 40 times cheaper than Newton–Schulz in full space:

    >>> d, ell, q = 4096, 256, 5
    >>> newton_schulz(d, d, q) / low_rank(d, d, ell, 1, newton_schulz(ell, d, q))
    42.06...
    """
    parts = low_rank_parts(
        m, n, ell, power, inner_flops, sketch_flops=sketch_flops, orth_flops=orth_flops
    )
    return sum(parts.values())


def deflation_parts(m: int, n: int, steps_flops: int) -> dict[str, int]:
    """What a deflated map costs beyond the low-rank map that is its head, part by part.

    ``steps_flops`` is the cost of the polynomial steps on the d₀×d₁ matrix X₀. The norm of X₀ takes five
    or seven products by X₀X₀ᵀ with 16 columns. X₀ = M/δ + Q(Z − B/δ) has the product of the head's QZ.
    """
    d0 = min(m, n)
    return {
        "norm of X₀": norm_products(d0) * matmul(d0, d0, 16),
        "polynomial steps on X₀": steps_flops,
    }


def _products(degree: int, products: int | None) -> int:
    """How many d₀×d₀ products a polynomial takes: as given, or by Horner's rule."""
    if degree < 3 or degree % 2 == 0:
        raise ValueError(
            f"degree={degree}: expected an odd degree ≥ 3 (3: cubic, 5: quintic, 7, …)"
        )
    return (degree - 3) // 2 if products is None else products
