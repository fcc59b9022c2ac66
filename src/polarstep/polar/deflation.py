"""Keep what a sketch leaves out: one more term for the rest R = M − QB of a low-rank map.

A low-rank map returns T = QZ with Z ≈ polar(B), B = QᵀM, and drops R. Newton–Schulz needs many steps
on M because a few leading singular values tower over the others. Q holds these leading directions, so
R is nearly flat: one or two steps lift it, or none at all. With δ ≥ ‖R‖_op there are three ways:

    scaled      T = QZ + R/δ            = M/δ + Q(Z − B/δ)
    apart       T = QZ + p(R/δ)           p: a few polynomial steps on R
    jointly     T = p(QZ + R/δ)           the same steps on head and rest together

QᵀR = 0, so head and rest have orthogonal columns and ‖QZ + P‖²_op ≤ max(‖Z‖², ‖P‖²) + ‖ZPᵀ‖ for any P
with QᵀP = 0 (:func:`polarstep.theory.bounds.deflated.deflated_nu`). The last term is zero where Q
spans singular vectors of M. Otherwise the rows of B and R overlap, and it is at most one if ‖Z‖, ‖P‖
≤ 1. On recorded momentum ‖T‖_op is 1.2 to 1.5 for a rest apart; steps taken jointly remove the
overlap.

All functions take wide matrices of shape (batch, m, n) with m ≤ n; the caller transposes tall ones. δ
has shape (batch, 1, 1). δ = ∞ says that there is no rest: every form is then the low-rank map's QZ (its
polynomial, jointly). Nothing here draws random numbers or makes the host wait for the device.

**When δ is too small.** δ is an estimate (:func:`rest_norm`), so every form must survive a δ that is too
small. Polynomials that are made for [0, 1] explode beyond it: two steps of ``"jordan"`` turn 1.43 into
439. So p is applied to s·R/δ with the largest s ≤ 1 for which |p(sx)| ≤ 2 up to x = 1/0.7
(:func:`apart_scale`); a δ that is too small by 30% then gives ‖p‖_op ≤ 2. The paper's polynomials have
s = 1: nothing is lost with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from polarstep import products
from polarstep.polar.coefficients import Polynomial, evaluate
from polarstep.polar.orthonormal import orthonormalize
from polarstep.products import Products
from polarstep.products.base import leaves_range, product_like, unit_scaled
from polarstep.torch_compile import constant

__all__ = [
    "RestNorm",
    "apart_scale",
    "first_vectors",
    "frobenius_norm",
    "in_range",
    "joint_scale",
    "lifted_apart",
    "lifted_jointly",
    "projection",
    "rest",
    "rest_frobenius",
    "rest_norm",
    "scaled_rest",
]

# The number of vectors that rest_norm carries: the least that a GPU multiplies at full rate.
VECTORS = 16
# δ is this many times the norm that the carried vectors see; see rest_norm.
MARGIN = 1.1
# The carried vectors get this much of first_vectors at every step. A direction that is new in R then has
# a fifth of the κ of rest_norm that vectors without any knowledge would give it.
FRESH = 0.5
# A δ that is too small by this part must not do harm; and what ‖p(R/δ)‖_op is then at most.
TOLERATED_ERROR = 0.3
TOLERATED_NORM = 2.0
# Steps jointly may pass the peak that they have on [0, 1] by this much, a fifth of what float32 adds.
TOLERATED_EXCESS = 2e-6


@dataclass(frozen=True)
class RestNorm:
    """What :func:`rest_norm` knows of ‖R‖_op, and what it carries on. Norms have shape (batch, 1, 1)."""

    delta: Tensor
    """δ, the estimate with its margin; ∞ where R is nothing but rounding."""
    least: Tensor
    """A true lower bound on ‖R‖_op."""
    most: Tensor
    """A true upper bound on ‖R‖_op, up to the rounding of ‖M‖²_F − ‖B‖²_F."""
    vectors: Tensor
    """(batch, n, b): for the next step's call."""


