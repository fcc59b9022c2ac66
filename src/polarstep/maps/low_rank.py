"""Algorithms 1 and 2: sketch to ℓ dimensions, iterate there, lift back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from polarstep import flops
from polarstep.checked_values import check_bool, check_integer
from polarstep.maps.base import Draw, Factors, MapState, Polar, PolarMap, wide
from polarstep.maps.full_space import NewtonSchulz, described_inside
from polarstep.maps.sketches import Gaussian, Sketch
from polarstep.maps.subspace import Basis, Finder, Fresh, Method, check_power
from polarstep.numerics import largest_entry, leaves_range, unit_scaled
from polarstep.ops import ops_of

__all__ = ["LowRank"]


@dataclass(frozen=True)
class LowRank(PolarMap):
    """The randomized polar map: Algorithm 1 of the paper, and Algorithm 2 with ``Kaczmarz()``.

    ::

        Y = (M Mᵀ)^h M Ω                    Ω: n×ℓ,  ℓ = s + p         project down
        Q = orth(Y),  B = Qᵀ M              Q: m×ℓ,  B: ℓ×n
        Z = inner(B)                                                   iterate
        T = Q Z                                                        project up

    Y is orthonormalized after each product; otherwise a few large singular values would drown the
    rest. With the paper's polynomials as the inner map, ‖T‖_op ≤ 1 always, and Proposition 2 bounds
    the expected alignment ⟨M, T⟩ from below.

    Tall matrices are transposed first, so that the basis lies on the short side. Where ℓ ≥ min(m, n),
    or where sketching a shape would cost more than it saves, the inner map runs in full space.

    Args:
        rank: s, the rank that the sketch should capture.
        oversample: p, extra columns that make the capture likely; Proposition 2 needs p ≥ 2.
        power: h, the number of power iterations. Half-integers are allowed: h = ½ is one product
            with M after the sketch, which then starts from the short side. It costs 8mnℓ where h =
            1 costs 10mnℓ.
        sketch: ``Gaussian()`` (Algorithm 1), ``Kaczmarz()`` (Algorithm 2), or ``Warm()``, which
            starts from the last step's factor. In an optimizer ``Warm()`` is the fastest of the
            three and, from the second step on, the most accurate for its price, but without the rest
            that :class:`Deflated` adds it trains a GPT a little worse than the others
            (``docs/which.md``). A sketch or a range finder (:class:`polarstep.maps.Finder`) of your
            own is possible, too.
        inner: the polar map of the small matrix B. Its δ is a norm of B, as in Algorithm 2, and
            sharper than Algorithm 1's δ ≥ ‖M‖_op.
        orth: how bases are made (:mod:`polarstep.maps.subspace`).
        always_sketch: sketch also where sketching costs more than the inner map in full space. For
            studies; no effect where ℓ ≥ min(m, n).
    """

    rank: int = 200
    oversample: int = 10
    power: float = 1
    sketch: Sketch | Finder = field(default_factory=Gaussian)
    inner: PolarMap = field(default_factory=lambda: NewtonSchulz(7, "quintic"))
    orth: Method = "auto"
    always_sketch: bool = False

    def __post_init__(self) -> None:
        check_integer("rank", self.rank, 1, "the paper takes 128–200")
        check_integer("oversample", self.oversample, 0, "the paper takes 10")
        for option in ("rank", "oversample"):  # NumPy's integers become Python's
            object.__setattr__(self, option, int(getattr(self, option)))
        check_power(self.power)
        if not isinstance(self.sketch, Sketch | Finder):
            raise TypeError(
                f"sketch={self.sketch!r}: expected a Sketch such as Gaussian(), or a Finder"
            )
        if not isinstance(self.inner, PolarMap):
            raise TypeError(f"inner={self.inner!r}: expected a polar map such as NewtonSchulz()")
        if self.inner.traits.draws != "never" or self.inner.traits.carries:
            raise ValueError(
                f"inner is a {type(self.inner).__name__} map: expected a full-space map without "
                "random numbers or state, as NewtonSchulz()"
            )
        if self.orth not in get_args(Method):
            raise ValueError(f"orth={self.orth!r}: expected one of {', '.join(get_args(Method))}")
        check_bool("always_sketch", self.always_sketch, "False leaves shapes to full space")
        # Random numbers and what is carried are the finder's, all else is the inner map's.
        its = self.finder  # raises on options that do not suit the sketch
        traits = replace(self.inner.traits, carries=its.carries, draws=its.draws, rank=self.width)
        object.__setattr__(self, "_traits", traits)

    @cached_property
    def finder(self) -> Finder:
        """Where the basis Q comes from."""
        if isinstance(self.sketch, Finder):
            return self.sketch.with_options(self.power, self.orth)
        return Fresh(self.sketch, self.power, orth=self.orth)

    @property
    def width(self) -> int:
        """ℓ = s + p, the number of columns of the sketch."""
        return self.rank + self.oversample

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        """Whether the finder can continue from ``carry``."""
        return self.finder.resumes(carry, min(m, n), max(m, n), self.width)

    def numbers(
        self,
        m: int,
        n: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The random numbers of the finder."""
        return self.finder.numbers(min(m, n), max(m, n), self.width, generator, dtype, out)

    def on(self, m: int, n: int, device: torch.device) -> PolarMap:
        """This map, or the inner map where an m×n matrix is not sketched."""
        return self if self.full_space_reason(m, n, device) is None else self.inner

    def full_space_reason(self, m: int, n: int, device: torch.device | None = None) -> str | None:
        """Why the inner map runs on an m×n matrix in full space; ``None`` where it is sketched."""
        if self.width >= min(m, n):
            return f"ℓ={self.width} ≥ {min(m, n)}"
        if self.always_sketch:
            return None
        if self._sketched_flops(m, n) >= self.inner.flops(m, n):
            return "sketching would cost more"
        fewest = 0 if device is None else ops_of(device).sketched_from
        if min(m, n) < fewest:
            return f"under {fewest} rows launches cost more than products"
        return None

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """Algorithm 1: find a basis Q of M, apply the inner map to QᵀM, lift back by Q."""
        A = wide(M)
        A = A.to(ops_of(M.device).dtype(A.dtype))
        basis, B = self._projected(A, carry, draw)
        if self._left_range(A, B):
            A, _ = unit_scaled(A)
            # Powers of two scale exactly. T and B belong to the scaled M.
            M = (A if M.shape[-2] <= M.shape[-1] else A.mT).to(M.dtype)
            basis, B = self._projected(A, carry, draw)
        lift, carry = self.finder.lift(self.inner, B, basis, self.width, carry, draw)
        orthonormal = self.finder.makes_orthonormal(A.device, A.dtype)
        factors = Factors(basis.Q, B, lift, self.width, orthonormal)
        return Polar(M, factors=factors, squared_norm=factors.counted_norm), carry

    def _projected(self, A: Tensor, carry: MapState, draw: Draw) -> tuple[Basis, Tensor]:
        """Q and B = QᵀA."""
        basis = self.finder.basis(A, self.width, carry, draw)
        return basis, ops_of(A.device).workable(basis.Q.mT @ A)

    def _left_range(self, A: Tensor, B: Tensor) -> bool:
        """Whether products with A were too large or too small for its precision; on a CPU only.

        B shows it, as B is smaller than A. B is zero where the device found the squares of A too small
        or too large, or where A is zero.
        """
        looks = ops_of(A.device).host_reads_are_free and not torch.compiler.is_compiling()
        if not looks or not self.traits.ignores_scale:
            return False
        size = largest_entry(B)
        if bool((size == 0).any()):
            size = torch.where(size == 0, largest_entry(A), size)
        # A NaN or an infinity in B may be from products that became too large.
        return bool((leaves_range(size, A.dtype) | ~size.isfinite()).any())

    def flops(self, m: int, n: int) -> int:
        """The paper's count for the path that is taken, sketched or in full space."""
        if self.full_space_reason(m, n) is not None:
            return self.inner.flops(m, n)
        return self._sketched_flops(m, n)

    def _sketched_flops(self, m: int, n: int) -> int:
        """Cost of the basis, the projection QᵀM, the inner map and the lift QZ."""
        d0, d1 = min(m, n), max(m, n)
        k = min(d0, self.width)
        basis = self.finder.flops(d0, d1, self.width)
        return basis + 2 * flops.matmul(d0, k, d1) + self.inner.flops(self.width, d1)

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """Rank, power and sketch, or why the shape is not sketched, for the routing table."""
        reason = self.full_space_reason(m, n, device)
        if reason is not None:
            return f"{self.inner.describe(m, n, device)}, full space: {reason}"
        where = device or torch.device("cpu")
        d0, d1 = min(m, n), max(m, n)
        found = self.finder.describe(d0, d1, self.inner, self.width, where)
        inner = described_inside(self.inner, self.width, d1, device)
        return f"LowRank({self.rank}+{self.oversample}, {found}) of {inner}"
