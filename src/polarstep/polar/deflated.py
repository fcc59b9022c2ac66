"""A sketched head and what the sketch leaves out: a cheap step that keeps every direction.

A low-rank map returns T = QZ with Z ≈ polar(B), B = QᵀM, and drops the rest R = M − QB. Q holds the
leading directions, so

    X₀ = QZ + R/δ = M/δ + Q(Z − B/δ)

is nearly flat for a δ of the size of R (:mod:`polarstep.polar.rest_norm`). A polynomial step or two on
the singular values of X₀ lift it to the polar factor: T = p(s·X₀) for a scale s with ‖s·X₀‖_op ≈ 1
(:mod:`polarstep.polar.flat_step_scale`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polarstep import flops, products
from polarstep.checked_values import check_bool
from polarstep.float64 import has_float64
from polarstep.polar.base import Carry, Draw, PolarMap, wide
from polarstep.polar.coefficients import Polynomial
from polarstep.polar.containing import Containing
from polarstep.polar.flat_step_scale import MARGIN_OF_SCALE, tolerant_scale
from polarstep.polar.low_rank import LowRank
from polarstep.polar.newton_schulz import NewtonSchulz
from polarstep.polar.rest_norm import rest_size
from polarstep.polar.result import Captured, Factors, Lift, Polar, SquaredNorm, counted_norm
from polarstep.products import Products
from polarstep.products.row_product import RowProduct
from polarstep.products.sizes import unit_scaled

__all__ = ["Deflated"]


def _head() -> LowRank:
    return LowRank(56, 8, inner=NewtonSchulz(4, "polar-express-sketch"))


@dataclass(frozen=True)
class Deflated(Containing):
    """A low-rank map that keeps the rest R = M − QB beside its head QZ.

    ::

        Q, B = QᵀM, Z ≈ polar(B)            the head: Algorithm 1
        X₀ = QZ + R/δ = M/δ + Q(Z − B/δ)
        T = p(s·X₀)                         δ of the size of R, s ≈ 1/‖X₀‖_op

    Newton–Schulz needs five steps because a few leading directions make up most of M's norm, so that
    small singular values have far to climb. The head holds these directions, so X₀ is nearly flat and
    one step of degree 17 lifts it, at 1.2 times the cost of one of the five. How δ and s are found, and
    what happens where they are wrong, is in :mod:`polarstep.polar.rest_norm` and
    :mod:`polarstep.polar.flat_step_scale`.

    **How long a step can be.** s comes from an estimate with 16 columns. With one step of ``"flat"``
    ‖T‖_op of up to 1.5 was measured (``results/step-cost/h200-accuracy.txt``). No bound is certain: a
    leading singular direction that is orthogonal to all 16 columns is not seen at all. These are bounds
    on ‖T‖_op, on the worst spectrum, for all leading directions but one in a hundred, in ten thousand
    and in a million:

    >>> from polarstep.theory.bounds import longest_deflated_step
    >>> flat = NewtonSchulz(1, "flat").polynomials
    >>> def longest(m, n):
    ...     shares = (1e-2, 1e-4, 1e-6)
    ...     return [round(longest_deflated_step(m, n, flat, unseen=p), 1) for p in shares]
    >>> longest(768, 3072), longest(4096, 4096)
    ([2.4, 2.5, 3.7], [2.3, 2.5, 2.5])

    Args:
        head: the low-rank map. The rest keeps what the head misses, but one step lifts a singular value
            σ of R to 10·σ/‖R‖_op at most. ℓ = a sixth of the short side has trained as full space did
            (``docs/which.md``).
        rest: polynomial steps for X₀, with no other options than ``steps`` and ``coefficients``.
        full: the map for matrices on which deflating would cost more than this map.
        float8: whether a single polynomial step may have products of fewer bits than all others: eight
            on GPUs with such products (:mod:`polarstep.products.float8`), and bfloat16 in place of
            float32 on CPUs with matrix tiles (:mod:`polarstep.products.tiles`). Small matrices keep
            the precision of the other products, and so do maps in which ``head.inner`` or ``full`` has a
            ``dtype``.

    ``Deflated()`` alone has a fresh sketch of rank 56 for every shape. The map that
    :class:`polarstep.Auto` takes has a warm sketch, and a rank that goes with the shape:

    >>> from polarstep import Auto, Warm
    >>> head = LowRank(120, 8, sketch=Warm(), inner=NewtonSchulz(4, "polar-express-sketch"))
    >>> Auto().on(768, 3072, torch.device("cuda")) == Deflated(head)
    True
    """

    head: LowRank = field(default_factory=_head)
    rest: NewtonSchulz = field(default_factory=lambda: NewtonSchulz(1, "flat"))
    full: PolarMap = field(default_factory=lambda: NewtonSchulz(5, "polar-express"))
    float8: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.head, LowRank):
            raise TypeError(f"head={self.head!r}: expected a LowRank map, as LowRank(56)")
        if not isinstance(self.rest, NewtonSchulz):
            raise TypeError(
                f"rest={self.rest!r}: expected polynomial steps, as NewtonSchulz(1, 'flat')"
            )
        _refuse_without_effect(self.rest)
        if not isinstance(self.full, PolarMap) or self.full.is_random or self.full.carries:
            raise TypeError(
                f"full={self.full!r}: expected a full-space map without random numbers or state, as "
                "NewtonSchulz(5, 'polar-express')"
            )
        check_bool(
            "float8", self.float8, "False keeps the step in the precision of the other products"
        )

    @property
    def contained(self) -> LowRank:
        """The head."""
        return self.head

    @property
    def rounds_input(self) -> bool:
        """As the maps inside do."""
        return all(part.rounds_input for part in (self.head, self.full, self.rest))

    @property
    def ignores_scale(self) -> bool:
        """As the head and the full-space map do; the rest is divided by its own norm."""
        return self.head.ignores_scale and self.full.ignores_scale

    @property
    def uses_norm(self) -> bool:
        """True: δ comes from ‖M‖²_F − ‖B‖²_F."""
        return True

    def effective_rank(self, m: int, n: int) -> int:
        """All of min(m, n): the rest is kept."""
        return min(m, n)

    def on(self, m: int, n: int, device: torch.device) -> PolarMap:
        """This map, or the full-space map where deflating would cost more."""
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
        """The head by Algorithm 1, then X₀ and its steps."""
        ops, A = products.of(M.device), wide(M)
        if not has_float64(M.device) and self.ignores_scale:
            A, _ = unit_scaled(A)  # energies are in float32 there, and would leave its range
        polar, left = self.head.step(A, carry, draw)
        assert polar.factors is not None
        squares = draw.squares if polar.M is A else None
        A = polar.M  # the head may have scaled it, and B with it
        T, squared = self._lifted(A, polar.factors, ops, squares)
        T = T if M.shape[-2] <= M.shape[-1] else T.mT
        captured = Captured(A, polar.factors, self.head.innermost) if draw.shown else None
        return Polar(M, T, squared_norm=squared, captured=captured), left

    def _lifted(
        self,
        A: Tensor,
        head: Factors,
        ops: Products,
        squares: Tensor | None,
    ) -> tuple[Tensor | RowProduct, SquaredNorm]:
        """p(s·X₀) and a function for ‖T‖²_F, which after several steps takes a pass over T."""
        left, factor, floor = rest_size(A.shape[-2], head.width, _precision(A, head))
        inverse = ops.inverse_rest_size(A, head.projected, left, factor, floor, squares)
        first, *others = self.rest.polynomials
        T, of_first = ops.flat_step(
            A,
            head.as_computed,
            inverse,
            first,
            MARGIN_OF_SCALE / tolerant_scale(self.rest.polynomials),
            most=1.5 * head.width + left / factor**2,
            float8=self._may_round(others),
        )
        if not others:
            return T, lambda: counted_norm(of_first(), head.width)
        assert isinstance(T, Tensor)
        T = ops.iterate(T, tuple(others))
        return T, lambda: counted_norm(Lift(T).squared_norm(), head.width)

    def _may_round(self, others: Sequence[Polynomial]) -> bool:
        """Whether a step may have fewer bits: if it is allowed, and no ``others`` follow it."""
        return self.float8 and self.rounds_input and not others

    def flops(self, m: int, n: int) -> int:
        """The paper's count of the path that is taken."""
        if self.full_space_reason(m, n) is not None:
            return self.full.flops(m, n)
        return self._deflated_flops(m, n)

    def _deflated_flops(self, m: int, n: int) -> int:
        """The head with its lift, products with 16 vectors for the norm, and the steps."""
        parts = flops.deflation_parts(m, n, self.rest.flops(m, n))
        return self.head.flops(m, n) + sum(parts.values())

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """Head and rest, or why the shape is not deflated."""
        reason = self.full_space_reason(m, n, device)
        if reason is not None:
            return f"{self.full.describe(m, n, device)}, full space: {reason}"
        head = self.head.describe(m, n, device)
        d0, d1, where = min(m, n), max(m, n), device or torch.device("cpu")
        tiles = self._may_round(self.rest.polynomials[1:]) and (
            products.of(where).step_dtype(d0, d1, torch.float32) == torch.bfloat16
        )
        rest = self.rest.describe_as_inner(m, n, device)
        return f"Deflated: {head}; {rest}{' in bfloat16' * tiles}"


def _refuse_without_effect(steps: NewtonSchulz) -> None:
    """Raise for options that the steps on X₀ do not have."""
    for option in ("delta", "dtype", "form"):
        given = getattr(steps, option)
        if given != getattr(NewtonSchulz, option):
            raise ValueError(
                f"rest has {option}={given!r}, which has no effect: Deflated measures the scale of X₀ "
                "itself, and multiplies it in the device's precision and in one form; expected steps "
                f"and coefficients alone, NewtonSchulz({steps.steps}, {steps.coefficients!r})"
            )


def _precision(A: Tensor, head: Factors) -> float:
    """ε of the least precise of M and its factors."""
    return max(torch.finfo(X.dtype).eps for X in (A, head.columns, head.projected))