def frobenius_norm(M: Tensor) -> Tensor:
    """‖M‖_F of shape (batch, 1, 1), in float64: squares of 1e-30 or 1e30 leave the range of float32."""
    return torch.linalg.vector_norm(M, dim=(-2, -1), keepdim=True, dtype=torch.float64)


def in_range(M: Tensor, ops: Products) -> tuple[Tensor, Tensor]:
    """M and ‖M‖_F; on a CPU both scaled by a power of two where products with M would lose digits."""
    norm = frobenius_norm(M)
    if not ops.looks_for_free or torch.compiler.is_compiling():
        return M, norm
    outside = leaves_range(norm, M.dtype)
    if M.dtype == torch.float64:
        outside |= norm == 0  # or squares that are too small for float64
    if bool(outside.any()):
        M, _ = unit_scaled(M)
        norm = frobenius_norm(M)
    return M, norm


def projection(Q: Tensor, B: Tensor) -> Tensor:
    """(2I − QᵀQ)B: what to pass for ``B`` to the functions below where QᵀQ = I holds but roughly.

    In bfloat16 the columns of Q have a norm of 1 − 2⁻⁸. M − QB then keeps 2⁻⁷ of the head, which may be
    as large as the whole rest. One Newton step towards (QᵀQ)⁻¹ squares that error: with S = QᵀQ ≤ I,
    Qᵀ(M − Q(2I − S)B) = (I − S)²B. It costs 2mℓ² + 2ℓ²n FLOPs; a zero column of Q stays without effect.
    """
    dtype = torch.promote_types(B.dtype, torch.float32)
    Q, B = Q.to(dtype), B.to(dtype)
    return 2 * B - (Q.mT @ Q) @ B


def rest(M: Tensor, Q: Tensor, B: Tensor) -> Tensor:
    """R = M − QB, multiplied out, in float32 or better."""
    dtype = torch.promote_types(M.dtype, torch.float32)
    return M.to(dtype) - product_like(M, Q.to(dtype), B.to(dtype))


def rest_frobenius(norm: Tensor, B: Tensor, precision: float | None = None) -> Tensor:
    """‖R‖_F, or a little more: √(‖M‖²_F − ‖B‖²_F) with room for rounding; ``norm`` is ‖M‖_F.

    B is QᵀM itself, not :func:`projection` of it. Q need not be orthonormal: for S = QᵀQ ≤ I,
    ‖M − QB‖²_F = ‖M‖²_F − ⟨B, (2I − S)B⟩ ≤ ‖M‖²_F − ‖B‖²_F, and less with the projection.
    ``precision`` is the ε of the product QᵀM, that of B's dtype unless given. Rounding of many entries
    is random, so that in 16 bits a sum of many squares has far less than ε of it.
    """
    precision = torch.finfo(B.dtype).eps if precision is None else precision
    room = 8 * precision if precision < 1e-5 else precision / 64
    energy = norm.square() * (1 + room) - frobenius_norm(B).square()
    return energy.clamp_min(0).sqrt()


def first_vectors(M: Tensor) -> Tensor:
    """(batch, n, b) vectors to start :func:`rest_norm` from, the same at every call; b = min(m, 16).

    Entry (j, i) is cos(k²) with k = jb + i + 1, over √n: without a pattern, and without a generator.
    """
    m, n = M.shape[-2:]
    count = min(m, VECTORS)
    dtype = torch.promote_types(M.dtype, torch.float32)
    k = torch.arange(1, n * count + 1, dtype=torch.float64, device=M.device)
    block = (k.square().cos() / math.sqrt(n)).to(dtype)
    return block.view(1, n, count).expand(len(M), n, count)


