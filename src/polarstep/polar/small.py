"""Matrices of few rows on a GPU: the sketches of a low-rank map, and small layers.

Their products take a few microseconds each, so a pass over memory counts as much as a step. Two are
saved. ‖Y‖_F² is the trace of YYᵀ, which the first step forms anyway: its polynomial is applied to
YYᵀ/‖Y‖_F² and divided by ‖Y‖_F, and Y itself is never normalized. And where n is well above m, the
other steps run on the Gram matrix in float16 (:mod:`polarstep.polar.gram`), as singular values are on
the scale of one by then: the last product of the first step leaves float16, and that of the last step
bfloat16 again, which is what the other factor of a low-rank map is in.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.matrix import product_like
from polarstep.polar import gram
from polarstep.polar.coefficients import Polynomial
from polarstep.polar.iterate import iterate
from polarstep.polar.symmetric import symmetric_product

__all__ = ["FEWER_ROWS_THAN", "GRAM_FROM", "factored", "in_halves", "small_polar", "suits"]

# Larger ones are worth their pass, and their symmetric products have a kernel without this option.
FEWER_ROWS_THAN = 512
# n/m from which steps on the m×m Gram matrix are the cheaper ones.
GRAM_FROM = 3


def suits(Y: Tensor, polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether :func:`small_polar` can do it."""
    return (
        Y.dtype == torch.bfloat16
        and kernels.available(Y.device)
        and Y.shape[-2] < FEWER_ROWS_THAN
        and len(polynomials) > 0
        and len(polynomials[0]) <= 3
    )


def small_polar(Y: Tensor, polynomials: tuple[Polynomial, ...], *, by_gram: bool = True) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of Y/‖Y‖_F, for ``Y`` of shape (batch, m, n), m ≤ n.

    In the precision of ``Y``; by the Gram form where it is cheaper, if ``by_gram`` allows it. Zero where
    entries of Y are so small or so large, beyond 1e-18 or 1e18, that their squares leave float32.
    """
    from polarstep.kernels.product import product

    first, rest = polynomials[0], polynomials[1:]
    G = Y @ Y.mT
    by_gram &= len(rest) > 1 and Y.shape[-1] >= GRAM_FROM * Y.shape[-2]
    by_gram = by_gram and gram.fits_float16(polynomials)
    if not by_gram and gram.one_launch(Y, (first,)):
        return iterate(gram.polynomial_times(G, Y, first, by_trace=True), rest)
    H = _first_polynomial(G, first)
    if by_gram:
        X = product(H, Y, out_dtype=torch.float16)
        return gram.apply_polynomials(X, rest, out_dtype=Y.dtype)
    return iterate(product_like(Y, H, Y), rest)


def factored(
    Y: Tensor,
    polynomials: tuple[Polynomial, ...],
    times: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """``W`` and ``X`` with φ_q∘…∘φ₁(Y/‖Y‖_F) = WX: X is the first step, W all others, in one go.

    Both are float16 where ``Y`` is bfloat16. ``times(H, Y)`` makes X in place of the product HY, for one
    who wants more of it.
    """
    from polarstep.kernels.product import product

    first, rest = polynomials[0], polynomials[1:]
    dtype = in_halves(Y.dtype)
    G = Y @ Y.mT
    if times is not None:
        X = times(_first_polynomial(G, first), Y)
    elif gram.one_launch(Y, (first,)):
        X = gram.polynomial_times(G, Y, first, by_trace=True, out_dtype=dtype)
    else:
        X = product(_first_polynomial(G, first), Y, out_dtype=dtype)
    return gram.accumulated(symmetric_product(X, X), rest), X


def in_halves(dtype: torch.dtype) -> torch.dtype:
    """What singular values on the scale of one are held in, where others are in ``dtype``."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


def _first_polynomial(G: Tensor, polynomial: Polynomial) -> Tensor:
    """``P(G/t)/√t`` with t = tr G = ‖Y‖_F², so that its product with Y is the first step of Y/‖Y‖_F."""
    from polarstep.kernels.product import product

    a, b, c = (*polynomial, 0.0)[:3]
    return product(G, G, alpha=c, D=G, beta=b, identity=a, symmetric=True, by_trace=True)
