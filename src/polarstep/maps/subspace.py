"""The subspace that a low-rank map works in: how its basis Q is found, and made orthonormal.

**Three ways to make columns orthonormal** (:func:`orthonormalize`). ``householder`` is the reference.
It cannot fail, but a GPU runs it at a thousandth of its speed and a CPU at a third. ``cholesky``
factors the Gram matrix, checks the result and falls back to Householder for matrices where the
factorization failed; the check waits for the device, which costs a CPU nothing. ``products`` cannot
fail and needs no check: Y(YᵀY)^{-½} *is* an orthonormal basis of range(Y), so a polar map of high gain
is an orthonormalization.

Numerically zero directions of Y become some orthonormal completion (``householder``, ``cholesky``)
or columns of norm below one (``products``). Zero columns of Y stay zero, except with
``householder``. All three keep ‖Q‖_op ≤ 1 up to rounding, which is all that ‖T‖_op ≤ 1 needs.

**A finder** (:class:`Finder`) finds an orthonormal basis Q of M's leading directions. Algorithm 1
(:class:`polarstep.LowRank`) is T = Q·inner(QᵀM) for any Q. A finder computes Q, counts its cost, and
may leave tensors for the next step. Finders are frozen dataclasses.

:class:`Fresh` takes a new sketch at every step: steps 1 and 2 of Algorithms 1 and 2.

:class:`Warm` starts from the last step's factor instead of fresh random columns: ``Ω = Z₋ᵀ + ε·N`` with
Z₋ the factor of the last step's T₋ = Q₋Z₋. Momentum moves slowly, so Z₋ᵀ already spans most of the
directions sought. One product then does the work of a power iteration, because the last step has done
the other product.

**Without Z, on a GPU.** Where the inner map runs its first step on B and all others on a Gram
matrix, Z = WX with X the result of the first step and W of size ℓ×ℓ. Forming Z, which is ℓ×n, would
cost a product, and adding noise to it a pass over memory. So Z is never formed. This step starts
from X₂ and W₂ of the last step, as Ωᵀ = V·S with S = X₂ + ε·N and V = W₂². For wide M, where Y, Q,
B and X have ℓ rows::

    Y = V·(S·Mᵀ)
    Q = W₁X₁                           the polar map of Y by five polynomials
    B = Q·M
    Z = W₂X₂                           the inner map of B
    T = QᵀZ = (W₂·Q)ᵀ·X₂
    S ← X₂ + ε·N,  V ← W₂²

Thanks to V five polynomials are enough, where a sketch of unknown condition takes six. If M stands
still, S·Mᵀ = X₂MᵀQᵀQ = X₂BᵀQ, in the range of Q, has the singular values φ₁(σ)σ for the singular
values σ of B. W₂² divides them by about φ₁(σ)². What is left spreads as σ/φ₁(σ), which depends on the
first step alone. V amplifies the noise by as much, so the noise must not exceed a tenth
(:data:`MOST_NOISE`).

Where a few directions tower over the others, the other rows of Y are noise, which M has multiplied: as
large as the tower, and beside it as small as the rest of M. A row that the polynomials leave short
holds some of the tower, and M − DB, divided by the size of the rest, then has more of it than of the
rest. With four polynomials, which lift a hundredth of ‖Y‖_F close to one, a step with 512 columns lost γ
= 0.81 on sixteen spikes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from polarstep import flops
from polarstep.checked_values import check_number, check_positive
from polarstep.context import constant
from polarstep.maps.base import Draw, Draws, Lift, MapState, PolarMap
from polarstep.maps.coefficients import Polynomial, evaluate, polar_express, resolve
from polarstep.maps.full_space import (
    GRAM_FROM,
    NewtonSchulz,
    apply_polynomials,
    fits_float16,
    lift_of,
    restarts,
    rounding,
    scaled_gram,
    small_polar,
    suits_small,
)
from polarstep.maps.sketches import Gaussian, Sketch
from polarstep.ops import ops_of

__all__ = [
    "Basis",
    "Finder",
    "Fresh",
    "Method",
    "Warm",
    "check_power",
    "orthonormalize",
    "resolved",
    "whitened_polynomials",
]


Method = Literal["auto", "householder", "cholesky", "products"]


def orthonormalize(Y: Tensor, method: Method = "auto", *, rough: bool = False) -> Tensor:
    """A basis Q of range(Y), of the shape of ``Y``: (batch, m, ℓ) with m ≥ ℓ.

    ``"auto"`` is ``cholesky`` in float32 on a CPU, ``products`` on other devices, and
    ``householder`` in float64. With ``rough`` the columns are only well conditioned, which is
    enough between two power iterations.
    """
    chosen = resolved(method, Y.dtype, Y.device)
    if chosen == "householder":
        return _householder(Y)
    if chosen == "cholesky":
        return _cholesky(Y, rough=rough)
    return _products(Y, rough=rough)


def resolved(method: Method, dtype: torch.dtype, device: torch.device) -> str:
    """``method``, or the method that ``"auto"`` stands for with this dtype and device."""
    if method != "auto":
        return method
    return "householder" if dtype == torch.float64 else ops_of(device).orthonormalization


def _householder(Y: Tensor) -> Tensor:
    """The Q of Y = QR with R's diagonal positive, so that Q is the same as from Cholesky-QR."""
    Q, R = torch.linalg.qr(Y)
    negative = R.diagonal(dim1=-2, dim2=-1) < 0
    return torch.where(negative[..., None, :], -Q, Q)


