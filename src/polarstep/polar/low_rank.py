"""Algorithms 1 and 2: sketch to ℓ dimensions, iterate there, lift back."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from numbers import Real
from typing import get_args

import torch
from torch import Tensor

from polarstep import flops
from polarstep.matrix import product_dtype, product_like, sketch_dtype, workable
from polarstep.polar import warm
from polarstep.polar.base import Factors, Kept, PolarMap, Sketched, Weighted, lifted
from polarstep.polar.newton_schulz import NewtonSchulz
from polarstep.polar.orthonormal import Method, orthonormalize
from polarstep.sketch import Gaussian, Kaczmarz, Sketch, Warm
from polarstep.sketch.base import default_generator
from polarstep.sketch.warm import Start

__all__ = ["LowRank"]

# On a GPU a smaller matrix is done in full space before a sketch has launched its kernels.
SKETCHED_ON_GPU_FROM = 768
# Tensor cores want bfloat16 in rows of a multiple of this length.
ALIGNED = 16


@dataclass(frozen=True)
class LowRank(PolarMap):
    """The randomized polar map: Algorithm 1 of the paper, and Algorithm 2 with ``Kaczmarz()``.

    ::

        Y = (M Mᵀ)^h M Ω                    Ω: n×ℓ,  ℓ = s + p         project down
        Q = orth(Y),  B = Qᵀ M              Q: m×ℓ,  B: ℓ×n
        Z = inner(B)                                                   iterate
        T = Q Z                                                        project up

    Y is orthonormalized after each product, without which a few large singular values drown the
    rest. With the paper's polynomials inside, ‖T‖_op ≤ 1 always, and Proposition 2 bounds the
    expected alignment ⟨M, T⟩ from below.

    Tall matrices are transposed first, so that the basis lies on the short side. Where ℓ ≥ min(m, n),
    or where sketching a shape would cost more than it saves, the inner map runs in full space.

    Args:
        rank: s, the rank one hopes to capture.
        oversample: p, extra columns that make capturing it likely; Proposition 2 needs p ≥ 2.
        power: h, the number of power iterations. Half-integers are allowed: h = ½ is one product
            with M after the first one, so it costs 8mnℓ where h = 1 costs 10mnℓ, and the sketch
            starts from the short side.
        sketch: ``Gaussian()`` (Algorithm 1), ``Kaczmarz()`` (Algorithm 2), or ``Warm()``, which
            starts from the last step's factor: in an optimizer the fastest of the three and, from
            the second step on, the most accurate for its price.
        inner: the polar map of the small matrix B. Its δ is a norm of B, which is what Algorithm 2
            says and is sharper than Algorithm 1's δ ≥ ‖M‖_op.
        orth: how bases are made (:mod:`polarstep.polar.orthonormal`).
        always_sketch: sketch also where that costs more than the inner map in full space. For
            studies; it changes nothing where ℓ ≥ min(m, n).
        keep: in an optimizer, the number of steps that work in one basis Q. It is made at every
            ``keep``-th step, from the M of that step; between them T = Q·inner(QᵀM) in the basis that
            is there, without a sketch. ‖T‖_op ≤ 1 holds as ever; what M has gained outside of that
            basis waits in the momentum for the next one. A plain call of the map makes its own.
    """

    rank: int = 200
    oversample: int = 10
    power: float = 1
    sketch: Sketch = field(default_factory=Gaussian)
    inner: PolarMap = field(default_factory=lambda: NewtonSchulz(steps=7))
    orth: Method = "auto"
    always_sketch: bool = False
    keep: int = 1

    def __post_init__(self) -> None:
        if not _is_int(self.rank) or self.rank < 1:
            raise ValueError(
                f"rank={self.rank!r}: expected an integer ≥ 1; the paper takes 128–200"
            )
        if not _is_int(self.oversample) or self.oversample < 0:
            raise ValueError(
                f"oversample={self.oversample!r}: expected an integer ≥ 0; the paper takes 10"
            )
        form = f"power={self.power!r}: expected 0, ½, 1, 1½, …; the paper takes 1 or 2"
        if not isinstance(self.power, Real):
            raise TypeError(form)
        if not (0 <= self.power < float("inf") and float(2 * self.power).is_integer()):
            raise ValueError(form)
        if not isinstance(self.sketch, Sketch):
            raise TypeError(f"sketch={self.sketch!r}: expected a Sketch such as Gaussian()")
        if isinstance(self.sketch, Warm) and self.power != int(self.power):
            raise ValueError(
                f"power={self.power!r} with Warm(): expected a whole number, 0, 1, 2, …; its start "
                "lies on the long side of the matrix, where half powers do not begin"
            )
        if not isinstance(self.inner, PolarMap):
            raise TypeError(f"inner={self.inner!r}: expected a polar map such as NewtonSchulz()")
        if isinstance(self.inner, LowRank):
            raise ValueError("inner is a LowRank map: expected a full-space one, as NewtonSchulz()")
        if self.orth not in get_args(Method):
            raise ValueError(f"orth={self.orth!r}: expected one of {', '.join(get_args(Method))}")
        if not isinstance(self.always_sketch, bool):
            raise TypeError(f"always_sketch={self.always_sketch!r}: expected True or False")
        if not _is_int(self.keep) or self.keep < 1:
            raise ValueError(
                f"keep={self.keep!r}: expected an integer ≥ 1, the steps that a basis is kept for"
            )
        if self.keep > 1 and isinstance(self.sketch, Warm):
            raise ValueError(
                f"keep={self.keep} with Warm(): expected 1; a warm sketch goes on from the last step's "
                "factor at every step. Keep the basis of a Gaussian() one"
            )

    @property
    def width(self) -> int:
        """ℓ = s + p, the number of columns of the sketch."""
        return self.rank + self.oversample

    @property
    def is_random(self) -> bool:
        """A sketch is drawn."""
        return True

    @property
    def rounds_input(self) -> bool:
        """As the inner map does, which may run in full space."""
        return self.inner.rounds_input

    @property
    def ignores_scale(self) -> bool:
        """As the inner map does."""
        return self.inner.ignores_scale

    @property
    def is_warm(self) -> bool:
        """Whether a step can start from the last one's factor."""
        return isinstance(self.sketch, Warm)

    @property
    def keeps_basis(self) -> bool:
        """Whether a step can work in an earlier one's basis."""
        return self.keep > 1

    def makes_basis(self, step: int) -> bool:
        """Whether ``step``, counted from zero, makes a basis.

        All of the first ones do: at step zero whole gradients may be zero, and have no basis.
        """
        return step < self.keep or step % self.keep == 0

    def full_space_reason(self, m: int, n: int, device: torch.device | None = None) -> str | None:
        """Why the inner map runs on an m×n matrix in full space; ``None`` where it is sketched."""
        if self.width >= min(m, n):
            return f"ℓ={self.width} ≥ {min(m, n)}"
        if self.always_sketch:
            return None
        if self._sketched_flops(m, n) >= self.inner.flops(m, n):
            return "sketching would cost more"
        if device is not None and device.type == "cuda" and min(m, n) < SKETCHED_ON_GPU_FROM:
            return f"under {SKETCHED_ON_GPU_FROM} rows launches cost more than products"
        return None

    def draw(
        self,
        m: int,
        n: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The random numbers for m×n matrices: Ω is on the long side, for half powers on the short."""
        whole = flops.power_products(self.power) % 2 == 0
        side = max(m, n) if whole else min(m, n)
        return self.sketch.draw(side, self.width, generator, dtype, out)

    def basis(self, A: Tensor, numbers: Tensor, start: Start | None = None) -> Tensor:
        """Q: an orthonormal basis (batch, m, ℓ) of the range of (M Mᵀ)^h M Ω for wide ``A`` = M.

        A chain of 2h + 1 products with M and Mᵀ in turn that ends on the short side, so it starts
        with M for whole h and with Mᵀ for half ones. In bfloat16 zero columns may follow.

        ``start`` has a warm sketch's Ωᵀ. It replaces the power iterations: it has had those of all the
        steps before.
        """
        if start is not None:
            Y = self._times(A, start.omega_transposed(A.dtype).mT)
            return orthonormalize(workable(Y), self.orth).to(A.dtype)
        dtype = self._sketch_dtype(A.shape[-2], A.shape[-1], A.dtype, A.device)
        times = self._times if dtype == A.dtype else _times_by_tiles
        further = flops.power_products(self.power)
        exact = A if further % 2 == 0 else A.mT
        factor = exact.to(dtype)
        if self._samples or self._suits_gpu(factor):
            Y = self.aligned(self.sketch.times(exact, numbers).mT).mT
        else:
            Y = times(factor, self.sketch.omega(factor, numbers).expand(len(A), -1, -1))
        for _ in range(further):
            factor = factor.mT
            Q = orthonormalize(workable(Y), self.orth, rough=True).to(dtype)
            Y = times(factor, Q)
        return orthonormalize(workable(Y), self.orth).to(A.dtype)

    @property
    def _samples(self) -> bool:
        """Whether MΩ takes columns of M as they are, without a product."""
        return isinstance(self.sketch, Kaczmarz)

    def _suits_gpu(self, factor: Tensor) -> bool:
        """Whether MΩ, with one Ω for all M, has rows of a length that tensor cores like."""
        return factor.device.type != "cpu" and self.aligned_width(factor.dtype) == self.width

    def _sketch_dtype(
        self, m: int, n: int, dtype: torch.dtype, device: torch.device
    ) -> torch.dtype:
        """The precision of the products that make the basis of an m×n matrix; ``dtype`` is its own.

        To round M takes as long as one product gains by it.
        """
        products = flops.power_products(self.power) + (not self._samples)
        return dtype if self.is_warm or products < 2 else sketch_dtype(m, n, dtype, device)

    def _times(self, factor: Tensor, S: Tensor) -> Tensor:
        """``factor·S``, with zero columns where :meth:`aligned` has zero rows.

        As (Sᵀ·factorᵀ)ᵀ: columns lie in memory one by one, as a factorization wants them, rows would
        have a length that tensor cores do not like, and a CPU takes a tenth longer for those.
        """
        return self.aligned_product(S.mT, factor.mT).mT

    def aligned_product(self, S: Tensor, A: Tensor) -> Tensor:
        """``S·A``, with zero rows as :meth:`aligned` has them but without a copy."""
        width = self.aligned_width(S.dtype)
        if width == S.shape[-2]:
            return S @ A
        Y = S.new_zeros(len(A), width, A.shape[-1])
        torch.bmm(S, A, out=Y[:, : S.shape[-2]])
        return Y

    def aligned(self, Y: Tensor) -> Tensor:
        """``Y`` with zero rows to a number that tensor cores like; the maps leave them zero."""
        missing = self.aligned_width(Y.dtype) - Y.shape[-2]
        return torch.nn.functional.pad(Y, (0, 0, 0, missing)) if missing else Y

    def aligned_width(self, dtype: torch.dtype) -> int:
        """ℓ, with those rows."""
        if dtype != torch.bfloat16 or self.orth not in ("auto", "products"):
            return self.width
        return self.width + -self.width % ALIGNED

    def _polar(self, X: Tensor, generator: torch.Generator | None) -> Tensor:
        m, n = X.shape[-2:]
        if self.full_space_reason(m, n, X.device) is not None:
            return self.inner.as_computed(X, generator=generator)
        A = X.to(product_dtype(X))
        Q = self.basis(A, self.numbers_for(X, generator))
        return product_like(X, *self.in_basis(A, Q).two_factors)

    def numbers_for(self, X: Tensor, generator: torch.Generator | None) -> Tensor:
        """The random numbers for the matrices ``X``, where they are and precise enough for them."""
        generator = default_generator(generator, X.device)
        dtype = torch.promote_types(X.dtype, torch.float32)
        return self.draw(X.shape[-2], X.shape[-1], generator, dtype).to(X.device)

    def in_basis(self, A: Tensor, Q: Tensor) -> Factors | Weighted:
        """T of wide ``A`` in the basis Q that :meth:`basis` made, of it or of another matrix."""
        B = workable(Q.mT @ A)
        orthonormal = self.orth != "products" and (self.orth != "auto" or A.device.type == "cpu")
        orthonormal &= not self._samples  # repeated columns come out as zero
        weighted = self.inner.weight(B) if isinstance(self.inner, NewtonSchulz) else None
        if weighted is not None:
            return Weighted(Q, B, *weighted, orthonormal)
        Z = self.inner.as_computed(B)
        Q = Q.to(Z.dtype)  # T = QZ takes one precision; on a GPU the Gram form may end in float16
        Q, B, Z = Q[..., : self.width], B[:, : self.width], Z[:, : self.width]
        return Factors(Q, B, Z, orthonormal)

    def factored(
        self,
        M: Tensor,
        *,
        generator: torch.Generator | None = None,
        start: Start | Kept | None = None,
        numbers: Tensor | None = None,
    ) -> tuple[Tensor, Factors | None]:
        """T(M) with Q, B and Z; without them where the inner map runs in full space."""
        step = self.sketched(M, generator=generator, start=start, numbers=numbers)
        if step is None:
            return self(M, generator=generator), None
        return lifted(step, M), step.factors

    def sketched(
        self,
        M: Tensor,
        *,
        generator: torch.Generator | None = None,
        start: Start | Kept | None = None,
        numbers: Tensor | None = None,
    ) -> Sketched | None:
        """Two factors of T(M); ``None`` where the inner map runs in full space."""
        m, n = M.shape[-2:]
        if M.numel() == 0 or self.full_space_reason(m, n, M.device) is not None:
            return None
        X = workable(M.reshape(-1, m, n))
        X = X if m <= n else X.mT
        A = X.to(product_dtype(X))
        if isinstance(start, Kept):
            return self.in_basis(A, self.aligned(start.Qt.to(A.dtype)).mT)
        numbers = self.numbers_for(X, generator) if numbers is None else numbers
        if warm.applies(self, m, n, A.device, A.dtype):
            known = None if start is None else start.to(A.dtype)
            return warm.warm_step(self, A, numbers, known)
        step = self.in_basis(A, self.basis(A, numbers, start))
        if not isinstance(self.sketch, Warm):
            return step
        next_start = Start(self.sketch.next_start(step.factors.Z, numbers))
        return replace(step.factors, start=next_start)

    def flops(self, m: int, n: int) -> int:
        """The paper's count, of the sketched or the full-space path, whichever is taken."""
        if self.full_space_reason(m, n) is not None:
            return self.inner.flops(m, n)
        return self._sketched_flops(m, n)

    def _sketched_flops(self, m: int, n: int) -> int:
        d0, d1 = min(m, n), max(m, n)
        first = (d0, d1) if flops.power_products(self.power) % 2 == 0 else (d1, d0)
        return flops.low_rank(
            d0,
            d1,
            self.width,
            0 if self.is_warm else self.power,  # a warm start iterates once a step
            self.inner.flops(self.width, d1),
            sketch_flops=self.sketch.flops(*first, self.width),
            keep=self.keep,
        )

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """Rank, power and sketch, or why the shape is not sketched, for the routing table."""
        reason = self.full_space_reason(m, n, device)
        if reason is not None:
            return f"{self.inner.describe(m, n, device)}, full space: {reason}"
        sketch = type(self.sketch).__name__
        where = device or torch.device("cpu")
        dtype = product_dtype(torch.empty(0, device=where))
        if warm.applies(self, m, n, where, dtype):
            sketch += ", whitened"
        if self._sketch_dtype(m, n, dtype, where) != dtype:
            sketch += " in bfloat16"
        if self.keeps_basis:
            sketch += f", basis kept {self.keep} steps"
        inner = self.inner.describe(self.width, max(m, n), device)
        return f"LowRank({self.rank}+{self.oversample}, h={self.power:g}, {sketch}) of {inner}"


def _times_by_tiles(factor: Tensor, S: Tensor) -> Tensor:
    """``factor·S`` in bfloat16 on a CPU, without a transposed factor, which torch would copy first."""
    if factor.is_contiguous():
        return factor @ S.contiguous()
    return (S.mT @ factor.mT).mT


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
