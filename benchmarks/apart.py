"""A deflated map whose polynomial steps act on the rest apart from the head: for measurements.

    jointly   T = p(s·X₀)             X₀ = QZ + R/δ, R = M − QB     :class:`polarstep.Deflated`
    apart     T = QZ + p(R/δ)         δ ≥ ‖R‖_op                    :class:`Apart`

The head keeps its own polar factor Z, and the steps lift nothing but the rest. So δ is the norm of the
rest alone, and not of X₀, where rows of head and rest overlap. For the same reason ‖T‖_op is not that of
the polynomial: TᵀT = ZᵀZ + pᵀp for QᵀR = 0, and ‖T‖²_op ≤ 1 + c² where ‖Z‖_op ≤ 1 and |p| ≤ c.

δ is found as the steps of the package find it: a first size from ‖M‖²_F − ‖B‖²_F, then an estimate of
the norm from five products of RRᵀ with 16 columns (:mod:`polarstep.maps.deflated`). It is made
larger for polynomials that explode soon after one. Nothing is carried but what the head carries.

All of it is plain torch in float32, also where M is in bfloat16: its quality is that of the idea, its
time is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import polarstep as ps
from polarstep.maps import Draw, MapState, Polar
from polarstep.maps.base import Containing, wide
from polarstep.maps.coefficients import Polynomial
from polarstep.maps.deflated import MARGIN_OF_SCALE, rest_size, tolerant_scale
from polarstep.ops import ops_of

__all__ = ["Apart", "inverse_norm", "lifted", "rest_of"]


@dataclass(frozen=True)
class Apart(Containing):
    """The head and the steps of a deflated map, with the steps on the rest alone.

    Args:
        deflated: a map with polynomial steps.
    """

    deflated: ps.Deflated

    @property
    def contained(self) -> ps.Deflated:
        """The deflated map."""
        return self.deflated

    def on(self, m: int, n: int, device: torch.device) -> ps.PolarMap:
        """The full-space map where the deflated map takes it."""
        inside = self.deflated.on(m, n, device)
        return self if inside is self.deflated else inside

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """T = QZ + p(R/δ), multiplied out in the precision and the memory layout of M."""
        polar, left = self.deflated.head.step(wide(M), carry, draw)
        factors, steps = polar.factors, self.deflated.rest
        assert factors is not None
        assert steps is not None
        dtype = torch.promote_types(M.dtype, torch.float32)
        A, Q, Z = (X.to(dtype) for X in (polar.M, factors.Q, factors.Z))
        R = rest_of(A, Q)
        # ε of M's own rounding, which is in R too: float32 here knows no more of M than bfloat16 did.
        inverse = inverse_norm(A, R, Q.shape[-1], steps.polynomials, torch.finfo(M.dtype).eps)
        T = Q @ Z + lifted(R, inverse, steps.polynomials)
        T = T if M.shape[-2] <= M.shape[-1] else T.mT
        return Polar(M, torch.empty_like(M).copy_(T)), left

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """The deflated map, and that its steps are apart."""
        return f"{self.deflated.describe(m, n, device)}, on the rest apart"


def rest_of(A: Tensor, Q: Tensor) -> Tensor:
    """R: wide ``A`` without what lies in the span of ``Q``, whose columns are only roughly orthonormal.

    A basis made in 16 bits has QᵀQ = I − E with an E of 2⁻⁶ and more. D = Q(2I − QᵀQ) leaves E² of A's
    part in the span, and a second time E⁴.
    """
    D = 2 * Q - Q @ (Q.mT @ Q)
    R = A - D @ (Q.mT @ A)
    return R - D @ (Q.mT @ R)


def inverse_norm(
    A: Tensor, R: Tensor, width: int, polynomials: tuple[Polynomial, ...], precision: float
) -> Tensor:
    """1/δ (batch, 1, 1) for the rest ``R`` of wide ``A`` and steps that act on R/δ; zero for a zero A.

    ‖R/δ‖_op is 1/1.08 where the estimate is exact, and at most 1.17 (for 99 of 100 directions, see
    :mod:`polarstep.maps.deflated`). A rest that is nothing but the rounding of A stays small.
    """
    ops, size = ops_of(A.device), torch.linalg.matrix_norm
    left, factor, floor = rest_size(A.shape[-2], width, precision)
    # ‖R‖_F itself, where the package has ‖M‖²_F − ‖B‖²_F.
    norm = torch.maximum(size(R, keepdim=True), floor**0.5 * size(A, keepdim=True))
    least = factor * norm / left**0.5
    rough = torch.where(least > 0, 1 / torch.where(least > 0, least, 1), 0)
    X = R * rough
    s = ops.scale_to_one(X @ X.mT, MARGIN_OF_SCALE)
    # R has at most `left` singular values, so that ‖X‖_op ≥ 1/factor unless the floor has counted.
    s = s.clamp_max(factor / MARGIN_OF_SCALE)
    return rough * s * tolerant_scale(polynomials)


def lifted(R: Tensor, inverse: Tensor, polynomials: tuple[Polynomial, ...]) -> Tensor:
    """p(R/δ) for ``inverse`` = 1/δ."""
    X = R * inverse
    for polynomial in polynomials:
        G = X @ X.mT
        Y = polynomial[-1] * X
        for coefficient in reversed(polynomial[:-1]):
            Y = torch.baddbmm(X, G, Y, beta=coefficient)
        X = Y
    return X