def _cholesky(Y: Tensor, *, rough: bool) -> Tensor:
    """Shifted Cholesky-QR, repeated until QᵀQ = I; Householder for matrices that do not get there.

    A pass squares the condition number. So the first pass adds a shift to stay positive definite,
    and leaves Q well conditioned but not orthonormal; later passes finish. A pass that starts with
    ‖QᵀQ − I‖ ≤ ½ ends with QᵀQ = I up to rounding and is the last. A zero column stays zero,
    because its entry on the diagonal of QᵀQ is set to one.
    """
    Qt, G, trace = scaled_gram(Y.mT)
    _mark_zero_columns(G).add_(10 * torch.finfo(Y.dtype).eps * trace[..., 0])
    Q, broken = _divided(Qt.mT, G)
    if not rough:
        Q, broken = _finished(Q, broken)
    if bool(broken.any()):
        Q[broken] = _householder(Y[broken])
    return Q


def _finished(Q: Tensor, broken: Tensor) -> tuple[Tensor, Tensor]:
    """Q after at most three more passes, and which matrices did not reach QᵀQ = I."""
    identity = torch.eye(Q.shape[-1], dtype=Q.dtype, device=Q.device)
    unfinished = broken
    for _ in range(3):
        G = ops_of(Q.device).gram(Q.mT)
        _mark_zero_columns(G)
        far = torch.linalg.matrix_norm(G - identity) > 0.5
        Q, failed = _divided(Q, G)
        broken = broken | failed
        unfinished = far & ~broken
        if not bool(unfinished.any()):
            break
    return Q, broken | unfinished


def _mark_zero_columns(G: Tensor) -> Tensor:
    """Set the diagonal of G = QᵀQ to one at zero columns of Q; return the diagonal as a view."""
    diagonal = G.diagonal(dim1=-2, dim2=-1)
    return diagonal.add_(diagonal == 0)


def _divided(Q: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """``QL⁻ᵀ`` with G = LLᵀ, and which matrices have no such L; their Q is returned unchanged."""
    L, info = torch.linalg.cholesky_ex(G)
    failed = info > 0
    if bool(failed.any()):
        identity = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)
        L = torch.where(failed[:, None, None], identity, L)
    return torch.linalg.solve_triangular(L.mT, Q, upper=True, left=False), failed


def _products(Y: Tensor, *, rough: bool) -> Tensor:
    """The polar factor of Y by polynomials alone.

    PolarExpress lifts singular values down to 1e-4 of the norm close to one. The paper's quintic,
    which never exceeds one, brings them to one. Between power iterations four steps are enough,
    which lift singular values down to 1e-3; three would lose 0.02 of γ on real momentum.
    """
    ops = ops_of(Y.device)
    dtype = ops.dtype(Y.dtype)
    lift = resolve("polar-express", 4 if rough else 6)
    if dtype == torch.bfloat16 and not rough:
        # bfloat16 rounds a singular value of one by up to 2⁻⁸; shrinking by 2⁻⁸ keeps ‖Q‖_op ≤ 1.
        *first, last = lift
        lift = (*first, tuple((1 - 2**-8) * c for c in last))
    if suits_small(Y.mT, lift):
        return small_polar(Y.mT, lift, by_gram=False).mT
    X = ops.normalized(Y, dtype).mT
    if rough or dtype == torch.bfloat16:
        return ops.iterate(X, lift).mT
    return apply_polynomials(X, (*lift, *resolve("quintic", 2))).mT


