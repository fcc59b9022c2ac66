"""One bucket on a GPU: equation (1) for all matrices of one shape, in a few launches.

    momentum   one kernel reads G and C, writes C and M, M in bfloat16 and in one batch
    polar      the polar map of the batch: products in bfloat16
    apply      one kernel reads and writes X; T = QZ is multiplied out on the way, never stored

After a few steps the launches are captured as a CUDA graph, and a step is then one replay. What
changes from step to step lies in tensors that the graph reads: addresses, momenta, learning rates
and decays, random numbers, a warm sketch's start. Nothing here waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polarstep import rng
from polarstep.kernels.pointers import Table
from polarstep.matrix import product_dtype
from polarstep.optim.groups import Group
from polarstep.optim.phases import Bucket, PolarHook, State, basis_key
from polarstep.optim.scaling import resolve_scale
from polarstep.polar import LowRank
from polarstep.polar.base import Factors, PolarMap
from polarstep.sketch import Warm

__all__ = ["DeviceBucket", "Member", "Signature"]

# A bucket is captured after this many steps: all its kernels are compiled by then.
STEPS_BEFORE_CAPTURE = 3


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

    def addresses(self, tensor: Tensor) -> range:
        """Where the matrices lie in ``tensor``, which has the parameter's shape."""
        first = tensor.data_ptr() + self.offset
        return range(first, first + self.count * self.stride, self.stride)


