"""How large the rest R = M − QB of a sketch is: the δ of a deflated map.

X₀ = QZ + R/δ is nearly flat for a δ of the size of R (:mod:`polarstep.polar.deflated`). δ only has to be
of the right size: δ = 2 times the root mean square of R's singular values, which ‖M‖²_F − ‖B‖²_F gives
for nothing. The polynomial steps then find the norm of X₀ themselves
(:mod:`polarstep.polar.flat_step_scale`).

In 16 bits the columns of Q are not quite orthonormal, and M − QB keeps some of the leading directions.
Steps take R = M − DB then, with the D of :meth:`polarstep.products.Products.dual`, for which QᵀR = 0
holds to the square of that error.
"""

from __future__ import annotations

__all__ = ["FACTOR", "rest_size"]

# δ in units of the root mean square of R's singular values. In s·X₀ all singular
# values of the head are about equal, and "flat" swings about one by 14%. On momentum of a GPT and with ℓ
# a sixth of the width, this factor brings them to 1.00 in the mean over six matrices, from 0.93 to 1.08;
# 1.5 brought all of them to 0.9, and in a long run lost 2.5% in perplexity (rank 48, one seed).
FACTOR = 2.0


def rest_size(rows: int, width: int, precision: float) -> tuple[int, float, float]:
    """``left``, ``factor`` and ``floor`` of δ² = factor²·max(‖M‖²_F − ‖B‖²_F, floor·‖M‖²_F)/left.

    ‖R‖²_F is the first difference, and R has at most left = rows − width singular values: δ is
    ``factor`` times their root mean square. Rounding hides a rest that has less than ``floor`` of M's
    energy: 2⁻¹² in 16 bits.
    """
    return max(1, rows - width), FACTOR, 64 * precision if precision < 1e-5 else 2.0**-12
