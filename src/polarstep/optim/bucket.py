"""One bucket on a GPU: equation (1) for all matrices of one shape, in a few launches.

    momentum   one kernel reads G and C, writes C and M, M in bfloat16 and in one batch
    polar      the polar map of the batch: products in 16 bits
    apply      one kernel reads and writes X; T = QZ is multiplied out on the way, never stored

A step is three calls: :meth:`DeviceBucket.prepare` brings what changes from step to step into place
(random numbers, a warm sketch's start), :meth:`DeviceBucket.launch` is launches alone, which a CUDA
graph can replay, and :meth:`DeviceBucket.settle` leaves behind what the next step needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polarstep import rng
from polarstep.capture import in_a_graph
from polarstep.matrix import product_dtype
from polarstep.optim.groups import Group
from polarstep.optim.phases import Bucket, PolarHook, State, basis_key, generator_key
from polarstep.polar import LowRank
from polarstep.polar.base import Factors, PolarMap
from polarstep.sketch import Warm

__all__ = ["DeviceBucket", "Launched", "Member", "Signature"]


@dataclass(frozen=True)
class Signature:
    """What the matrices of a bucket have in common."""

    polar: PolarMap
    seed: int
    m: int
    n: int
    dtype: torch.dtype
    device: torch.device
    nesterov: bool
    skips_nonfinite: bool


@dataclass(frozen=True)
class Member:
    """A run of equally shaped matrices at equal distances within one parameter."""

    param: Tensor
    name: str
    group: Group
    block: int  # of the parameter's matrix view
    count: int
    offset: int  # of the first matrix, in bytes
    stride: int  # from one matrix to the next, in bytes

    def addresses(self, first: int) -> range:
        """Where the matrices lie in a tensor of the parameter's shape that begins at ``first``."""
        first += self.offset
        return range(first, first + self.count * self.stride, self.stride)


@dataclass(frozen=True)
class Launched:
    """What a step computed: M, and T or its factors."""

    M: Tensor
    T: Tensor | None
    factors: Factors | None


