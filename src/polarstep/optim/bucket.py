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
from polarstep.optim.phases import (
    Bucket,
    PolarHook,
    State,
    basis_key,
    generator_key,
    start_entries,
    whitening_key,
)
from polarstep.polar import LowRank, warm
from polarstep.polar.base import Factors, PolarMap
from polarstep.sketch import Warm
from polarstep.sketch.warm import Start

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
    """What a step computed: M, and T or what it is made of."""

    M: Tensor
    T: Tensor | Factors | warm.WarmStep


class DeviceBucket:
    """The tensors of a bucket that outlive a step, and the step itself."""

    def __init__(self, signature: Signature, count: int) -> None:
        self.signature = signature
        self.count = count
        none = torch.empty(0, device=signature.device)
        self.addresses = none  # (3, count): of G, C and X
        self.scalars = none  # (3, count): β, 1 − ηλ, η·scale
        self._finite: Tensor | None = None
        self._start: Start | None = None  # of a warm sketch
        self._parts: list[Start] = []  # of it, by member, as the optimizer's state holds them
        self._numbers: Tensor | None = None  # this step's random numbers
        self._drawn: tuple[int | str, ...] | None = None  # their generator's key

    @cached_property
    def sketched(self) -> LowRank | None:
        """The polar map, if T comes as two factors."""
        its = self.signature
        if not isinstance(its.polar, LowRank):
            return None
        return its.polar if its.polar.full_space_reason(its.m, its.n, its.device) is None else None

    @cached_property
    def _without_Z(self) -> bool:
        """Whether a step starts from two factors of Ωᵀ, and leaves them."""
        its, polar = self.signature, self.sketched
        return polar is not None and warm.applies(polar, its.m, its.n, its.device, self.dtype)

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
        ours = [self.addresses, self.scalars]
        ours += [tensor for tensor in (self._finite, self._numbers) if tensor is not None]
        if self._start is not None:
            ours += [self._start.S] if self._start.V is None else [self._start.S, self._start.V]
        return tuple([tensor.data_ptr() for tensor in ours])

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
            return Launched(M, T)
        wide = its.m <= its.n
        step = self._step(self.sketched, M if wide else M.mT)
        L, R = step.two_factors
        L, R = (L, R) if wide else (R.mT, L.mT)
        update_from_factors(X, L, R, *tables, element=element, finite=finite)
        return Launched(M, step)

    def _step(self, polar: LowRank, A: Tensor) -> Factors | warm.WarmStep:
        """T of wide ``A``, and of a warm sketch the next start."""
        from polarstep.kernels.blend import blend

        numbers, start = self._numbers, self._start
        assert numbers is not None
        if not isinstance(polar.sketch, Warm):
            return polar.factors(A, numbers)
        if start is None or self._without_Z != (start.V is not None):
            # What remains of it is for those whose step is skipped.
            whitened = self._without_Z
            self._start = warm.start_from(polar, numbers, start, like=A, whitened=whitened)
        assert self._start is not None
        if self._without_Z:
            return warm.warm_step(polar, A, numbers, start, self._start, self._finite)
        factors = polar.factors(A, numbers, start)
        scale = polar.sketch.scale(len(numbers))
        blend(factors.Z, numbers, scale, self._start.S, self._finite)
        return factors

    def settle(self, members: list[Member], state: State) -> None:
        """Leave a warm sketch's start in the optimizer's state, where checkpoints find it.

        In somebody's own graph it goes to where the graph took it from, for the next replay.
        """
        if self._start is None or self._parts:
            return
        self._parts = self._start.split([member.count for member in members])
        for member, part in zip(members, self._parts, strict=True):
            of_parameter = state[member.param]
            for key, value in start_entries(member.block, part):
                known = of_parameter.get(key)
                if value is None:
                    of_parameter.pop(key, None)
                elif in_a_graph() and known is not None and known.shape == value.shape:
                    known.copy_(value)
                else:
                    of_parameter[key] = value

    def show(self, members: list[Member], hooks: tuple[PolarHook, ...], step: Launched) -> None:
        """Call the hooks on what :meth:`launch` returned."""
        T, factors, wide = step.T, None, self.signature.m <= self.signature.n
        if isinstance(T, warm.WarmStep):
            assert self.sketched is not None
            assert self._numbers is not None
            factors = T.factors(self.sketched.width, self._numbers)
        elif isinstance(T, Factors):
            factors = T
        if not isinstance(T, Tensor):
            T = T.product_like(step.M if wide else step.M.mT)
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
        S = [state[member.param].get(basis_key(member.block)) for member in members]
        V = [state[member.param].get(whitening_key(member.block)) for member in members]
        ours_S, ours_V = [part.S for part in self._parts], [part.V for part in self._parts]
        if [*map(id, S), *map(id, V)] == [*map(id, ours_S), *map(id, ours_V)]:
            return  # they are where the last step left them
        self._parts = []
        shape = (polar.width, max(self.signature.m, self.signature.n))
        # One of another width counts for none: somebody has changed the rank since.
        S = [each if each is None or each.shape[1:] == shape else None for each in S]
        if all(each is None for each in S):
            self._start = None  # a cold start
            return
        starts = []
        for member, s, v in zip(members, S, V, strict=True):
            if s is None:
                assert self._numbers is not None
                fresh = self._numbers.mT.expand(member.count, *shape)  # a Gaussian sketch
                starts.append(Start(fresh.to(self.dtype)))
            else:  # from a checkpoint, or from another bucket
                starts.append(Start(s, v).to(self.dtype))
        self._start = Start.joined(starts)
