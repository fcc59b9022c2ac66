"""One polynomial step on a flattened matrix with products in bfloat16, for CPUs with matrix tiles.

A deflated step (:mod:`polarstep.polar.deflation`) is T = s·P(s²G)·X₀ with G = X₀X₀ᵀ. Tiles multiply
bfloat16 numbers five to eight times as fast as a CPU multiplies float32, and add up in float32. X₀
itself is made in float32: M/δ − Q(B/δ) cancels the leading directions, which may be a hundred times as
long as the rest. Then X₀, G, the squares S of G, and P are rounded.

**What rounding does.** The X₀ that G is made of is also the one that P is multiplied with, so T is a
polynomial of a matrix near X₀. Rounding G, S and P by at most 2⁻⁹ an entry is a random error in P(s²G).
The diagonals need more care. P is 374·S² + … for an S near zero, and 0.137 on the diagonal of S is a sum
that mostly cancels. torch would round the sum before it adds the identity. So diagonals are computed
apart, from the lengths of rows in float32, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep.products.squarings import Squaring

__all__ = ["polynomial_in_tiles"]


def polynomial_in_tiles(G: Tensor, chain: tuple[Squaring, ...], s: float) -> Tensor:
    """``s·P(s²G)`` for a symmetric G in bfloat16 and the P of ``chain``; s = 0 keeps NaN.

    The powers of s are factors of the products, in float32, so that s²G is never rounded.
    """
    if s == 0:
        return 0 * G
    S = [G]
    for k, each in enumerate(chain, start=1):
        last, earlier = S[-1], S[each.earlier]
        scale = s if k == len(chain) else 1.0
        square = scale * each.square * (s**4 if k == 1 else 1.0)
        plus = scale * each.plus * (s**2 if each.earlier == 0 else 1.0)
        P = torch.addmm(earlier, last, last, beta=plus, alpha=square)
        squared = torch.linalg.vector_norm(last, dim=-1, dtype=torch.float32).square()
        diagonal = square * squared + plus * earlier.diagonal().float()
        P.diagonal().copy_(diagonal + scale * each.identity)
        S.append(P)
    return S[-1]