def rest_norm(
    M: Tensor,
    Q: Tensor,
    B: Tensor,
    norm: Tensor,
    frobenius: Tensor,
    vectors: Tensor | None = None,
    *,
    margin: float = MARGIN,
    rounds: int = 1,
) -> RestNorm:
    """δ ≥ ‖R‖_op for R = M − QB from one step of subspace iteration; M is read twice.

    ::

        U = orth(RV)                 V: the b vectors that the last step left
        W = RᵀU                      the V of the next step
        δ = min(margin·w, ‖R‖_F)     w ≥ ‖W‖_op from the traces of (WᵀW)² and (WᵀW)⁴

    R itself is not made: RV = MV − Q(BV). w needs b×b products only and is at most ‖W‖_S8; on recorded
    momentum it is above ‖W‖_op by some percent.

    **How far below ‖R‖_op can δ be?** Let κ be the part of R's leading right singular vector r that lies
    in span(V): κ = ‖P_V r‖². Let x be the unit vector along P_V r, rᵢ the other right singular vectors,
    yᵢ = σᵢ²/‖R‖²_op and wᵢ = ⟨x, rᵢ⟩². Then ⟨x, r⟩² = κ, and

        ‖W‖²_op ≥ ‖RᵀRx‖²/‖Rx‖² = ‖R‖²_op·(κ + Σwᵢyᵢ²)/(κ + Σwᵢyᵢ) ≥ ‖R‖²_op·2√κ/(1 + √κ).

    The last step: by Jensen all yᵢ may be taken equal to one y, and (κ + (1−κ)y²)/(κ + (1−κ)y) is
    least at y = √κ/(1 + √κ), where it is 2y. So δ ≥ ‖R‖_op for √κ ≥ 1/(2·margin² − 1): with a margin
    of 1.1 as soon as half of r is in the span (κ ≥ 0.5). And δ ≥ 0.7‖R‖_op, the error that every form
    tolerates, from κ ≥ 0.065 on. Vectors that know nothing of R have κ ≈ b/n. That is the worst case
    over all spectra. On momentum of a GPT of width 256, for ℓ/m of 1/16 and 1/4 and h of 0, ½ and 1,
    δ/‖R‖_op was from 0.91 to 1.20 with a mean of 1.10, from the first step on (with FRESH = 2⁻⁵). A
    single warm vector sees half of ‖R‖_op at times there, because the directions that a sketch misses
    change with every sketch. On momentum of rank one that drifts they change so much that FRESH = 2⁻⁵
    and one round gave 0.3.

    Args:
        M: (batch, m, n) with m ≤ n.
        Q: (batch, m, ℓ), the basis of the head.
        B: (batch, ℓ, n), QᵀM or :func:`projection` of it.
        norm: ‖M‖_F, as :func:`frobenius_norm` returns it; a step knows it from its normalization.
        frobenius: ‖R‖_F or more, as :func:`rest_frobenius` returns it.
        vectors: what the last step returned, or ``None`` for :func:`first_vectors`.
        margin: see above.
        rounds: steps of the iteration. A basis of an earlier step may miss what has become the leading
            direction of M since; vectors that know nothing of it find it in the first of two rounds.
    """
    first = first_vectors(M)
    V = first if vectors is None else vectors
    dtype, precision = V.dtype, max(torch.finfo(M.dtype).eps, torch.finfo(Q.dtype).eps)
    Q, B = Q.to(dtype), B.to(dtype)
    scale = torch.where(norm > 0, norm, 1).to(dtype)

    W = V
    for _ in range(rounds):
        Y = (M @ W.to(M.dtype)).to(dtype) - Q @ (B @ W)
        U = orthonormalize(Y / scale).to(dtype)
        W = ((M.mT @ U.to(M.dtype)).to(dtype) - B.mT @ (Q.mT @ U)) / scale  # as if ‖M‖_F = 1

    seen = torch.linalg.vector_norm(W, dim=(-2, -1), keepdim=True)
    # A zero matrix, or one with a NaN, leaves no trace in what is carried on.
    usable = (seen > 0) & torch.isfinite(seen)
    unit = torch.where(usable, W / torch.where(usable, seen, 1), 0)
    largest = seen * _norm_from_moments(unit.mT @ unit).sqrt()
    longest = torch.linalg.vector_norm(unit, dim=-2, keepdim=True).amax(-1, keepdim=True) * seen

    outside = (frobenius.square() - (seen * norm).square()).clamp_min(0)
    most = torch.minimum(frobenius, ((largest * norm).square() + outside).sqrt())
    # Dividing by less would make rounding errors of M visible in M/δ, and there is nothing else to see.
    is_rounding = largest <= (64 * precision if precision < 1e-5 else precision / 4)
    least = longest * norm
    delta = torch.minimum(margin * largest * norm, frobenius.clamp_min(least))
    delta = torch.where(is_rounding, math.inf, delta)
    # 1/δ must be finite for a rest in the denormals too.
    delta = delta.clamp_min(torch.finfo(dtype).tiny).to(dtype)
    vectors = unit * math.sqrt(V.shape[-1]) + FRESH * first
    return RestNorm(delta, least.to(dtype), most.to(dtype), vectors)


