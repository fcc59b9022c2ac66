"""One polynomial step on a flattened matrix with products in bfloat16, for CPUs with matrix tiles.

A deflated step (:mod:`polarstep.polar.deflated`) is T = s·P(s²G)·X₀ with G = X₀X₀ᵀ. Tiles multiply
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
    """``P(s²G)`` for a symmetric G in bfloat16 and the P of ``chain``; zero or NaN for s = 0."""
    if s == 0:
        return 0 * G
    # As factors of the first product the powers of s would not round G again. But oneDNN compiles a
    # kernel for every new β of αAB + βC, which takes five times as long as a product of 768 rows.
    S = [G * s**2]
    for each in chain:
        last, earlier = S[-1], S[each.earlier]
        P = torch.addmm(earlier, last, last, beta=each.plus, alpha=each.square)
        squared = torch.linalg.vector_norm(last, dim=-1, dtype=torch.float32).square()
        diagonal = each.square * squared + each.plus * earlier.diagonal().float()
        P.diagonal().copy_(diagonal + each.identity)
        S.append(P)
    return S[-1]
