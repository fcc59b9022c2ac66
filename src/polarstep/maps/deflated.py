"""A sketched head and what the sketch leaves out: a cheap step that keeps every direction.

A low-rank map returns T = QZ with Z ≈ polar(B), B = QᵀM, and drops the rest R = M − QB. Q holds the
leading directions, so

    X₀ = QZ + R/δ = M/δ + Q(Z − B/δ)

is nearly flat for a δ of the size of R. A polynomial step or two on the singular values of X₀ lift it to
the polar factor: T = p(s·X₀) for a scale s with ‖s·X₀‖_op ≈ 1.

**δ** only has to be of the right size: it is 2 times the root mean square of R's singular values, which
‖M‖²_F − ‖B‖²_F gives for nothing (:func:`rest_size`). The polynomial steps then find the norm of X₀
themselves. In 16 bits the columns of Q are not quite orthonormal, and M − QB keeps some of the leading
directions. Steps take R = M − DB then, with the D of :meth:`polarstep.ops.Products.dual`, for which QᵀR
= 0 holds to the square of that error.

**s.** The steps need XXᵀ for X = X₀ in any case, and its norm λ is estimated from p products with 16
columns (:meth:`polarstep.ops.Products.scale_to_one`): five up to 1024 rows, seven from there on
(:func:`polarstep.numerics.norm_products`). s = 1/(margin·√λ) then brings ‖s·X₀‖_op to one. A leading
direction that the head has missed makes λ large and the whole step small.

**How far below ‖X₀‖²_op can λ be?** Let κ be the part of a vector v₀ that lies in the leading
eigenspace of G = X₀X₀ᵀ, and let all other eigenvalues be y times the first, which is the worst case for
a given κ by Jensen's inequality. Then λ²/‖G‖²_op = (κ + (1−κ)y²ᵖ)/(κ + (1−κ)y²ᵖ⁻²). κ = 6/m and the
worst y give √λ ≥ 0.86‖X₀‖_op for m = 768, 0.85 for m = 4096 and 0.82 for m = 16384
(:func:`norm_floor`). With MARGIN_OF_SCALE, ‖s·X₀‖_op ≤ 1.14. :func:`tolerant_scale` makes s smaller for
polynomials that explode soon after that: ‖T‖_op ≤ 2.6.

For a leading direction that is independent of the 16 vectors, the best of them has κ ≥ 6/m for a fifth
of all directions, 4/m for half of them and 1.3/m for 99%. ``"flat"`` stays below 2.6 up to 1.2, which
covers these 99%: ‖T‖_op ≤ 2.4 for m = 768 and 2.3 for m = 4096, on the very worst y, and ≤ 3.7 and 2.5
for all but one direction in a million (:func:`polarstep.theory.bounds.longest_deflated_step`). Five
products for m = 4096 would allow for 5.2 and 106. The vectors' entries have no pattern, so that sums and
differences of rows are seen as well as other directions. A leading singular direction that was made
orthogonal to all 16 vectors is not seen: ‖T‖_op was 4000 for such a matrix, whose new direction was 1.5
times as long as all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polarstep import flops
from polarstep.checked_values import check_bool
from polarstep.context import constant
from polarstep.maps.base import (
    Captured,
    Containing,
    Draw,
    Factors,
    Lift,
    MapState,
    Polar,
    PolarMap,
    SquaredNorm,
    Traits,
    counted_norm,
    wide,
)
from polarstep.maps.coefficients import Polynomial, evaluate
from polarstep.maps.full_space import NewtonSchulz, described_inside
from polarstep.maps.low_rank import LowRank
from polarstep.numerics import has_float64, unit_scaled
from polarstep.ops import Products, ops_of
from polarstep.ops.lazy import RowProduct

__all__ = [
    "FACTOR",
    "MARGIN_OF_SCALE",
    "TOLERATED_NORM",
    "TOLERATED_VALUE",
    "Deflated",
    "norm_floor",
    "rest_size",
    "tolerant_scale",
]


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
    what happens where they are wrong, is in :mod:`polarstep.maps.deflated`.

    **How long a step can be.** s comes from an estimate with 16 columns. With one step of ``"flat"``
    ‖T‖_op of up to 1.5 was measured (``results/step-cost``). No bound is certain: a
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
            on GPUs with such products (:mod:`polarstep.ops.triton`), and bfloat16 in place of
            float32 on CPUs with matrix tiles (:mod:`polarstep.ops.cpu`). Small matrices keep
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
        if not _is_full_space(self.full):
            raise TypeError(
                f"full={self.full!r}: expected a full-space map without random numbers or state, as "
                "NewtonSchulz(5, 'polar-express')"
            )
        check_bool(
            "float8", self.float8, "False keeps the step in the precision of the other products"
        )
        parts = [part.traits for part in (self.head, self.full, self.rest)]
        traits = replace(
            self.head.traits,
            rounds_input=all(part.rounds_input for part in parts),
            # The steps on the rest divide by a norm of their own.
            ignores_scale=all(part.ignores_scale for part in parts[:2]),
            uses_norm=True,
            rank=None,
        )
        object.__setattr__(self, "_traits", traits)

    @property
    def contained(self) -> LowRank:
        """The head."""
        return self.head

    @property
    def traits(self) -> Traits:
        """As the maps inside; δ comes from ‖M‖²_F − ‖B‖²_F, and no direction is dropped."""
        return self._traits

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

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """The head by Algorithm 1, then X₀ and its steps."""
        ops, A = ops_of(M.device), wide(M)
        A = A.to(ops.dtype(A.dtype))
        if not has_float64(M.device) and self.traits.ignores_scale:
            A, _ = unit_scaled(A)  # energies are in float32 there, and would leave its range
        polar, left = self.head.step(A, carry, draw)
        assert polar.factors is not None
        squares = draw.squares if polar.M is A else None
        A = polar.M  # the head may have scaled it, and B with it
        T, squared = self._lifted(A, polar.factors, ops, squares)
        T = T if M.shape[-2] <= M.shape[-1] else T.mT
        captured = Captured(A, polar.factors, self.head) if draw.shown else None
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
        return self.float8 and self.traits.rounds_input and not others

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
            ops_of(where).step_dtype(d0, d1, torch.float32) == torch.bfloat16
        )
        rest = described_inside(self.rest, m, n, device)
        return f"Deflated: {head}; {rest}{' in bfloat16' * tiles}"


def _is_full_space(polar: object) -> bool:
    """Whether ``polar`` is a map without random numbers and without state."""
    if not isinstance(polar, PolarMap):
        return False
    return polar.traits.draws == "never" and not polar.traits.carries


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


# Polynomial steps are applied to X₀/(this·√λ).
MARGIN_OF_SCALE = 1.08
# What ‖s·X₀‖_op may be, with room for rounding, where the estimate is at its worst, and ‖T‖_op then.
TOLERATED_VALUE = 1.17
TOLERATED_NORM = 2.6


def norm_floor(kappa: float, products: int) -> float:
    """The least √λ/‖X₀‖_op for a start v₀ with a part ``kappa`` in the leading eigenspace of X₀X₀ᵀ.

    >>> [round(norm_floor(6 / m, p), 2) for m, p in ((256, 5), (4096, 5), (4096, 7))]
    [0.89, 0.8, 0.85]
    """
    y, p = torch.linspace(0, 1, 100_001, dtype=torch.float64, device="cpu"), products
    seen = (kappa + (1 - kappa) * y ** (2 * p)) / (kappa + (1 - kappa) * y ** (2 * p - 2))
    return float(seen.min()) ** 0.25


# Not functools.cache, which torch.compile looks through, and warns of.
_SCALES: dict[tuple[Polynomial, ...], float] = {}


@constant
def tolerant_scale(polynomials: tuple[Polynomial, ...]) -> float:
    """The largest factor c ≤ 1 with |p(c·x)| ≤ 2.6 for all x ≤ 1.17.

    1 for ``"flat"`` and the paper's polynomials. Minimax polynomials without a safety factor explode
    soon after one: two steps made for [0.1, 1] have c = 0.88.
    """
    if polynomials not in _SCALES:
        if len(_SCALES) >= 256:
            _SCALES.clear()
        x = torch.arange(0, 2, 2.0**-14, dtype=torch.float64, device="cpu")
        highest = evaluate(polynomials, x).abs().cummax(0).values
        _SCALES[polynomials] = min(1.0, float(x[highest <= TOLERATED_NORM].max()) / TOLERATED_VALUE)
    return _SCALES[polynomials]