def _norm_from_moments(K: Tensor) -> Tensor:
    """A bound on ‖K‖_op from above for symmetric b×b matrices K ≥ 0, from tr K² and tr K⁴.

    Of b numbers λᵢ² with mean μ and standard deviation τ none is above μ + τ√(b − 1), because one
    that is d above the mean has the others d below it in sum. This is exact where all λᵢ are equal,
    and never above the Schatten norm (Σλᵢ⁴)^¼.
    """
    b = K.shape[-1]
    squared = K @ K
    mean = squared.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    second = squared.square().sum((-2, -1), keepdim=True) / b
    deviation = (second - mean.square()).clamp_min(0).sqrt()
    return (mean + math.sqrt(b - 1) * deviation).sqrt()


def scaled_rest(M: Tensor, Q: Tensor, B: Tensor, Z: Tensor, delta: Tensor) -> Tensor:
    """T = QZ + R/δ, made as M/δ + Q(Z − B/δ): no product more than the low-rank map's own QZ.

    ⟨M, T⟩ = ⟨B, Z⟩ + ‖R‖²_F/δ and ‖T‖²_op ≤ 1 + ‖ZRᵀ‖_op/δ ≤ 2. With a δ that is too small by 30%,
    ‖T‖²_op ≤ ‖Z‖² + ‖R/δ‖² ≤ 1 + 1/0.7² = 3.05.
    """
    return _flattened(M, Q, B, Z, delta, 1.0)


def lifted_apart(
    M: Tensor,
    Q: Tensor,
    B: Tensor,
    Z: Tensor,
    delta: Tensor,
    polynomials: tuple[Polynomial, ...],
) -> Tensor:
    """T = QZ + p(sR/δ) for the composition p of ``polynomials`` and s of :func:`apart_scale`.

    One product of size m·n·ℓ more than :func:`scaled_rest`, for R, and the steps. R is made before the
    steps: RRᵀ = (I − QQᵀ)MMᵀ(I − QQᵀ) would be cheaper, but the head's squares drown it in 16 bits.
    """
    X = rest(M, Q, B)
    X = X * (apart_scale(polynomials) / delta.to(X.dtype))
    P = products.of(X.device).iterate(X, polynomials)
    return product_like(M, Q.to(P.dtype), Z.to(P.dtype)) + P


