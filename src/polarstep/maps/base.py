"""The contract of a polar map: what its step is given, what it returns, and what it promises.

A polar map T takes matrices ``M`` of shape ``(..., m, n)`` and returns an approximation of the
polar factor ``U Vᵀ`` of each, with the same shape, dtype and device. Every map keeps these promises:

* the input is not changed, and nothing global (no random generator, no autocast, no setting for TF32) is
  read, or changed beyond the call;
* ``T(0) = 0``, also for a zero matrix beside nonzero ones in a batch;
* ``T(cM) = T(M)`` for ``c > 0`` over the whole range of M's precision, up to the digits that numbers
  near the ends of this range have. T is finite for every finite M. (On a GPU the steps of an optimizer
  keep this promise where they are fused, as they usually are for float32 and bfloat16 parameters. Other
  steps, such as those of parameters sharded over several GPUs, have a smaller range for sketches and
  matrices of few rows: T is zero for entries below 1e-18 or above 1e18.)
* ``T(Mᵀ) = T(M)ᵀ``;
* where ‖T‖_op ≤ 1 is proved, ‖T‖_op ≤ 1 + 1e-5 after rounding in float32. Rounding errors of a few 1e-6
  are usual. They add up to more only where all entries of M are alike, as in a matrix of ones: up to
  max(m, n)·ε with ε = 1.2e-7, and in the Gram form up to ½A·min(m, n)·ε, where A = ∏aₜ is the product of
  the slopes at zero since the last restart (:mod:`polarstep.maps.full_space`);
* ``T(batch)[i] = T(batch[i])``, for the random maps with the same generator state.

A map is a frozen dataclass: comparable, hashable, printable, picklable, valid in a param group. It has
five members, of which only ``step`` has no default:

    step       (M, MapState, Draw) → (Polar, MapState): T, and what the next step is given
    init       what the first step is given
    numbers    the random numbers of a step
    on         the map that runs on matrices of a shape, on a device
    describe   how such matrices are treated, for the table of routes

and :class:`Traits`, what callers may take for granted. ``flops``, ``bounds`` and ``resumes`` are
optional. ``polar(M, generator=g)`` is one step from ``init``.

**What a step returns** is a :class:`Polar`: T before it is multiplied out. A sketched map returns the
:class:`Factors` that Algorithm 1 computes, for a wide M and ℓ = s + p::

    B = QᵀM             Q: m×ℓ,  B: ℓ×n
    Z = WX ≈ polar(B)   W: ℓ×ℓ,  X: ℓ×n         a Lift; W = I where the inner map returns Z itself
    T = QZ = LR         L = QW,  R = X

Each reader forms only what it needs:

* the update adds LR to the weights;
* ``shape_scale="rms"`` divides by ‖T‖_F, and ‖T‖²_F = ‖Z‖²_F = tr(W·XXᵀ·Wᵀ) needs no Z;
* a certificate reads B, which tells how much of M the basis Q captured. A deflated map starts from a QZ
  but returns a T that is more than QZ; it leaves Q, B and Z for the certificate as :class:`Captured`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from polarstep import flops, kernels
from polarstep.context import numeric_context
from polarstep.maps.sketches import default_generator
from polarstep.numerics import fitting, product_like, unit_scaled
from polarstep.ops import ops_of
from polarstep.ops.lazy import Head, RowProduct, ScaledRows

__all__ = [
    "Captured",
    "Containing",
    "Draw",
    "Draws",
    "Factors",
    "Lift",
    "MapState",
    "Polar",
    "PolarMap",
    "SquaredNorm",
    "Traits",
    "counted_norm",
    "numbers_for",
    "one_step",
    "step_of",
    "wide",
]


Draws = Literal["never", "once", "every step"]


@dataclass(frozen=True)
class Traits:
    """What callers of a map may take for granted. The defaults suit a map without state."""

    carries: tuple[str, ...] = ()
    """The names of the tensors that a step may leave for the next step."""
    wide_carries: tuple[str, ...] = ()
    """The names in ``carries`` kept in float32 or wider, whatever precision the parameter has."""
    draws: Draws = "never"
    """Which steps need new random numbers; ``"once"``: all steps have the same numbers."""
    ignores_scale: bool = True
    """Whether T(cM) = T(M), which holds unless δ is a given number."""
    rounds_input: bool = False
    """Whether the map rounds M to the device's product precision, so that a caller may round it."""
    uses_norm: bool = False
    """Whether a step uses :attr:`Draw.squares`, which the momentum kernel then adds up."""
    rank: int | None = None
    """How many singular values of T the map brings near one; ``None``: all of them."""

    def rank_of(self, m: int, n: int) -> int:
        """The number of singular values near one in T of an m×n matrix, which is about ‖T‖²_F.

        ``shape_scale="rms"`` divides by its root where a step does not know ‖T‖_F.
        """
        return min(m, n) if self.rank is None else min(m, n, self.rank)