class DeviceBucket:
    """The tensors of a bucket that outlive a step, and the step itself."""

    def __init__(self, signature: Signature, count: int) -> None:
        self.signature = signature
        self.count = count
        device = signature.device
        self._gradients = Table(device, torch.int64)
        self._buffers = Table(device, torch.int64)
        self._weights = Table(device, torch.int64)
        self._betas = Table(device, torch.float32)
        self._decays = Table(device, torch.float32)
        self._steps = Table(device, torch.float32)
        self._finite: Tensor | None = None
        self._start: Tensor | None = None  # Ωᵀ of a warm sketch, (count, ℓ, long side)
        self._numbers: Tensor | None = None  # this step's random numbers
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    @cached_property
    def sketched(self) -> LowRank | None:
        """The polar map, if T comes as two factors."""
        its = self.signature
        if not isinstance(its.polar, LowRank):
            return None
        return its.polar if its.polar.full_space_reason(its.m, its.n, its.device) is None else None

    @cached_property
    def dtype(self) -> torch.dtype:
        """The precision of M and of the products on this device."""
        return product_dtype(torch.empty(0, device=self.signature.device))

    @property
    def is_captured(self) -> bool:
        """Whether a step is the replay of a graph."""
        return self._graph is not None

    def run(
        self,
        members: list[Member],
        state: State,
        finite: dict[Tensor, Tensor],
        hooks: tuple[PolarHook, ...] = (),
    ) -> None:
        """One step of all members; ``finite`` has a flag for those that may have to be skipped."""
        its = self.signature
        key = (its.seed, f"{its.m}x{its.n}", members[0].group["step"])
        self._refresh(members, state, finite)
        if self.sketched is not None:
            self._draw(self.sketched, key)
            self._recall(self.sketched, members, state)
        if hooks:
            self._show(members, key, hooks, *self._step())
        elif self._graph is not None:
            self._graph.replay()
        elif self._should_capture():
            self._capture()
        else:
            self._step()
        if self._start is not None:
            for member, start in zip(members, self._parts(self._start, members), strict=True):
                state[member.param][basis_key(member.block)] = start
        self._runs += 1

    def _should_capture(self) -> bool:
        return (
            self.signature.device.type == "cuda"
            and self._runs >= STEPS_BEFORE_CAPTURE
            and not torch.cuda.is_current_stream_capturing()
        )

    def _capture(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Another thread (a loader that pins memory) may use CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step()
        graph.replay()
        self._graph = graph

    def _step(self) -> tuple[Tensor, Tensor | None, Factors | None]:
        """Momentum, polar, apply: launches only, on tensors that keep their place.

        Returns M, and T or its factors.
        """
        from polarstep.kernels.blend import blend
        from polarstep.kernels.momentum import momentum
        from polarstep.kernels.update import update, update_from_factors

        its = self.signature
        M = torch.empty(self.count, its.m, its.n, dtype=self.dtype, device=its.device)
        momentum(
            self._gradients.tensor,
            self._buffers.tensor,
            self._betas.tensor,
            M,
            element=its.dtype,
            nesterov=its.nesterov,
            finite=self._finite,
        )
        weights, tables = self._weights.tensor, (self._decays.tensor, self._steps.tensor)
        if self.sketched is None:
            T = its.polar(M)
            update(weights, T, *tables, element=its.dtype, finite=self._finite)
            return M, T, None
        assert self._numbers is not None
        wide = its.m <= its.n
        factors = self.sketched.factors(M if wide else M.mT, self._numbers, self._start)
        Q, Z = factors.Q, factors.Z
        L, R = (Q, Z) if wide else (Z.mT, Q.mT)
        update_from_factors(weights, L, R, *tables, element=its.dtype, finite=self._finite)
        if isinstance(self.sketched.sketch, Warm):
            if self._start is None:
                self._start = torch.zeros_like(Z, memory_format=torch.contiguous_format)
            scale = self.sketched.sketch.scale(len(self._numbers))
            blend(Z, self._numbers, scale, self._start, self._finite)
        return M, None, factors

    def _show(
        self,
        members: list[Member],
        key: tuple[int | str, ...],
        hooks: tuple[PolarHook, ...],
        M: Tensor,
        T: Tensor | None,
        factors: Factors | None,
    ) -> None:
        if T is None:
            assert factors is not None
            T = factors.Q @ factors.Z
            T = T if self.signature.m <= self.signature.n else T.mT
        owners = [member for member in members for _ in range(member.count)]
        bucket = Bucket(
            self.signature.polar,
            members[0].group["step"],
            key,
            tuple(member.name for member in owners),
            tuple(member.param for member in owners),
            M,
            T,
            factors,
        )
        for hook in hooks:
            hook(bucket)

    def _refresh(self, members: list[Member], state: State, finite: dict[Tensor, Tensor]) -> None:
        """Write what changed since the last step into the tables."""
        weights: list[int] = []
        gradients: list[int] = []
        buffers: list[int] = []
        betas: list[float] = []
        decays: list[float] = []
        steps: list[float] = []
        for member in members:
            p, group = member.param, member.group
            assert p.grad is not None
            weights += member.addresses(p)
            gradients += member.addresses(p.grad)
            buffers += member.addresses(state[p]["momentum_buffer"])
            lr = float(group["lr"])
            scale = resolve_scale(group["lr_scale"])(self.signature.m, self.signature.n)
            betas += [group["momentum"]] * member.count
            decays += [1 - lr * group["weight_decay"]] * member.count
            steps += [lr * scale] * member.count
        self._weights.fill(weights)
        self._gradients.fill(gradients)
        self._buffers.fill(buffers)
        self._betas.fill(betas)
        self._decays.fill(decays)
        self._steps.fill(steps)
        if self.signature.skips_nonfinite:
            flags = [finite[member.param] for member in members for _ in range(member.count)]
            stacked = torch.stack(flags).to(torch.float32)
            self._finite = stacked if self._finite is None else self._finite.copy_(stacked)

    def _draw(self, polar: LowRank, key: tuple[int | str, ...]) -> None:
        """This step's random numbers, in the place where a captured graph reads them."""
        its = self.signature
        if its.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return  # inside somebody's own graph: the numbers drawn before stay in use
        numbers = polar.draw(its.m, its.n, rng.generator(*key, device=its.device))
        self._numbers = numbers if self._numbers is None else self._numbers.copy_(numbers)

    def _recall(self, polar: LowRank, members: list[Member], state: State) -> None:
        """Bring the starts that the last step left into place, if there are any."""
        if not polar.is_warm:
            return
        shape = (polar.width, max(self.signature.m, self.signature.n))
        known = [state[member.param].get(basis_key(member.block)) for member in members]
        # One of another width counts for none: somebody has changed the rank since.
        known = [start if start is None or start.shape[1:] == shape else None for start in known]
        if all(start is None for start in known):
            self._start = self._graph = None  # a cold start, and a graph would know only warm ones
            return
        if self._start is None:
            device = self.signature.device
            self._start = torch.empty((self.count, *shape), dtype=self.dtype, device=device)
        for place, start in zip(self._parts(self._start, members), known, strict=True):
            if start is None:
                assert self._numbers is not None
                place.copy_(self._numbers.mT)  # new among others: a Gaussian sketch
            elif start.data_ptr() != place.data_ptr():
                place.copy_(start)  # from a checkpoint, or from another bucket

    @staticmethod
    def _parts(batch: Tensor, members: list[Member]) -> list[Tensor]:
        return list(torch.split(batch, [member.count for member in members]))
