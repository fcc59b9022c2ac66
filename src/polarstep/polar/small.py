"""Matrices of few rows on a GPU: the sketches of a low-rank map, and small layers.

Their products take a few microseconds each, so a pass over memory counts as much as a step. Two
passes are saved. ‖Y‖_F² is the trace of YYᵀ, which the first step forms anyway, so Y itself is never
normalized (:meth:`polarstep.products.Products.first_step`). And where n is well above m, the other
steps run on the Gram matrix in float16 (:mod:`polarstep.polar.gram`), as singular values are near
one by then. The last product of the first step rounds its result to float16. The very last product
rounds its result to bfloat16 again, the precision of a low-rank map's other factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep import products
from polarstep.polar import gram
from polarstep.polar.coefficients import Polynomial

__all__ = ["GRAM_FROM", "small_polar", "suits_small"]

# The ratio n/m from which steps on the m×m Gram matrix are cheaper.
GRAM_FROM = 3


def suits_small(Y: Tensor, polynomials: tuple[Polynomial, ...]) -> bool:
    """Whether :func:`small_polar` can take ``Y`` and is faster."""
    ops = products.of(Y.device)
    return ops.fuses_first_step(Y.shape[-2], Y.dtype, polynomials[0])


def small_polar(Y: Tensor, polynomials: tuple[Polynomial, ...], *, by_gram: bool = True) -> Tensor:
    """φ_q∘…∘φ₁ on the singular values of Y/‖Y‖_F, for ``Y`` of shape (batch, m, n), m ≤ n.

    The result has the precision of ``Y``. The Gram form is used where it is cheaper, if ``by_gram``
    allows it. The result is zero where entries of Y are below 1e-18 or above 1e18, as their squares
    leave float32's range.
    """
    first, rest = polynomials[0], polynomials[1:]
    ops = products.of(Y.device)
    by_gram &= len(rest) > 1 and Y.shape[-1] >= GRAM_FROM * Y.shape[-2]
    if by_gram and gram.fits_float16(polynomials):
        X = ops.first_step(Y, first, torch.float16)
        return gram.apply_polynomials(X, rest, out_dtype=Y.dtype)
    return ops.iterate(ops.first_step(Y, first, Y.dtype), rest)