# A list, because torch.compile traces through functools.cache and warns about it.
_WHITENED: list[tuple[tuple[Polynomial, ...], ...]] = []


@constant
def whitened_polynomials() -> tuple[tuple[Polynomial, ...], ...]:
    """Five polynomials that lift singular values of Y down to 0.003·‖Y‖_F close to one, in runs.

    The Gram matrix is formed afresh before each run (:func:`restarts`). The polynomials are scaled to
    end under one, as in :func:`_products`.
    """
    if not _WHITENED:
        least = 0.003
        *others, last = polar_express(least, 5)
        x = torch.linspace(least, 1, 4001, dtype=torch.float64, device="cpu")
        scale = (1 - 2**-10) / float(evaluate((*others, last), x).max())
        first, *rest = *others, tuple(scale * c for c in last)
        ends = [0, *restarts(tuple(rest), rounding(torch.float16)), len(rest)]
        _WHITENED.append(((first,), *(tuple(rest[a:b]) for a, b in pairwise(ends))))
    return _WHITENED[0]


@dataclass(frozen=True)
class Basis:
    """Q, and Qᵀ in float16 where the finder has computed it."""

    Q: Tensor  # (batch, m, ≥ ℓ); columns beyond ℓ are zero
    halves: Tensor | None = None  # (batch, ≥ ℓ, m): Qᵀ in float16