class MapState(dict[str, Tensor]):
    """The tensors that a step leaves for the next, by name; their first dimension is the batch.

    A checkpoint stores them in the parameter's precision, because torch casts a loaded state to it;
    :attr:`Traits.wide_carries` are the exception. A step must accept them in any precision.
    """

    @staticmethod
    def joined(parts: Sequence[MapState]) -> MapState:
        """One new state for the matrices of all ``parts``, with the names that every part has."""
        names = [name for name in parts[0] if all(name in part for part in parts)]
        return MapState({name: torch.cat([part[name] for part in parts]) for name in names})

    def split(self, counts: list[int]) -> list[MapState]:
        """This state cut along the batch: the first ``counts[0]`` matrices, the next ``counts[1]``, …"""
        if not self:
            return [MapState() for _ in counts]
        parts = zip(*(torch.split(tensor, counts) for tensor in self.values()), strict=True)
        return [MapState(zip(self, part, strict=True)) for part in parts]

    def to(self, dtype: torch.dtype) -> MapState:
        """The same tensors in another precision."""
        return MapState({name: tensor.to(dtype) for name, tensor in self.items()})


@dataclass(frozen=True)
class Draw:
    """The inputs of a step besides M and what the last step left."""

    numbers: Tensor | None = None  # the random numbers of this step; None where none are needed
    finite: Tensor | None = None  # a flag per matrix; where it is zero, the carry must not change
    squares: Tensor | None = None  # (batch, parts) that add up to ‖M‖²_F, for a map that uses_norm
    shown: bool = False  # whether somebody looks at the step, which then returns Captured


