"""The contract of a polar map.

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
  the slopes at zero since the last restart (:mod:`polarstep.maps.gram`);
* ``T(batch)[i] = T(batch[i])``, for the random maps with the same generator state.

A map is a frozen dataclass: comparable, hashable, printable, picklable, valid in a param group.

An optimizer calls :meth:`PolarMap.step` once for each bucket of matrices and each step. A step is
given the :class:`MapState` that the last step returned, and random numbers drawn beforehand. It
returns T, not multiplied out (:mod:`polarstep.maps.result`), and the carry for the next step.
``polar(M, generator=g)`` is one step with an empty carry.

:class:`Containing` is a map that contains another map, and delegates to it what it does not override.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.context import numeric_context
from polarstep.maps.result import Lift, Polar, check_matrices, checked_polar
from polarstep.maps.sketches import default_generator
from polarstep.numerics import fitting, unit_scaled
from polarstep.ops import ops_of

__all__ = ["Containing", "Draw", "MapState", "PolarMap", "wide"]


class MapState(dict[str, Tensor]):
    """The tensors that a step leaves for the next, by name; their first dimension is the batch.

    A checkpoint stores them in the parameter's precision, because torch casts a loaded state to it;
    :attr:`PolarMap.wide_carries` are the exception. A step must accept them in any precision.
    """

    @staticmethod
    def joined(parts: Sequence[MapState]) -> MapState:
        """One new carry for the matrices of all ``parts``, with the names that every part has."""
        names = [name for name in parts[0] if all(name in part for part in parts)]
        return MapState({name: torch.cat([part[name] for part in parts]) for name in names})

    def split(self, counts: list[int]) -> list[MapState]:
        """This carry cut along the batch: the first ``counts[0]`` matrices, the next ``counts[1]``, …"""
        if not self:
            return [MapState() for _ in counts]
        parts = zip(*(torch.split(tensor, counts) for tensor in self.values()), strict=True)
        return [MapState(zip(self, part, strict=True)) for part in parts]

    def to(self, dtype: torch.dtype) -> MapState:
        """The same tensors in another precision."""
        return MapState({name: tensor.to(dtype) for name, tensor in self.items()})


# Maps whose step was found to return what it should, with the shape, and whether there was a carry.
_CHECKED: set[tuple[PolarMap, torch.Size, bool]] = set()


@dataclass(frozen=True)
class Draw:
    """The inputs of a step besides M and its carry."""

    numbers: Tensor | None = None  # the random numbers of this step; None where none are needed
    finite: Tensor | None = None  # a flag per matrix; where it is zero, the carry must not change
    squares: Tensor | None = None  # (batch, parts) that add up to ‖M‖²_F, for a map that uses_norm
    shown: bool = False  # whether somebody looks at the step, which then returns Captured


class PolarMap(ABC):
    """An approximation of the polar factor; see the module's docstring for the contract.

    Every map implements :meth:`flops`. A map without state also implements :meth:`_polar` for a batch of
    wide matrices. A random map has ``is_random`` and :meth:`draw` as well. A map with state names its
    tensors in :attr:`carries` and implements :meth:`step` and :meth:`resumes`; nothing but
    :meth:`step` calls :meth:`_polar`.
    """

    def __new__(cls, *args: object, **options: object) -> Self:
        """Raise for a class that says nowhere what T is."""
        if cls.step is PolarMap.step and cls._polar is PolarMap._polar:
            raise TypeError(
                f"{cls.__name__} has neither _polar nor step: expected _polar(self, X, numbers), which "
                "returns T of wide matrices X, or step(self, M, carry, draw), for a map with state"
            )
        return super().__new__(cls)

    def _polar(self, X: Tensor, numbers: Tensor | None) -> Tensor:
        """T of ``X``: shape ``(batch, m, n)`` with ``m ≤ n``, not empty.

        ``X`` is float32, float64, or bfloat16 on a device that multiplies in bfloat16. ``numbers``
        is what :meth:`draw` returned, for a random map.
        """
        raise AssertionError("a map without _polar has a step of its own, which does not call it")

    @abstractmethod
    def flops(self, m: int, n: int) -> int:
        """Cost of one call on an m×n matrix in the paper's convention (:mod:`polarstep.flops`)."""

    @property
    def is_random(self) -> bool:
        """Whether the map needs random numbers."""
        return False

    @property
    def rounds_input(self) -> bool:
        """Whether the map rounds M to the device's product precision, so that a step may round it."""
        return False

    @property
    def ignores_scale(self) -> bool:
        """Whether T(cM) = T(M), which holds unless δ is a given number."""
        return True

    @property
    def uses_norm(self) -> bool:
        """Whether a step uses :attr:`Draw.squares`, which the momentum kernel then adds up."""
        return False

    @property
    def carries(self) -> tuple[str, ...]:
        """The names of the tensors that a step may leave for the next step."""
        return ()

    @property
    def wide_carries(self) -> tuple[str, ...]:
        """The names in :attr:`carries` kept in float32 or wider, whatever the parameter has."""
        return ()

    def effective_rank(self, m: int, n: int) -> int:
        """The number of singular values of T that the map brings near one, which is about ‖T‖²_F.

        ``shape_scale="rms"`` divides by its root where a step does not know ‖T‖_F
        (:attr:`Polar.squared_norm`). Call it on the map that :meth:`on` returns.
        """
        return min(m, n)

    def on(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The map that runs on m×n matrices on ``device``: this map, or a cheaper one."""
        return self

    def init(
        self, batch: int, m: int, n: int, device: torch.device, dtype: torch.dtype
    ) -> MapState:
        """The carry for the first step of ``batch`` matrices, which for most maps is empty."""
        return MapState()

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        """Whether a step on m×n matrices can continue from ``carry``, perhaps another map's."""
        return not self.carries

    def numbers_at(self, step: int, *, resumed: bool) -> tuple[int, ...] | None:
        """What the random numbers of a step depend on, besides the seed and the shape.

        ``None`` where the step needs no numbers. ``resumed``: whether it continues from a carry.
        """
        return (step,) if self.is_random else None

    def draw(
        self,
        m: int,
        n: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The random numbers of one step for m×n matrices, written to ``out`` if it is given."""
        raise TypeError(
            f"{type(self).__name__}.is_random is true, but it has no method draw(m, n, generator, "
            "dtype, out): expected a method that returns the numbers for _polar"
        )

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """T of ``M`` (batch, m, n), and the carry for the next step.

        The step may overwrite the tensors of ``carry`` and return them, except for matrices whose
        ``draw.finite`` is zero.
        """
        X = ops_of(M.device).workable(M)
        wide = M.shape[-2] <= M.shape[-1]
        X = X if wide else X.mT
        T = self._polar(X, draw.numbers)
        check_matrices(T, X, f"{type(self).__name__}._polar")
        return Polar(M, T if wide else T.mT), MapState()

    def step_on_many(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """:meth:`step` for any number of matrices: in parts, where they are too many for a kernel."""
        found = self.steps_on_many(M, carry, draw)
        if len(found) == 1:
            return found[0]
        T = torch.cat([polar.multiplied_out() for polar, _ in found])
        norms = [polar.squared_norm for polar, _ in found if polar.squared_norm is not None]
        joined = (lambda: torch.cat([norm() for norm in norms])) if norms else None
        return Polar(M, T, squared_norm=joined), MapState.joined([left for _, left in found])

    def checked_step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """What :meth:`step` returns. The first step of a map on a shape is checked.

        Raises:
            TypeError, ValueError: if the result has not the form that the contract asks for.
        """
        found = self.step(M, carry, draw)
        if not torch.compiler.is_compiling() and (self, M.shape, bool(carry)) not in _CHECKED:
            checked_polar(found, M, self.carries, f"{type(self).__name__}.step")
            if len(_CHECKED) >= 1024:
                _CHECKED.clear()
            _CHECKED.add((self, M.shape, bool(carry)))
        return found

    def steps_on_many(self, M: Tensor, carry: MapState, draw: Draw) -> list[tuple[Polar, MapState]]:
        """What :meth:`step` returns for each of the parts in which kernels take the matrices."""
        counts = kernels.part_sizes(len(M), M.device)
        if len(counts) == 1:
            return [self.checked_step(M, carry, draw)]
        flags, squares = (
            [None] * len(counts) if each is None else torch.split(each, counts)
            for each in (draw.finite, draw.squares)
        )
        return [
            self.checked_step(part, its_carry, Draw(draw.numbers, finite, square))
            for part, its_carry, finite, square in zip(
                torch.split(M, counts), carry.split(counts), flags, squares, strict=True
            )
        ]

    def lift(self, B: Tensor) -> Lift:
        """T of wide matrices ``B`` of few rows, without the last product where that is cheaper."""
        return Lift(self.as_computed(B))

    @property
    def polynomials_to_fuse(self) -> tuple[tuple[float, ...], ...] | None:
        """The odd polynomials from M/‖M‖_F to T, if a device may apply them in its own way."""
        return None

    def __call__(self, M: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """Return T(M) for ``M`` of shape ``(..., m, n)``.

        A random map draws its numbers from ``generator``, as ``torch.Generator().manual_seed(0)``, which
        advances. Without a generator it draws the same numbers at every call.
        """
        _check(M)
        if M.numel() == 0:
            return M.clone()
        with numeric_context(M.device):
            polar = self._from_nothing(M, generator)
            return polar.multiplied_out().to(M.dtype).reshape(M.shape)

    def from_nothing(self, M: Tensor, generator: torch.Generator | None = None) -> Polar | None:
        """One step with an empty carry on ``M`` of shape ``(..., m, n)``; ``None`` if empty."""
        _check(M)
        if M.numel() == 0:
            return None
        with numeric_context(M.device):
            return self._from_nothing(M, generator)

    def _from_nothing(self, M: Tensor, generator: torch.Generator | None) -> Polar:
        m, n = M.shape[-2:]
        X, polar = M.reshape(-1, m, n), self.on(m, n, M.device)
        numbers = None
        if polar.numbers_at(0, resumed=False) is not None:
            generator = default_generator(generator, M.device)
            numbers = polar.numbers_for(X, generator)
        if not ops_of(M.device).host_reads_are_free and polar.ignores_scale:
            X, _ = unit_scaled(X)  # squares of very small and very large entries leave float32
        carry = polar.init(len(X), m, n, X.device, X.dtype)
        return polar.step_on_many(X, carry, Draw(numbers, shown=True))[0]

    def numbers_for(self, M: Tensor, generator: torch.Generator) -> Tensor:
        """The random numbers for ``M``, on its device and in at least its precision."""
        dtype = torch.promote_types(M.dtype, torch.float32)
        return fitting(self.draw(M.shape[-2], M.shape[-1], generator, dtype), M.device)

    def as_computed(self, M: Tensor) -> Tensor:
        """Like calling a map that is not random, but without the final cast to M's dtype.

        On a GPU small matrices with entries below 1e-18 or above 1e18 become zero.
        """
        return M.clone() if M.numel() == 0 else self.step(M, MapState(), Draw())[0].multiplied_out()

    @property
    def innermost(self) -> PolarMap:
        """The map whose polynomial decides how far singular values are lifted."""
        return self

    def product_dtype(
        self, m: int, n: int, dtype: torch.dtype, device: torch.device
    ) -> torch.dtype:
        """The precision of the products that make T of m×n matrices in ``dtype``.

        A certificate allows for their rounding. Call it on the map that :meth:`on` returns.
        """
        return ops_of(device).dtype(dtype)

    def largest_value(self, norm: Tensor) -> Tensor | None:
        """A bound on ‖T‖_op in exact arithmetic, for ‖M‖_F = ``norm``; ``None`` if unknown."""
        return None

    def alignment_loss(self, rows: int, norm: Tensor) -> Tensor | None:
        """A bound on ‖B‖_* − ⟨B, T(B)⟩ for ``rows`` rows, ‖B‖_F = ``norm``; ``None`` if unknown."""
        return None

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """How an m×n matrix on ``device`` will be treated, in a few words, for the routing table."""
        return repr(self)

    def describe_as_inner(self, m: int, n: int, device: torch.device | None = None) -> str:
        """:meth:`describe` for a part of another map, which may run in another precision."""
        return self.describe(m, n, device)


def wide(M: Tensor) -> Tensor:
    """``M``, transposed where it is tall, in the precision in which its device multiplies."""
    ops = ops_of(M.device)
    X = ops.workable(M)
    return (X if M.shape[-2] <= M.shape[-1] else X.mT).to(ops.dtype(X.dtype))


def _check(M: Tensor) -> None:
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
    """A map whose properties, random numbers, carry and cost are those of the map it contains.

    A subclass names the contained map in :attr:`contained` and overrides what differs. A subclass that
    chooses a map by shape also overrides :meth:`inside`.
    """

    @property
    @abstractmethod
    def contained(self) -> PolarMap:
        """The map inside."""

    def inside(self, m: int, n: int, device: torch.device) -> PolarMap:
        """The map inside that runs on m×n matrices on ``device``."""
        return self.contained

    @property
    def is_random(self) -> bool:
        """As for the map inside."""
        return self.contained.is_random

    @property
    def rounds_input(self) -> bool:
        """As for the map inside."""
        return self.contained.rounds_input

    @property
    def ignores_scale(self) -> bool:
        """As for the map inside."""
        return self.contained.ignores_scale

    @property
    def uses_norm(self) -> bool:
        """As for the map inside."""
        return self.contained.uses_norm

    @property
    def carries(self) -> tuple[str, ...]:
        """As for the map inside."""
        return self.contained.carries

    @property
    def wide_carries(self) -> tuple[str, ...]:
        """As for the map inside."""
        return self.contained.wide_carries

    def effective_rank(self, m: int, n: int) -> int:
        """As for the map inside, on a CPU."""
        return self.inside(m, n, torch.device("cpu")).effective_rank(m, n)

    def init(
        self, batch: int, m: int, n: int, device: torch.device, dtype: torch.dtype
    ) -> MapState:
        """As for the map inside."""
        return self.inside(m, n, device).init(batch, m, n, device, dtype)

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        """As for the map inside, on the device of ``carry``."""
        where = next((tensor.device for tensor in carry.values()), torch.device("cpu"))
        return self.inside(m, n, where).resumes(carry, m, n)

    def numbers_at(self, step: int, *, resumed: bool) -> tuple[int, ...] | None:
        """As for the map inside."""
        return self.contained.numbers_at(step, resumed=resumed)

    def draw(
        self,
        m: int,
        n: int,
        generator: torch.Generator,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
    ) -> Tensor:
        """The random numbers of the map inside, which must be random."""
        return self.inside(m, n, generator.device).draw(m, n, generator, dtype, out)

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """A step of the map inside."""
        return self.inside(M.shape[-2], M.shape[-1], M.device).step(M, carry, draw)

    def flops(self, m: int, n: int) -> int:
        """The paper's count for the map inside, on a CPU."""
        return self.inside(m, n, torch.device("cpu")).flops(m, n)
