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
from polarstep.cuda_graphs import in_a_graph
from polarstep.matrix import product_dtype
from polarstep.optim.carried import basis_key, kept_key, start_entries, whitening_key
from polarstep.optim.groups import Group
from polarstep.optim.phases import Bucket, PolarHook, generator_key
from polarstep.optim.work import State
from polarstep.polar import LowRank, warm
from polarstep.polar.base import Kept, PolarMap, Sketched, lifted, oriented
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
    T: Tensor | Sketched


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
        self._kept: Tensor | None = None  # Qᵀ of a basis that is kept, aligned with zero rows
        self._parts: list[Start | Kept] = []  # of these, as the optimizer's state holds them
        self.makes_basis = True  # at this step
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
        others = (self._finite, self._numbers, self._kept)
        ours += [tensor for tensor in others if tensor is not None]
        if self._start is not None:
            ours += [self._start.S] if self._start.V is None else [self._start.S, self._start.V]
        return tuple([tensor.data_ptr() for tensor in ours])

    def prepare(self, members: list[Member], state: State, finite: dict[Tensor, Tensor]) -> None:
        """Bring into place what changes from step to step, but for the tables."""
        if self.signature.skips_nonfinite:
            flags = [finite[member.param] for member in members for _ in range(member.count)]
            stacked = torch.stack(flags).to(torch.float32)
            self._finite = stacked if self._finite is None else self._finite.copy_(stacked)
        polar = self.sketched
        if polar is None:
            return
        if polar.keeps_basis:
            self._recall_kept(polar, members, state)
            step = members[0].group["step"]
            self.makes_basis = self._kept is None or in_a_graph() or polar.makes_basis(step)
            if self._kept is None:  # here and not when it is made: a graph counts on its place
                its = self.signature
                shape = (self.count, polar.aligned_width(self.dtype), min(its.m, its.n))
                self._kept = torch.zeros(shape, dtype=self.dtype, device=its.device)
        if self.makes_basis:
            self._draw(polar, self._key(members))
        if polar.is_warm:
            self._recall(polar, members, state)

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
        L, R = oriented(step, its.m, its.n)
        update_from_factors(X, L, R, *tables, element=element, finite=finite)
        return Launched(M, step)

    def _step(self, polar: LowRank, A: Tensor) -> Sketched:
        """T of wide ``A``, and of a warm sketch the next start."""
        from polarstep.kernels.blend import blend

        numbers, start = self._numbers, self._start
        if not self.makes_basis:
            assert self._kept is not None
            return polar.in_basis(A, self._kept.mT)
        assert numbers is not None
        if not isinstance(polar.sketch, Warm):
            Q = polar.basis(A, numbers)
            if polar.keeps_basis:
                self._keep(Q.mT)
            return polar.in_basis(A, Q)
        if start is None or self._without_Z != (start.V is not None):
            # What remains of it is for those whose step is skipped.
            whitened = self._without_Z
            self._start = warm.start_from(polar, numbers, start, like=A, whitened=whitened)
        assert self._start is not None
        if self._without_Z:
            return warm.warm_step(polar, A, numbers, start, self._start, self._finite)
        factors = polar.in_basis(A, polar.basis(A, numbers, start)).factors
        scale = polar.sketch.scale(len(numbers))
        blend(factors.Z, numbers, scale, self._start.S, self._finite)
        return factors

    def _keep(self, Qt: Tensor) -> None:
        """Keep a basis for the next steps, but where the parameter is skipped."""
        assert self._kept is not None
        if self._finite is not None:
            Qt = torch.where(self._finite[:, None, None] != 0, Qt, self._kept)
        self._kept.copy_(Qt)

    def settle(self, members: list[Member], state: State) -> None:
        """Leave what the next step starts from in the optimizer's state, where checkpoints find it.

        In somebody's own graph it goes to where the graph took it from, for the next replay.
        """
        left = self._left_behind()
        if left is None or self._parts:
            return
        self._parts = [*left.split([member.count for member in members])]
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

    def _left_behind(self) -> Start | Kept | None:
        if self._kept is None:
            return self._start
        assert self.sketched is not None
        return Kept(self._kept[:, : self.sketched.width])

    def show(self, members: list[Member], hooks: tuple[PolarHook, ...], step: Launched) -> None:
        """Call the hooks on what :meth:`launch` returned."""
        factors = None
        if isinstance(step.T, Tensor):
            T = step.T
        else:
            T, factors = lifted(step.T, step.M), step.T.factors
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

    def _recall_kept(self, polar: LowRank, members: list[Member], state: State) -> None:
        """Bring the bases that an earlier step left into place, if all of them are there."""
        known = [state[member.param].get(kept_key(member.block)) for member in members]
        if [*map(id, known)] == [id(part.Qt) for part in self._parts if isinstance(part, Kept)]:
            return  # they are where that step left them
        self._parts, self._kept = [], None
        shape = (polar.width, min(self.signature.m, self.signature.n))
        found = [Qt for Qt in known if Qt is not None and Qt.shape[1:] == shape]
        if len(found) == len(known):
            self._kept = polar.aligned(torch.cat(found).to(self.dtype)).contiguous()

    def _recall(self, polar: LowRank, members: list[Member], state: State) -> None:
        """Bring the starts that the last step left into place, if there are any."""
        S = [state[member.param].get(basis_key(member.block)) for member in members]
        V = [state[member.param].get(whitening_key(member.block)) for member in members]
        ours = [part for part in self._parts if isinstance(part, Start)]
        left = [part.S for part in ours] + [part.V for part in ours]
        if [*map(id, S), *map(id, V)] == [*map(id, left)]:
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