class PolarMap(ABC):
    """An approximation of the polar factor; see the module's docstring for the contract."""

    _traits = Traits()  # a map whose traits follow from its options sets its own when it is made

    @property
    def traits(self) -> Traits:
        """What callers may take for granted; a map of one's own may have ``traits = Traits(...)``."""
        return self._traits

    @abstractmethod
    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """T of ``M`` (batch, m, n), and what the next step is given.

        ``M`` is float32, float64, or of 16 bits. The step may overwrite the tensors of ``carry`` and
        return them, except for matrices whose ``draw.finite`` is zero.
        """

    def init(
        self, batch: int, m: int, n: int, device: torch.device, dtype: torch.dtype
    ) -> MapState:
        """What the first step of ``batch`` matrices is given: nothing, for most maps."""
        return MapState()

    def numbers(
        self,
        m: int,
        n: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The random numbers of one step for m×n matrices, written to ``out`` if it is given."""
        raise TypeError(
            f"{type(self).__name__} draws {self.traits.draws!r}, but it has no method numbers(m, n, "
            "generator, dtype, out): expected a method that returns Draw.numbers of a step"
        )

    def on(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The map that runs on m×n matrices on ``device``: this map, or a cheaper one."""
        return self

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """How an m×n matrix on ``device`` will be treated, in a few words, for the routing table."""
        return repr(self)

    def flops(self, m: int, n: int) -> int:
        """Cost of one step on an m×n matrix in the paper's convention (:mod:`polarstep.flops`).

        A plan for several ranks and the choice to sketch a shape depend on it. A map that does not say
        is taken to cost as much as five quintic steps.
        """
        return flops.newton_schulz(m, n, 5)

    def bounds(self, rows: int, norm: Tensor) -> tuple[Tensor, Tensor] | None:
        """Bounds in exact arithmetic for matrices of ``rows`` rows with ‖M‖_F = ``norm``.

        The first is on ‖T‖_op, the second on ‖M‖_* − ⟨M, T⟩. ``None`` where they are not known.
        """
        return None

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        """Whether a step on m×n matrices can continue from ``carry``, perhaps another map's.

        It can if ``carry`` has tensors of the names and shapes that :meth:`init` returns, and if that is
        nothing, all names in ``carries``.
        """
        first = self.init(1, m, n, torch.device("meta"), torch.float32)
        if not first:
            return all(name in carry for name in self.traits.carries)
        return all(
            name in carry and carry[name].shape[1:] == tensor.shape[1:]
            for name, tensor in first.items()
        )

    def __call__(self, M: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return T(M) for ``M`` of shape ``(..., m, n)``.

        A random map draws its numbers from ``generator``, as ``torch.Generator().manual_seed(0)``, which
        advances. Without a generator it draws the same numbers at every call.
        """
        polar = one_step(self, M, generator)
        if polar is None:
            return M.clone()
        with numeric_context(M.device):
            return polar.multiplied_out().to(M.dtype).reshape(M.shape)


def one_step(polar: PolarMap, M: Tensor, generator: torch.Generator | None = None) -> Polar | None:
    """One step from ``init`` on ``M`` of shape ``(..., m, n)``; ``None`` if M is empty."""
    _check_matrices(M)
    if M.numel() == 0:
        return None
    with numeric_context(M.device):
        m, n = M.shape[-2:]
        X, polar = M.reshape(-1, m, n), polar.on(m, n, M.device)
        numbers = None
        if polar.traits.draws != "never":
            numbers = numbers_for(polar, X, default_generator(generator, M.device))
        if not ops_of(M.device).host_reads_are_free and polar.traits.ignores_scale:
            X, _ = unit_scaled(X)  # squares of very small and very large entries leave float32
        carry = polar.init(len(X), m, n, X.device, X.dtype)
        return step_of(polar, X, carry, Draw(numbers, shown=True))[0]


def numbers_for(polar: PolarMap, M: Tensor, generator: torch.Generator) -> Tensor:
    """The random numbers of a step on ``M``, on its device and in at least its precision."""
    dtype = torch.promote_types(M.dtype, torch.float32)
    return fitting(polar.numbers(M.shape[-2], M.shape[-1], generator, dtype), M.device)


def step_of(polar: PolarMap, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
    """``polar.step`` for any number of matrices: in parts, where they are too many for a kernel.

    Raises:
        TypeError, ValueError: if a map of a user's own returns what the contract does not allow.
    """
    if len(M) <= kernels.MOST_MATRICES:
        return _one_step_of(polar, M, carry, draw)
    counts = kernels.part_sizes(len(M), M.device)
    flags, squares = (
        [None] * len(counts) if each is None else torch.split(each, counts)
        for each in (draw.finite, draw.squares)
    )
    found = [
        _one_step_of(polar, part, its_carry, replace(draw, finite=finite, squares=square))
        for part, its_carry, finite, square in zip(
            torch.split(M, counts), carry.split(counts), flags, squares, strict=True
        )
    ]
    polars, left = zip(*found, strict=True)
    norms = [each.squared_norm for each in polars if each.squared_norm is not None]
    squared_norm = (lambda: torch.cat([norm() for norm in norms])) if norms else None
    factors = Factors.joined([each.factors for each in polars if each.factors is not None])
    T = None if factors else torch.cat([each.multiplied_out() for each in polars])
    return Polar(M, T, factors, squared_norm), MapState.joined(left)


def _one_step_of(polar: PolarMap, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
    """``polar.step``; what a map of a user's own returns is checked at its first step on a shape."""
    found = polar.step(M, carry, draw)
    if not type(polar).__module__.startswith("polarstep."):
        from polarstep.maps.checks import check_first

        check_first(polar, found, M, carry)
    return found


def wide(M: Tensor) -> Tensor:
    """``M``, transposed where it is tall, in a precision that its device computes with.

    That is float32 at least, or bfloat16 on a device that multiplies in bfloat16.
    """
    X = ops_of(M.device).workable(M)
    return X if M.shape[-2] <= M.shape[-1] else X.mT


def _check_matrices(M: Tensor) -> None:
    if not isinstance(M, Tensor):
        raise TypeError(
            f"M is a {type(M).__name__}: expected a tensor of shape (..., m, n), as torch.as_tensor(M) "
            "makes one of an array"
        )
    if M.ndim < 2:
        raise ValueError(
            f"expected a tensor of shape (..., m, n), got shape {tuple(M.shape)}; "
            "a vector has no polar factor: view it as a 1×n matrix with M[None]"
        )
    if not M.is_floating_point() or M.dtype.itemsize < 2:
        raise TypeError(
            f"expected a real floating-point tensor of at least 16 bits, got {M.dtype}; cast it first"
        )
    if M.layout != torch.strided:
        raise TypeError(f"expected a dense tensor, got layout {M.layout}; call M.to_dense() first")
    if hasattr(M, "full_tensor"):
        raise TypeError(
            "expected a whole matrix, got a DTensor; call M.full_tensor() first "
            "(polarstep.Muon gathers by itself)"
        )


class Containing(PolarMap):
    """A map that is another map in everything that a subclass does not override.

    A subclass names the contained map in :attr:`contained`. A subclass that chooses a map by shape also
    overrides :meth:`inside`.
    """

    @property
    @abstractmethod
    def contained(self) -> PolarMap:
        """The map inside."""

    def inside(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The map inside that runs on m×n matrices on ``device``."""
        return self.contained

    @property
    def traits(self) -> Traits:
        """As for the map inside."""
        return self.contained.traits

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """A step of the map inside."""
        return self.inside(M.shape[-2], M.shape[-1], M.device).step(M, carry, draw)

    def init(
        self, batch: int, m: int, n: int, device: torch.device, dtype: torch.dtype
    ) -> MapState:
        """As for the map inside."""
        return self.inside(m, n, device).init(batch, m, n, device, dtype)

    def numbers(
        self,
        m: int,
        n: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The random numbers of the map inside, which must be random."""
        return self.inside(m, n, generator.device).numbers(m, n, generator, dtype, out)

    def flops(self, m: int, n: int) -> int:
        """The paper's count for the map inside, on a CPU."""
        return self.inside(m, n, torch.device("cpu")).flops(m, n)

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        """As for the map inside, on the device of ``carry``."""
        where = next((tensor.device for tensor in carry.values()), torch.device("cpu"))
        return self.inside(m, n, where).resumes(carry, m, n)


SquaredNorm = Callable[[], Tensor]  # returns ‖T‖²_F, of shape (batch,)

# Where the length of a step depends on ‖T‖_F, ‖T‖²_F is taken to be at least this share of ℓ. Momentum
# of rank one has ‖T‖_F = 1. T/‖T‖_F then has length 1 in a single direction, where a T with ‖T‖²_F = ℓ
# has 1/√ℓ in each. With a ninth of ℓ the length is 3/√ℓ at most.
LEAST_SHARE = 1 / 9


def counted_norm(squared: Tensor, width: int) -> Tensor:
    """max(‖T‖²_F, ℓ/9) from ``squared`` = ‖T‖²_F and ℓ = ``width``; a NaN stays NaN.

    ``shape_scale="rms"`` divides by its root.
    """
    return squared.clamp_min(LEAST_SHARE * width)


@dataclass(frozen=True)
class Lift:
    """Z = WX, the polar factor of a small matrix, before it is multiplied out; no W means W = I."""

    X: Tensor  # (batch, ℓ, n)
    W: Tensor | None = None  # (batch, ℓ, ℓ)
    # Returns QW (batch, m, ℓ), where the finder has more precise factors of it than Q and W.
    # A deflated map never calls it.
    left: Callable[[], Tensor] | None = None
    G: Tensor | None = None  # (batch, ℓ, ℓ): XXᵀ, where the inner map has formed it

    def squared_norm(self) -> Tensor:
        """‖Z‖²_F = tr(W·XXᵀ·Wᵀ), of shape (batch,), without forming Z.

        Rounding errors of ε·tr XXᵀ in XXᵀ are multiplied by ‖W‖²_op, as they are in the inner map, whose
        restarts (:mod:`polarstep.maps.full_space`) keep them below 2e-2.
        """
        wide_enough = torch.promote_types(self.X.dtype, torch.float32)
        if self.W is None:
            return torch.linalg.vector_norm(self.X, dim=(-2, -1), dtype=wide_enough).square()
        G = ops_of(self.X.device).gram(self.X) if self.G is None else self.G
        W = self.W.to(wide_enough)
        return ((W @ G.to(wide_enough)) * W).sum((-2, -1))

    def times(self, factor: Tensor) -> Lift:
        """c·Z for a ``factor`` c of shape (batch, 1, 1), which multiplies W; there must be a W."""
        assert self.W is not None
        left = self.left
        return Lift(
            self.X,
            _scaled(self.W, factor),
            None if left is None else lambda: _scaled(left(), factor),
            self.G,
        )


@dataclass(frozen=True)
class Factors:
    """T = Q·Z = Q·W·X of a sketched map, for wide matrices M (tall ones are transposed first).

    B = QᵀM, which the map needs anyway, tells how much of M the basis captured. Tensors may be
    padded with zeros beyond ℓ = ``width`` rows or columns.
    """

    columns: Tensor  # (batch, m, ≥ ℓ): Q with padding
    projected: Tensor  # (batch, ≥ ℓ, n): B with padding
    lift: Lift  # Z, in the precision the inner map ended in
    width: int
    orthonormal: bool  # whether QᵀQ = I up to rounding; if not, some columns may be short or zero

    @staticmethod
    def joined(parts: Sequence[Factors]) -> Factors | None:
        """The factors of the matrices of all ``parts``; ``None`` of none."""
        if not parts:
            return None
        lifts = [part.lift for part in parts]
        weights = [lift.W for lift in lifts if lift.W is not None]
        lefts = [lift.left for lift in lifts if lift.left is not None]
        lift = Lift(
            torch.cat([lift.X for lift in lifts]),
            torch.cat(weights) if weights else None,
            (lambda: torch.cat([left() for left in lefts])) if lefts else None,
        )
        columns, projected = (
            torch.cat(each)
            for each in ([part.columns for part in parts], [part.projected for part in parts])
        )
        return replace(parts[0], columns=columns, projected=projected, lift=lift)

    @property
    def Q(self) -> Tensor:
        """(batch, m, ℓ), ‖Q‖_op ≤ 1, in the precision of Z."""
        return self.columns[..., : self.width].to(self.Z.dtype)

    @property
    def B(self) -> Tensor:
        """(batch, ℓ, n), QᵀM on M's own scale."""
        return self.projected[:, : self.width]

    @cached_property
    def Z(self) -> Tensor:
        """(batch, ℓ, n), the polar factor of B."""
        X, W = self.lift.X, self.lift.W
        if W is not None:
            X = ops_of(X.device).apply(W, X, self.projected.dtype)
        return X[:, : self.width]

    @property
    def as_computed(self) -> Head:
        """Q, B, X and W with their padding, each in its own precision."""
        return Head(self.columns, self.projected, self.lift.X, self.lift.W)

    @cached_property
    def two(self) -> tuple[Tensor, Tensor]:
        """L = QW and R = X with T = LR, so that Z = WX, which has the long side, is not formed."""
        if self.lift.left is not None:
            return self.lift.left(), self.lift.X
        if self.lift.W is not None:
            return torch.bmm(self.columns, self.lift.W), self.lift.X
        return self.Q, self.Z

    def counted_norm(self) -> Tensor:
        """max(‖Z‖²_F, ℓ/9), of shape (batch,), as :func:`counted_norm` says."""
        return counted_norm(self.lift.squared_norm(), self.width)

    def times(self, factor: Tensor) -> Factors:
        """Factors of c·T for a ``factor`` c of shape (batch,), which multiplies W, or Q without a W."""
        c = factor[:, None, None]
        if self.lift.W is None:
            return replace(self, columns=_scaled(self.columns, c), orthonormal=False)
        return replace(self, lift=self.lift.times(c))


@dataclass(frozen=True)
class Captured:
    """The head QZ of a deflated step, whose T is more than QZ; a certificate bounds ‖M‖_* from it."""

    M: Tensor  # (batch, m, n): the step's M, perhaps transposed, each matrix perhaps scaled
    factors: Factors  # of QZ
    polar: PolarMap  # the map that returned the factors


@dataclass(frozen=True)
class Polar:
    """T of a batch of matrices M: dense, or before it is multiplied out.

    A sketched map has ``factors``, and every other map has ``T``.
    """

    M: Tensor  # (batch, m, n), tall or wide
    # (batch, m, n), in the precision the map ended in
    T: Tensor | RowProduct | ScaledRows | None = None
    factors: Factors | None = None  # of wide M, or of Mᵀ where M is tall
    # Returns max(‖T‖²_F, ℓ/9) (counted_norm), where the map can compute it cheaply and Traits.rank
    # may be far from ‖T‖²_F.
    squared_norm: SquaredNorm | None = None
    captured: Captured | None = None  # of a deflated step with Draw.shown

    @classmethod
    def of_wide(cls, M: Tensor, T: Tensor) -> Polar:
        """T of ``M`` from the T of ``wide(M)``."""
        return cls(M, T if M.shape[-2] <= M.shape[-1] else T.mT)

    @property
    def two_factors(self) -> tuple[Tensor, Tensor] | None:
        """L and R with T = LR, oriented as M is; ``None`` where T is dense."""
        if self.factors is None:
            return None
        L, R = self.factors.two
        return (L, R) if self.M.shape[-2] <= self.M.shape[-1] else (R.mT, L.mT)

    def multiplied_out(self) -> Tensor:
        """T in the precision the map ended in, in the memory layout of M."""
        if self.factors is None:
            assert self.T is not None
            return self.T if isinstance(self.T, Tensor) else self.T.multiplied_out()
        two = self.two_factors
        assert two is not None
        return product_like(self.M, *two)

    @cached_property
    def dense(self) -> Tensor:
        """:meth:`multiplied_out`, computed once."""
        return self.multiplied_out()


def _scaled(X: Tensor, factor: Tensor) -> Tensor:
    """``factor``·X, rounded once to the precision of X."""
    return (factor * X).to(X.dtype)