class DeviceBucket:
    """The tensors of a bucket that outlive a step, and the step itself."""

    def __init__(self, signature: Signature, count: int) -> None:
        self.signature = signature
        self.count = count
        none = torch.empty(0, device=signature.device)
        self.addresses = none  # (3, count): of G, C and X
        self.scalars = none  # (3, count): β, 1 − ηλ, η·scale
        self._finite: Tensor | None = None
        self._start: Tensor | None = None  # Ωᵀ of a warm sketch, (count, ℓ, long side)
        self._parts: list[Tensor] = []  # of it, by member, as the optimizer's state holds them
        self._numbers: Tensor | None = None  # this step's random numbers
        self._drawn: tuple[int | str, ...] | None = None  # their generator's key

    @cached_property
    def sketched(self) -> LowRank | None:
        """The polar map, if T comes as two factors."""
        its = self.signature
        if not isinstance(its.polar, LowRank):
            return None
        return its.polar if its.polar.full_space_reason(its.m, its.n, its.device) is None else None

    @property
    def nbytes(self) -> int:
        """Of M, the measure of what a step of this bucket needs."""
        return self.count * self.signature.m * self.signature.n * self.dtype.itemsize

    @cached_property
    def dtype(self) -> torch.dtype:
        """The precision of M and of the products on this device."""
        return product_dtype(torch.empty(0, device=self.signature.device))

    def place(self) -> tuple[int, ...]:
        """Addresses of the tensors that :meth:`launch` works on; a graph knows only those it saw."""
        ours = (self.addresses, self.scalars, self._finite, self._start, self._numbers)
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in ours)

    def prepare(self, members: list[Member], state: State, finite: dict[Tensor, Tensor]) -> None:
        """Bring into place what changes from step to step, but for the tables."""
        if self.signature.skips_nonfinite:
            flags = [finite[member.param] for member in members for _ in range(member.count)]
            stacked = torch.stack(flags).to(torch.float32)
            self._finite = stacked if self._finite is None else self._finite.copy_(stacked)
        if self.sketched is not None:
            self._draw(self.sketched, self._key(members))
            if self.sketched.is_warm:
                self._recall(self.sketched, members, state)

    def launch(self) -> Launched:
        """Momentum, polar, apply: launches only, on tensors that keep their place."""
        from polarstep.kernels.blend import blend
        from polarstep.kernels.momentum import momentum
        from polarstep.kernels.update import update, update_from_factors

        its = self.signature
        G, C, X = self.addresses
        betas, *tables = self.scalars
        M = torch.empty(self.count, its.m, its.n, dtype=self.dtype, device=its.device)
        finite, element = self._finite, its.dtype
        momentum(G, C, betas, M, element=element, nesterov=its.nesterov, finite=finite)
        if self.sketched is None:
            T = its.polar.as_computed(M)
            update(X, T, *tables, element=element, finite=finite)
            return Launched(M, T, None)
        assert self._numbers is not None
        wide = its.m <= its.n
        factors = self.sketched.factors(M if wide else M.mT, self._numbers, self._start)
        Q, Z = factors.Q, factors.Z
        L, R = (Q, Z) if wide else (Z.mT, Q.mT)
        update_from_factors(X, L, R, *tables, element=element, finite=finite)
        if isinstance(self.sketched.sketch, Warm):
            if self._start is None:
                self._start = torch.zeros(Z.shape, dtype=self.dtype, device=its.device)
            scale = self.sketched.sketch.scale(len(self._numbers))
            blend(Z, self._numbers, scale, self._start, finite)
        return Launched(M, None, factors)

    def settle(self, members: list[Member], state: State) -> None:
        """Leave a warm sketch's start in the optimizer's state, where checkpoints find it.

        In somebody's own graph it goes to where the graph took it from, for the next replay.
        """
        if self._start is None or self._parts:
            return
        self._parts = list(torch.split(self._start, [member.count for member in members]))
        for member, part in zip(members, self._parts, strict=True):
            of_parameter, key = state[member.param], basis_key(member.block)
            if in_a_graph() and key in of_parameter and of_parameter[key].shape == part.shape:
                of_parameter[key].copy_(part)
            else:
                of_parameter[key] = part

    def show(self, members: list[Member], hooks: tuple[PolarHook, ...], step: Launched) -> None:
        """Call the hooks on what :meth:`launch` returned."""
        T, factors = step.T, step.factors
        if T is None:
            assert factors is not None
            wide = self.signature.m <= self.signature.n
            T = factors.product_like(step.M if wide else step.M.mT)
            T = T if wide else T.mT
        owners = [member for member in members for _ in range(member.count)]
        bucket = Bucket(
            self.signature.polar,
            members[0].group["step"],
            self._key(members),
            tuple(member.name for member in owners),
            tuple(member.param for member in owners),
            step.M,
            T,
            factors,
        )
        for hook in hooks:
            hook(bucket)

    def _key(self, members: list[Member]) -> tuple[int | str, ...]:
        """Of the generator."""
        its = self.signature
        return generator_key(its.polar, its.seed, its.m, its.n, members[0].group["step"])

    def _draw(self, polar: LowRank, key: tuple[int | str, ...]) -> None:
        """This step's random numbers, in the place where a captured graph reads them."""
        if key == self._drawn:
            return
        its, self._drawn = self.signature, key
        generator = rng.generator(*key, device=its.device)
        self._numbers = polar.draw(its.m, its.n, generator, out=self._numbers)

    def _recall(self, polar: LowRank, members: list[Member], state: State) -> None:
        """Bring the starts that the last step left into place, if there are any."""
        known = [state[member.param].get(basis_key(member.block)) for member in members]
        if len(known) == len(self._parts) and all(map(_is, known, self._parts)):
            return  # they are where the last step left them
        self._parts = []
        shape = (polar.width, max(self.signature.m, self.signature.n))
        # One of another width counts for none: somebody has changed the rank since.
        known = [each if each is None or each.shape[1:] == shape else None for each in known]
        if all(each is None for each in known):
            self._start = None  # a cold start
            return
        start = torch.empty((self.count, *shape), dtype=self.dtype, device=self.signature.device)
        places = torch.split(start, [member.count for member in members])
        for place, each in zip(places, known, strict=True):
            if each is None:
                assert self._numbers is not None
                place.copy_(self._numbers.mT)  # new among others: a Gaussian sketch
            else:
                place.copy_(each)  # from a checkpoint, or from another bucket
        self._start = start


def _is(a: object, b: object) -> bool:
    return a is b