@dataclass(frozen=True, kw_only=True)
class Finder(ABC):
    """How the basis of a low-rank map is found. All matrices here are wide, (batch, m, n) with m ≤ n."""

    draws: ClassVar[Draws] = "every step"
    """Which steps need new random numbers."""
    carries: ClassVar[tuple[str, ...]] = ()
    """The names of the tensors that a step may leave for the next step."""

    # How columns are made orthonormal (polarstep.maps.subspace). A LowRank gives its own.
    orth: Method = field(default="auto", repr=False)

    @abstractmethod
    def basis(self, A: Tensor, width: int, carry: MapState, draw: Draw) -> Basis:
        """Q with ℓ = ``width`` columns for the matrices ``A``, in the precision of ``A``."""

    def numbers(
        self,
        m: int,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        """The random numbers for m×n matrices, m ≤ n, written to ``out`` if it is given."""
        raise TypeError(
            f"{type(self).__name__} draws {self.draws!r}, but it has no method numbers(m, n, width, "
            'generator, dtype, out): expected one, or draws = "never"'
        )

    @abstractmethod
    def flops(self, m: int, n: int, width: int) -> int:
        """Mean cost per step of the basis of an m×n matrix, m ≤ n, in the paper's convention."""

    def lift(
        self, inner: PolarMap, B: Tensor, basis: Basis, width: int, carry: MapState, draw: Draw
    ) -> tuple[Lift, MapState]:
        """The polar factor of B = QᵀM by the inner map, and the carry for the next step."""
        return lift_of(inner, B), MapState()

    def resumes(self, carry: MapState, m: int, n: int, width: int) -> bool:
        """Whether a step can continue from ``carry``, perhaps of another width or finder."""
        return not self.carries

    def makes_orthonormal(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether QᵀQ = I up to rounding, with no column missing."""
        return resolved(self.orth, dtype, device) != "products"

    def padded(self, width: int, dtype: torch.dtype, device: torch.device) -> int:
        """ℓ, or a little more where products on this device run faster with zero columns added."""
        if resolved(self.orth, dtype, device) != "products":
            return width  # a factorization would fill zero columns
        return ops_of(device).padded(width, dtype)

    def with_options(self, power: float, orth: Method) -> Self:
        """This finder with the options of the :class:`~polarstep.LowRank` that uses it.

        Raises:
            ValueError: if ``LowRank`` has an option that the finder should have, or the other way round.
        """
        if power != 1:
            raise ValueError(
                f"power={power!r} with {self!r}: expected the default, 1; give options to the finder "
                "itself"
            )
        self._refuse_own(orth=orth)
        return replace(self, orth=orth)

    def _refuse_own(self, **of_low_rank: object) -> None:
        """Raise for a value that was given to this finder and that ``LowRank`` would replace."""
        for each in fields(self):
            own = getattr(self, each.name)
            if each.name in of_low_rank and own not in (each.default, of_low_rank[each.name]):
                raise ValueError(
                    f"{each.name}={own!r} of {self!r} has no effect in LowRank, which gives its own "
                    f"{each.name}={of_low_rank[each.name]!r} to its finder: expected "
                    f"LowRank(..., {each.name}={own!r})"
                )

    @property
    def fresh_sketch(self) -> Fresh | None:
        """The fresh sketch inside this finder, with which it starts; ``None`` if there is none."""
        return None

    @abstractmethod
    def describe(self, m: int, n: int, inner: PolarMap, width: int, device: torch.device) -> str:
        """How the basis is found, in a few words, for the routing table."""


@dataclass(frozen=True)
class Fresh(Finder):
    """Q = orth((M Mᵀ)^h M Ω), with columns made orthonormal after each product.

    This is a chain of 2h + 1 products with M and Mᵀ in turn. It ends on the short side of M, so it
    starts with M for an integer h and with Mᵀ for a half-integer h.
    """

    sketch: Sketch = field(default_factory=Gaussian)
    power: float = 1

    def __post_init__(self) -> None:
        check_power(self.power)

    def basis(self, A: Tensor, width: int, carry: MapState, draw: Draw) -> Basis:
        """The basis of this step's sketch."""
        assert draw.numbers is not None
        ops, numbers = ops_of(A.device), draw.numbers
        dtype = self._product_dtype(A.shape[-2], A.shape[-1], A.dtype, A.device)
        padded = self.padded(width, A.dtype, A.device)
        further = flops.power_products(self.power)
        exact = A if further % 2 == 0 else A.mT
        factor = exact.to(dtype)
        if self.sketch.is_dense:
            Y = ops.sketched(factor, self.sketch.omega(factor, numbers), padded)
        else:
            Y = self.sketch.times(exact, numbers)
            Y = torch.nn.functional.pad(Y.mT, (0, 0, 0, padded - width)).mT
        for _ in range(further):
            factor = factor.mT
            Q = orthonormalize(ops.workable(Y), self.orth, rough=True).to(dtype)
            Y = ops.times(factor, Q)
        return Basis(orthonormalize(ops.workable(Y), self.orth).to(A.dtype))

    def _product_dtype(
        self, m: int, n: int, dtype: torch.dtype, device: torch.device
    ) -> torch.dtype:
        """The precision of the products that make the basis of m×n matrices in ``dtype``.

        Rounding M takes as long as one product gains from it, so a single product is not rounded.
        """
        count = flops.power_products(self.power) + self.sketch.is_dense
        return dtype if count < 2 else ops_of(device).sketch_dtype(m, n, dtype)

    def numbers(
        self,
        m: int,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        """Ω, with rows for the long side of M, or for its short side if h is a half-integer."""
        whole = flops.power_products(self.power) % 2 == 0
        return self.sketch.draw(n if whole else m, width, generator, dtype, out)

    def parts(self, m: int, n: int, width: int) -> tuple[int, int, int]:
        """Costs of the sketch, of the power iterations and of the orthonormalization."""
        first = (m, n) if flops.power_products(self.power) % 2 == 0 else (n, m)
        return (
            self.sketch.flops(*first, width),
            flops.power_products(self.power) * flops.matmul(m, n, width),
            flops.qr(m, width),
        )

    def flops(self, m: int, n: int, width: int) -> int:
        """The sum of the parts."""
        return sum(self.parts(m, n, width))

    @property
    def fresh_sketch(self) -> Fresh:
        """This finder itself."""
        return self

    def makes_orthonormal(self, device: torch.device, dtype: torch.dtype) -> bool:
        """False with sampled columns, where a repeated column becomes zero."""
        return self.sketch.is_dense and super().makes_orthonormal(device, dtype)

    def describe(self, m: int, n: int, inner: PolarMap, width: int, device: torch.device) -> str:
        """The sketch, its power and the precision of its products."""
        ours = ops_of(device).dtype(torch.float32)
        rounded = self._product_dtype(m, n, ours, device) != ours
        name = type(self.sketch).__name__ + (" in bfloat16" if rounded else "")
        return f"h={self.power:g}, {name}"


def check_power(power: float) -> None:
    """Raise for an h that is no multiple of ½."""
    check_number(
        "power",
        power,
        lambda h: 0 <= h < math.inf and float(2 * h).is_integer(),
        "one of 0, ½, 1, 1½, …",
        "the paper takes 1 or 2",
    )


# With twice this noise, Δγ on recorded momentum rose from 0.014 to 0.020 (emulated).
MOST_NOISE = 0.1


@dataclass(frozen=True)
class Warm(Finder):
    """``Ω = Z₋ᵀ + noise·N(0, 1)^{n×ℓ}/√n`` with Z₋ the factor of the last step's T₋ = Q₋Z₋.

    The noise ensures that no direction is missed for ever: a matrix that was zero, as
    zero-initialized projections are at step one, starts from noise alone. Its numbers are the same
    at every step.

    The optimizer keeps Ωᵀ (ℓ×n per matrix), or on a GPU two factors of it, in its state and its
    checkpoints. At the first step and in a plain call of the map, Ω is Gaussian and the map's power
    iterations run.

    Args:
        noise: size of the random part; the spectral norm of Z₋ is at most one.
    """

    # Any numbers in general position ensure that no direction is missed. Drawing them once saves every
    # later step a launch outside its graph.
    draws = "once"
    # The names of S and V with Ωᵀ = V·S; without V, S is Ωᵀ itself.
    carries = ("basis", "whitening")

    noise: float = 0.1
    power: float = field(default=1, repr=False)  # in a LowRank its power replaces this

    def __post_init__(self) -> None:
        check_positive(
            "noise",
            self.noise,
            "0.1 is the default, and without noise a direction that was missed once is missed for ever",
        )

    def with_options(self, power: float, orth: Method) -> Warm:
        """This finder with LowRank's power and orth for the first step."""
        if power != int(power):
            raise ValueError(
                f"power={power!r} with Warm(): expected a whole number, 0, 1, 2, …; its start "
                "lies on the long side of the matrix, where half powers do not begin"
            )
        self._refuse_own(power=power, orth=orth)
        return replace(self, power=power, orth=orth)

    def resumes(self, carry: MapState, m: int, n: int, width: int) -> bool:
        """Whether ``carry`` has an Ωᵀ of this width, which differs if the rank was changed."""
        return "basis" in carry and carry["basis"].shape[1:] == (width, n)

    def basis(self, A: Tensor, width: int, carry: MapState, draw: Draw) -> Basis:
        """A basis of MΩ with the last step's Ω; a fresh basis at the first step."""
        if not self.resumes(carry, A.shape[-2], A.shape[-1], width):
            return self.fresh_sketch.basis(A, width, carry, draw)
        ops, padded = ops_of(A.device), self.padded(width, A.dtype, A.device)
        carry = carry.to(A.dtype)
        if self._can_whiten(A.dtype, A.device) and _has_whitening(carry, padded):
            Y = carry["whitening"] @ ops.times(A, carry["basis"].mT, padded).mT
            Q, halves = ops.whitened_basis(Y, whitened_polynomials())
            return Basis(Q.mT, halves)
        Y = ops.times(A, _omega_transposed(carry).mT, padded)
        return Basis(orthonormalize(ops.workable(Y), self.orth).to(A.dtype))

    def lift(
        self, inner: PolarMap, B: Tensor, basis: Basis, width: int, carry: MapState, draw: Draw
    ) -> tuple[Lift, MapState]:
        """The inner map of B, and the next step's start: Z + ε·N, or two factors of its Ωᵀ."""
        assert draw.numbers is not None
        scale = self.noise / math.sqrt(len(draw.numbers))
        m, n = basis.Q.shape[-2], B.shape[-1]
        if self.leaves_factors(inner, m, n, width, B.dtype, B.device):
            assert isinstance(inner, NewtonSchulz)
            start = _room(carry, B, width, draw)
            S, V = start["basis"], start["whitening"]
            W, X = ops_of(B.device).lift_and_leave(
                B, inner.polynomials, draw.numbers, scale, S, V, draw.finite
            )
            Qt = basis.Q.mT.to(W.dtype) if basis.halves is None else basis.halves
            return Lift(X, W, lambda: (W @ Qt).mT), start
        lift = lift_of(inner, B)
        Z = lift.X if lift.W is None else torch.bmm(lift.W, lift.X)
        noise = draw.numbers.mT.to(Z.dtype)
        return Lift(Z), MapState(basis=torch.add(Z[:, :width], noise, alpha=scale))

    def leaves_factors(
        self,
        inner: PolarMap,
        m: int,
        n: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> bool:
        """Whether the start is stored as two factors, so that Z is never formed."""
        if not (isinstance(inner, NewtonSchulz) and inner.uses_defaults):
            return False
        if not self._can_whiten(dtype, device):
            return False
        polynomials = inner.polynomials
        first, rest = polynomials[:1], polynomials[1:]
        padded = self.padded(width, dtype, device)
        return (
            len(rest) > 0
            and len(first[0]) <= 3
            and fits_float16(polynomials)
            and not restarts(rest, rounding(torch.float16))
            and padded <= ops_of(device).most_factored
            and GRAM_FROM * padded <= min(m, n)
        )

    def _can_whiten(self, dtype: torch.dtype, device: torch.device) -> bool:
        by_products = self.orth in ("auto", "products")
        return self.noise <= MOST_NOISE and by_products and ops_of(device).whitens(dtype)

    @property
    def fresh_sketch(self) -> Fresh:
        """The finder of the first step."""
        return Fresh(Gaussian(), self.power, orth=self.orth)

    def numbers(
        self,
        m: int,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        """Gaussian numbers, of shape (n, ℓ)."""
        return self.fresh_sketch.numbers(m, n, width, generator, dtype, out)

    def flops(self, m: int, n: int, width: int) -> int:
        """One product and one basis; the power iterations of the first step are not counted."""
        return replace(self.fresh_sketch, power=0).flops(m, n, width)

    def describe(self, m: int, n: int, inner: PolarMap, width: int, device: torch.device) -> str:
        """The power and, where Z is never formed, "whitened"."""
        dtype = ops_of(device).dtype(torch.float32)
        without_Z = self.leaves_factors(inner, m, n, width, dtype, device)
        return f"h={self.power:g}, Warm" + (", whitened" if without_Z else "")


def _has_whitening(carry: MapState, padded: int) -> bool:
    return "whitening" in carry and carry["whitening"].shape[1:] == (padded, padded)


def _omega_transposed(carry: MapState) -> Tensor:
    """Ωᵀ = V·S (batch, ℓ, n), or S itself where the carry has no V."""
    S = carry["basis"]
    if "whitening" not in carry:
        return S
    width = S.shape[-2]
    return carry["whitening"][..., :width, :width] @ S


def _room(carry: MapState, B: Tensor, width: int, draw: Draw) -> MapState:
    """The tensors that the next start is written to: those of ``carry``, or new ones.

    New tensors are filled so that a matrix that is skipped at this step can start from them.
    """
    batch, padded, n = B.shape
    S, V = carry.get("basis"), carry.get("whitening")
    if S is not None and (S.dtype != B.dtype or S.shape != (batch, width, n)):
        S = None
    if S is not None and _has_whitening(carry, padded) and V is not None and V.dtype == B.dtype:
        return MapState(basis=S, whitening=V)
    assert draw.numbers is not None
    if draw.finite is None:
        S = B.new_empty(batch, width, n)
        return MapState(basis=S, whitening=B.new_empty(batch, padded, padded))
    if carry:
        S = _omega_transposed(carry.to(B.dtype)).clone()
    else:
        S = draw.numbers.mT.to(B.dtype).repeat(batch, 1, 1)
    V = torch.eye(padded, dtype=B.dtype, device=B.device).repeat(batch, 1, 1)
    return MapState(basis=S, whitening=V)
