"""A sketched head and what the sketch leaves out: a cheap step that keeps every direction."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from polarstep import flops, products
from polarstep.polar import deflation
from polarstep.polar.base import Carry, Draw, Polar, PolarMap
from polarstep.polar.low_rank import LowRank
from polarstep.polar.newton_schulz import NewtonSchulz
from polarstep.products import Products

__all__ = ["Deflated"]

# Steps of subspace iteration for δ. A leading direction that is new in R may be unknown to the carried
# vectors, with fresh sketches too. On momentum of rank one that drifts, one round gave a δ down to
# 0.6‖R‖_op at 256×512, which is less than the polynomials tolerate. Two rounds gave ‖R‖_op or more in
# all such sequences. The second costs 9% of the FLOPs of a map that scales its rest, and 1% of one with
# steps.
ROUNDS = 2


def _head() -> LowRank:
    return LowRank(48, 8, inner=NewtonSchulz(4, "polar-express-sketch"))


@dataclass(frozen=True)
class Deflated(PolarMap):
    """A low-rank map that keeps the rest R = M − QB beside its head QZ.

    ::

        Q, B = QᵀM, Z ≈ polar(B)            the head: Algorithm 1
        δ ≈ ‖R‖_op                          four passes over M (polarstep.polar.deflation.rest_norm)
        X₀ = QZ + R/δ = M/δ + Q(Z − B/δ)
        T = X₀                              without steps for the rest
        T = p(s·X₀)                         with steps, jointly
        T = QZ + p(s·R/δ)                   with steps on the rest apart

    Newton–Schulz needs five steps because M's norm is that of a few leading directions, and its small
    singular values have far to climb. The head holds these directions, so X₀ is nearly flat and one or
    two steps lift it. With ``"cubic"`` first and ``"quintic"`` steps after it, jointly, ‖T‖_op ≤ 1 is
    proved where δ ≥ ‖R‖_op (:func:`polarstep.polar.deflation.lifted_jointly`).

    Args:
        head: the low-rank map. A small rank does: the rest keeps what it misses.
        rest: the polynomial steps, of which only ``steps``, ``coefficients`` and ``form`` count;
            ``None`` scales the rest by 1/δ, at no product more than the head's.
        jointly: whether the steps act on head and rest together, or on the rest apart.
        full: the map for matrices on which all this would cost more than it.
    """

    head: LowRank = field(default_factory=_head)
    rest: NewtonSchulz | None = None
    jointly: bool = True
    full: PolarMap = field(default_factory=lambda: NewtonSchulz(5, "polar-express"))

    def __post_init__(self) -> None:
        if not isinstance(self.head, LowRank):
            raise TypeError(f"head={self.head!r}: expected a LowRank map, as LowRank(48)")
        if self.rest is not None and not isinstance(self.rest, NewtonSchulz):
            raise TypeError(
                f"rest={self.rest!r}: expected None or polynomial steps, as NewtonSchulz(2, 'jordan')"
            )
        if not isinstance(self.jointly, bool):
            raise TypeError(f"jointly={self.jointly!r}: expected True or False")
        if not isinstance(self.full, PolarMap) or self.full.is_random or self.full.carries:
            raise TypeError(
                f"full={self.full!r}: expected a full-space map without random numbers or state, as "
                "NewtonSchulz(5, 'polar-express')"
            )

    @property
    def is_random(self) -> bool:
        """The head draws a sketch."""
        return True

    @property
    def rounds_input(self) -> bool:
        """As the maps inside do."""
        steps = True if self.rest is None else self.rest.rounds_input
        return self.head.rounds_input and self.full.rounds_input and steps

    @property
    def ignores_scale(self) -> bool:
        """As the head and the full-space map do; the rest is divided by its own norm."""
        return self.head.ignores_scale and self.full.ignores_scale

    @property
    def carries(self) -> tuple[str, ...]:
        """What the head carries, and the vectors that δ is estimated from."""
        return (*self.head.carries, "rest")

    def init(self, batch: int, m: int, n: int, device: torch.device, dtype: torch.dtype) -> Carry:
        """What the head begins with."""
        return self.head.init(batch, m, n, device, dtype)

    def resumes(self, carry: Carry, m: int, n: int) -> bool:
        """Where vectors for the long side are there, and what the head needs."""
        shape = (min(deflation.VECTORS, m, n), max(m, n))
        known = "rest" in carry and carry["rest"].shape[1:] == shape
        return known and self.head.resumes(carry, m, n)

    def numbers_at(self, step: int, *, resumed: bool) -> tuple[int, ...] | None:
        """Those of the head."""
        return self.head.numbers_at(step, resumed=resumed)

    def draw(
        self,
        m: int,
        n: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The numbers of the head's sketch."""
        return self.head.draw(m, n, generator, dtype, out)

    def on(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The full-space map where deflating costs more than that."""
        return self if self.full_space_reason(m, n, device) is None else self.full

    def full_space_reason(self, m: int, n: int, device: torch.device | None = None) -> str | None:
        """Why the full-space map runs on an m×n matrix; ``None`` where it is deflated."""
        reason = self.head.full_space_reason(m, n, device)
        if reason is not None:
            return reason
        if not self.head.always_sketch and self._deflated_flops(m, n) >= self.full.flops(m, n):
            return "deflating would cost more"
        return None

    def step(self, M: Tensor, carry: Carry, draw: Draw) -> tuple[Polar, Carry]:
        """The head by Algorithm 1, δ from the carried vectors, then the rest."""
        m, n = M.shape[-2:]
        ops = products.of(M.device)
        X = ops.workable(M)
        A = (X if m <= n else X.mT).to(ops.dtype(X.dtype))
        A, norm = deflation.in_range(A, ops)
        polar, left = self.head.step(A, carry, draw)
        assert polar.factors is not None
        Q, B, Z = polar.factors.Q, polar.factors.B, polar.factors.Z
        frobenius = deflation.rest_frobenius(norm, B)
        B = deflation.projection(Q, B)
        known = carry.get("rest")
        vectors = None if known is None else known.mT.to(B.dtype)
        found = deflation.rest_norm(A, Q, B, norm, frobenius, vectors, rounds=ROUNDS)
        T = self._combined(A, Q, B, Z, found.delta, ops)
        left = Carry(left)
        left["rest"] = found.vectors.mT.to(M.dtype)
        return Polar(M, T if m <= n else T.mT), left

    def _combined(
        self, A: Tensor, Q: Tensor, B: Tensor, Z: Tensor, delta: Tensor, ops: Products
    ) -> Tensor:
        """T of the head's factors and of the rest."""
        polynomials = () if self.rest is None else self.rest.polynomials
        if self.jointly or not polynomials:
            s = deflation.joint_scale(polynomials) if polynomials else 1.0
            X = _sum(A, Q, s * Z.to(B.dtype) - B * (s / delta), s / delta)
            return X if self.rest is None else self.rest.iterated(X, ops)
        s = deflation.apart_scale(polynomials)
        X = _sum(A, Q, -B * (s / delta), s / delta)
        assert self.rest is not None
        P = self.rest.iterated(X, ops)
        return P + (Q.to(P.dtype) @ Z.to(P.dtype))

    def _polar(self, X: Tensor, numbers: Tensor | None) -> Tensor:
        return self.step(X, Carry(), Draw(numbers))[0].multiplied_out()

    def flops(self, m: int, n: int) -> int:
        """The paper's count of the path that is taken."""
        if self.full_space_reason(m, n) is not None:
            return self.full.flops(m, n)
        return self._deflated_flops(m, n)

    def _deflated_flops(self, m: int, n: int) -> int:
        """The head with its lift, two passes with 16 vectors a round for δ, and the steps."""
        d0, d1 = min(m, n), max(m, n)
        estimate = 2 * ROUNDS * flops.matmul(d0, min(deflation.VECTORS, d0), d1)
        steps = 0 if self.rest is None else self.rest.flops(m, n)
        apart = 0 if self.jointly or self.rest is None else flops.matmul(d0, self.head.width, d1)
        return self.head.flops(m, n) + estimate + steps + apart

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """Head and rest, or why the shape is not deflated."""
        reason = self.full_space_reason(m, n, device)
        if reason is not None:
            return f"{self.full.describe(m, n, device)}, full space: {reason}"
        head = self.head.describe(m, n, device)
        if self.rest is None:
            return f"Deflated: {head}; rest scaled"
        together = "jointly" if self.jointly else "apart"
        return f"Deflated: {head}; {together} {self.rest.describe(m, n, device)}"


def _sum(A: Tensor, Q: Tensor, head: Tensor, inverse: Tensor) -> Tensor:
    """A·inverse + Q·head in the precision and the memory layout of ``A``."""
    scaled = (A.to(inverse.dtype) * inverse).to(A.dtype)
    Q, head = Q.to(A.dtype), head.to(A.dtype)
    if A.mT.is_contiguous():
        return torch.baddbmm(scaled.mT, head.mT, Q.mT).mT
    return torch.baddbmm(scaled, Q, head)