def lifted_jointly(
    M: Tensor,
    Q: Tensor,
    B: Tensor,
    Z: Tensor,
    delta: Tensor,
    polynomials: tuple[Polynomial, ...],
) -> Tensor:
    """T = p(s·X₀) for X₀ = QZ + R/δ, the composition p of ``polynomials`` and s of :func:`joint_scale`.

    **‖T‖_op ≤ 1 with the paper's polynomials**, for δ ≥ ‖R‖_op and ‖Z‖_op ≤ 1. As QᵀR = 0,
    X₀ᵀX₀ = ZᵀZ + RᵀR/δ², so that ‖X₀‖²_op ≤ 1 + 1. The steps act on the singular values x ≤ √2 of X₀,
    and s is such that 0 ≤ p(sx) ≤ 1 there:

    * cubic, φ(x) = (3x − x³)/2: s = 1. φ has its maximum of one at x = 1 and is not negative up to √3.
    * quintic: s = 1/√2, as φ increases everywhere, φ' = 15(1 − x²)²/8, and φ(1) = 1. Two quintics
      have s = 0.81: φ(1 + e) = 1 + 5e³/2 + …, so the second takes back what the first lets pass.
    * one cubic and then quintics: s = 1, as the cubic has brought all of it to [0, 1].

    The last is the cheapest safe choice. A cubic costs no m×m×m product, and it gives up less of the
    slope at zero, 1.5 in place of 1.875, than the scale does, 1.875/√2 = 1.33.
    """
    X = _flattened(M, Q, B, Z, delta, joint_scale(polynomials))
    return products.of(X.device).iterate(X, polynomials)


def _flattened(M: Tensor, Q: Tensor, B: Tensor, Z: Tensor, delta: Tensor, scale: float) -> Tensor:
    """scale·(M/δ + Q(Z − B/δ)), in float32 or better."""
    dtype = torch.promote_types(M.dtype, torch.float32)
    inverse = scale / delta.to(dtype)
    head = scale * Z.to(dtype) - B.to(dtype) * inverse
    return product_like(M, Q.to(dtype), head) + M.to(dtype) * inverse


def apart_scale(polynomials: tuple[Polynomial, ...]) -> float:
    """The largest s ≤ 1 with |p(sx)| ≤ 2 for all x ≤ 1/0.7.

    1 for the paper's polynomials, 0.94 and 0.89 for one and two steps of ``"jordan"``.
    """
    too_small = 1 / (1 - TOLERATED_ERROR)
    return _scale(polynomials, 1.0, too_small)


def joint_scale(polynomials: tuple[Polynomial, ...]) -> float:
    """The largest s ≤ 1 that keeps p(sx) where [0, 1] goes for x ≤ √2, and |p(sx)| ≤ 2 for x ≤ 1.75.

    √2 bounds ‖X₀‖_op, and √(1 + 1/0.7²) = 1.75 bounds it with a δ that is too small by 30%. The first
    holds up to 2e-6. s is 1 for steps that begin with a cubic, 0.71 for one quintic, 0.81 for two.
    """
    too_small = math.hypot(1, 1 / (1 - TOLERATED_ERROR))
    return _scale(polynomials, math.sqrt(2), too_small)


# Not functools.cache, which torch.compile looks through, and warns of.
_SCALES: dict[tuple[tuple[Polynomial, ...], float, float], float] = {}


@constant
def _scale(polynomials: tuple[Polynomial, ...], expected: float, too_small: float) -> float:
    """The largest s ≤ 1 with |p(sx)| ≤ 2 for x ≤ too_small and |p(sx)| ≤ peak for x ≤ expected.

    The peak is max(1, max |p(x)| over 0 ≤ x ≤ 1).
    """
    key = (polynomials, expected, too_small)
    if key not in _SCALES:
        step = 2.0**-14
        x = torch.arange(0, 4, step, dtype=torch.float64, device="cpu")
        highest = evaluate(polynomials, x).abs().cummax(0).values
        peak = max(1.0, float(highest[x <= 1].max()))
        within = float(x[highest <= peak * (1 + TOLERATED_EXCESS)].max()) / expected
        bounded = float(x[highest <= TOLERATED_NORM].max()) / too_small
        _SCALES[key] = min(1.0, within, bounded)
    return _SCALES[key]
