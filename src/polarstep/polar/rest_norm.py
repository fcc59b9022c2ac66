"""How large the rest R = M − QB of a sketch is: the δ of a deflated map.

X₀ = QZ + R/δ is nearly flat for a δ of the size of R (:mod:`polarstep.polar.deflated`).

**With polynomial steps** δ only has to be of the right size: δ = 2 times the root mean square of R's
singular values, which ‖M‖²_F − ‖B‖²_F gives for nothing (:func:`rest_size`). The steps then find the
norm of X₀ themselves (:mod:`polarstep.polar.flat_step_scale`).

**Without steps** ‖T‖_op is that of X₀ itself. Then δ is an estimate of ‖R‖_op (:func:`rest_norm`).
With a δ that is too small by 30%, ‖T‖²_op ≤ 1 + 1/0.7² = 3.05. At the step at which R gets a new leading
direction, δ may be 79% too small for n = 3072: ‖T‖_op ≤ 4.8 for all but one direction in a hundred.
From the next step on the carried vectors hold that direction.

In 16 bits the columns of Q are not quite orthonormal, and M − QB keeps some of the leading directions.
Steps take R = M − DB then, with the D of :meth:`polarstep.products.Products.dual`, for which QᵀR = 0
holds to the square of that error.

All functions take wide matrices of shape (batch, m, n) with m ≤ n; the caller transposes tall ones. δ
has shape (batch, 1, 1). Nothing here draws random numbers or makes the host wait for the device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from polarstep import products
from polarstep.float64 import widest
from polarstep.products.rest_norm import RestNorm, RestRules
from polarstep.products.start_vectors import SIGNS

__all__ = ["rest_energy", "rest_norm", "rest_size", "vectors_shape"]

# δ is this many times the norm that the carried vectors see; see rest_norm.
MARGIN = 1.1
# This much of the first vectors is added to the carried vectors at every step. A direction that is new
# in R then has a fifth of the κ (see rest_norm) that vectors independent of R would give it.
FRESH = 0.5
# δ for polynomial steps, in units of the root mean square of R's singular values. In s·X₀ all singular
# values of the head are about equal, and "flat" swings about one by 14%. On momentum of a GPT and with ℓ
# a sixth of the width, this factor brings them to 1.00 in the mean over six matrices, from 0.93 to 1.08;
# 1.5 brought all of them to 0.9, and in a long run lost 2.5% in perplexity (rank 48, one seed).
FACTOR = 2.0
# 2·√3·0.2124: a number with random leading digits is off by 0.2124ε in the root mean square.
ROUNDING = 0.736
# The error of ‖B‖²_F where the terms of B's sums are rounded, in units of ε·‖B‖²_F; see rest_energy.
ROUNDING_OF_SUMS = 0.3


def vectors_shape(m: int, n: int) -> tuple[int, int]:
    """(b, max(m, n)): the shape of the vectors that :func:`rest_norm` carries on for an m×n matrix."""
    return min(SIGNS, m, n), max(m, n)


def rest_norm(
    M: Tensor,
    D: Tensor,
    B: Tensor,
    precision: float,
    *,
    squares: Tensor | None = None,
    vectors: Tensor | None = None,
    finite: Tensor | None = None,
) -> RestNorm:
    """1/δ with δ ≥ ‖R‖_op for R = M − DB from one step of subspace iteration; M is read twice.

    ::

        U = orth(RV)                 V: the b vectors that the last step left
        W = RᵀU                      the V of the next step
        δ = min(1.1·w, ‖R‖_F)        w ≥ ‖W‖_op from the traces of (WᵀW)² and (WᵀW)⁴

    R itself is not made: RV = MV − D(BV), and ‖R‖²_F ≤ ‖M‖²_F − ‖B‖²_F. U is not made either: U = YN for
    Y = RV, with a b×b matrix N from the Cholesky factor of YᵀY, so that W = (RᵀY)N. w needs b×b products
    only and is at most ‖W‖_S8; on recorded momentum it is above ‖W‖_op by some percent.

    RᵀY is MᵀY − Bᵀ(DᵀY), of which DᵀY would be zero without rounding. In 16 bits it is not, and B is as
    long as M's leading directions: without the second term δ was 11 times ‖R‖_op on a matrix with four
    singular values of up to 100‖R‖_op, and 58 times with 300‖R‖_op.

    **How far below ‖R‖_op can δ be?** Let κ be the part of R's leading right singular vector r that lies
    in span(V): κ = ‖P_V r‖². Let x be the unit vector along P_V r, rᵢ the other right singular vectors,
    yᵢ = σᵢ²/‖R‖²_op and wᵢ = ⟨x, rᵢ⟩². Then ⟨x, r⟩² = κ, and

        ‖W‖²_op ≥ ‖RᵀRx‖²/‖Rx‖² = ‖R‖²_op·(κ + Σwᵢyᵢ²)/(κ + Σwᵢyᵢ) ≥ ‖R‖²_op·2√κ/(1 + √κ).

    The last step: by Jensen all yᵢ may be taken equal to one y, and (κ + (1−κ)y²)/(κ + (1−κ)y) is least
    at y = √κ/(1 + √κ), where it is 2y. So δ ≥ ‖R‖_op for √κ ≥ 1/(2·1.1² − 1): as soon as half of r is
    in the span (κ ≥ 0.5). And δ ≥ 0.7‖R‖_op, with which ‖T‖²_op ≤ 3.05, from κ ≥ 0.065 on. Vectors
    independent of R have κ ≈ b/n, and carried vectors that are orthogonal to r have a fifth of that,
    from FRESH alone (:mod:`polarstep.theory.bounds.scaled_rest`). These are worst cases over all
    spectra. On momentum of a GPT of width 256, for ℓ/m of 1/16 and 1/4 and h of 0, ½ and 1, δ/‖R‖_op
    was from 0.91 to 1.20 with a mean of 1.10, from the first step on (with FRESH = 2⁻⁵). A single warm
    vector sees only half of ‖R‖_op at times there, because the directions that a sketch misses change
    with every sketch. On momentum of rank one that drifts they change so much that FRESH = 2⁻⁵ gave
    δ/‖R‖_op = 0.3.

    **What the Cholesky factor costs.** NNᵀ = (YᵀY + 2⁻²⁰‖Y‖²_F·I)⁻¹, because the factor of YᵀY alone
    would make columns of rounding errors as long as all others. For x = Vc the first inequality then has
    a factor 1/(1 + 2⁻²⁰‖Y‖²_F‖c‖²/‖Rx‖²) on its right. It is 0.99 where Rx is a hundredth of ‖Y‖_F‖c‖.

    Args:
        M: (batch, m, n) with m ≤ n.
        D: (batch, m, ℓ), the basis of the head or its dual (:meth:`polarstep.products.Products.dual`).
        B: (batch, ℓ, n), QᵀM.
        precision: ε of the least precise of M, Q and B.
        squares: (batch, parts) numbers that add up to ‖M‖²_F, where a step knows them.
        vectors: (batch, b, n), what the last step returned, or ``None`` at the first step. They may be
            overwritten, except for matrices whose ``finite`` is zero.
        finite: a flag for each matrix, or ``None`` where all count.
    """
    fine = precision < 1e-5
    rules = RestRules(
        margin=MARGIN,
        fresh=FRESH,
        # Rounding of many entries is random, so that in 16 bits a sum of many squares has far less of it
        # than ε. In 32 and 64 bits the room covers a Q made by products, whose columns may be longer
        # than one by ten thousand ε. A rest that the room hides is smaller than M by 2⁻⁹ or 2⁻¹⁶, and δ
        # comes from w then.
        room=math.sqrt(precision) / 64 if fine else precision / 64,
        # Dividing by less would make rounding errors of M visible in M/δ. There is nothing else to see.
        least=64 * precision if fine else precision / 4,
    )
    ops = products.of(M.device)
    return ops.rest_norm(M, D, B, rules, squares=squares, vectors=vectors, finite=finite)


def rest_energy(found: RestNorm, Q: Tensor, B: Tensor, left: int) -> Tensor:
    """‖R‖²_F/δ² of shape (batch,), for the R = M − DB of :func:`rest_norm` and D = Q(2I − QᵀQ).

    ::

        ‖R‖²_F = ‖M‖²_F − ‖B‖²_F − ⟨E + E² + E³, BBᵀ⟩        E = I − QᵀQ

    holds for B = QᵀM. In bfloat16 E is about 2⁻⁶, and more than ½ for some warm sketches. Of a 48×64
    matrix with four directions a hundred times as long as all others, ⟨E, BBᵀ⟩ was ten times ‖R‖²_F.
    For a Q in float32 E is computed in float64, where the device has it. In float32 it is wrong by up to
    4ε, as large as E is, and the rest of σₖ = k⁻² has only 1.4ε·‖M‖²_F (384 rows, ℓ = 128).

    **Rounding of B** leaves the right side with an error of the standard deviation τ. With independent
    errors in B, and rows bᵢ whose entries have the fourth moment of normal numbers,

        τ² = 4·(0.21ε)²·Σ_ij B⁴_ij ≈ (0.74ε)²·Σᵢ‖bᵢ‖⁴/n

    where 0.21ε is the root mean square of the relative error of a rounded number. τ is 2⁻¹²·‖M‖²_F or
    less for n ≥ 512 in bfloat16, but a rest may be as small. In 32 and 64 bits the sums of QᵀM are
    rounded at every term, and by the same amount in many entries of a row: τ² = (0.3ε)²·Σᵢ‖bᵢ‖⁴ is what
    was measured on a CPU, for 128 to 768 rows and up to 3072 columns. So the b vectors of
    :func:`rest_norm` are used as well. They have seen ‖W‖²_F of ‖R‖²_F. R has at most ``left`` singular
    values, which on average are hardly larger than those of W: U was made by RRᵀ, which prefers the
    largest. Of all values from 3τ below the right side to τ above it, ‖R‖²_F is taken to be the nearest
    to ‖W‖²_F·left/b, and never less than ‖W‖²_F. The bounds are uneven because ‖W‖²_F·left/b is hardly
    below ‖R‖²_F, and may be far above it: a value that is lower than the right side is trusted more.

    In 32 and 64 bits ‖W‖²_F·√(left/b) takes the place of ‖W‖²_F·left/b. Only a steep spectrum has a rest
    that rounding hides there, and the b vectors have seen more of it than their share.

    Args:
        found: what :func:`rest_norm` returned.
        Q: (batch, m, ℓ), the basis of the head.
        B: (batch, ℓ, n), QᵀM.
        left: m − ℓ, the number of R's singular values.
    """
    ops = products.of(B.device)
    fine = B.dtype.itemsize >= 4
    E = -ops.gram(Q.mT.to(widest(Q.device)) if fine else Q.mT)
    E.diagonal(dim1=-2, dim2=-1).add_(1)
    E = torch.baddbmm(E, E, torch.baddbmm(E, E, E))
    # Squares of B may leave the range of float32. ‖B/δ‖_F is at most 1/least in the rules of rest_norm.
    held = ops.gram((B * found.inverse).to(B.dtype))
    energy = found.unheld - (E * held).sum((-2, -1))
    lengths = held.diagonal(dim1=-2, dim2=-1)
    rounding = ROUNDING_OF_SUMS if fine else ROUNDING / math.sqrt(B.shape[-1])
    error = torch.linalg.vector_norm(lengths, dim=-1) * rounding
    error = error * torch.finfo(B.dtype).eps
    share = max(1.0, left / found.vectors.shape[1])
    likely = found.seen * (math.sqrt(share) if fine else share)
    return likely.clamp(energy - 3 * error, energy + error).maximum(found.seen)


def rest_size(rows: int, width: int, precision: float) -> tuple[int, float, float]:
    """``left``, ``factor`` and ``floor`` of δ² = factor²·max(‖M‖²_F − ‖B‖²_F, floor·‖M‖²_F)/left.

    ‖R‖²_F is the first difference, and R has at most left = rows − width singular values: δ is
    ``factor`` times their root mean square. Rounding hides a rest that has less than ``floor`` of M's
    energy: 2⁻¹² in 16 bits.
    """
    return max(1, rows - width), FACTOR, 64 * precision if precision < 1e-5 else 2.0**-12
