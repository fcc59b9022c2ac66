"""One bucket on a GPU: equation (1) for all matrices of one shape, in a few launches.

    momentum   one kernel reads G and C, writes C and M, M in bfloat16 and in one batch
    polar      the polar map of the batch: products in bfloat16
    apply      one kernel reads and writes X; T = QZ is multiplied out on the way, never stored

After a few steps the launches are captured as a CUDA graph, and a step is then one replay. What
changes from step to step lies in tensors that the graph reads: addresses, momenta, learning rates
and decays, fresh random numbers, last step's factors. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polarstep import rng
from polarstep.kernels.pointers import Table
from polarstep.matrix import product_dtype
from polarstep.optim.phases import Bucket, PolarHook, Work, basis_key
from polarstep.optim.scaling import resolve_scale
from polarstep.polar import LowRank
from polarstep.polar.base import Factors, PolarMap

__all__ = ["DeviceBucket", "Member", "Signature"]

State = dict[Tensor, dict[str, Any]]

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

    @property
    def product_dtype(self) -> torch.dtype:
        """The precision of M and of the products on this device."""
        return product_dtype(torch.empty(0, device=self.device))

    @property
    def is_sketched(self) -> bool:
        """Whether T comes as two factors."""
        return isinstance(self.polar, LowRank) and (
            self.polar.full_space_reason(self.m, self.n) is None
        )


@dataclass(frozen=True)
class Member:
    """A run of equally shaped matrices at equal distances within one parameter."""

    work: Work
    index: int  # of the parameter in its work
    block: int  # of the parameter's matrix view
    count: int
    offset: int  # of the first matrix, in elements
    stride: int  # from one matrix to the next, in elements

    @property
    def param(self) -> Tensor:
        """The parameter."""
        return self.work.params[self.index]

    def addresses(self, tensor: Tensor) -> list[int]:
        """Where the matrices lie in ``tensor``, which has the parameter's shape."""
        base, size = tensor.data_ptr(), tensor.element_size()
        return [base + size * (self.offset + i * self.stride) for i in range(self.count)]


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
        self._start: Tensor | None = None  # Zᵀ of the last step, (count, long side, ℓ)
        self._fresh: Tensor | None = None  # this step's Gaussian matrix, (long side, ℓ)
        self._steps_taken = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(
        self, members: list[Member], state: State, step: int, hooks: Iterable[PolarHook] = ()
    ) -> None:
        """One step of all members."""
        self._refresh(members, state)
        warm = self._recall(members, state)
        if warm:
            self._draw(step)
        if hooks or not (warm or not self.signature.polar.is_random):
            self._run(members, step, warm, hooks)
        elif self._graph is not None:
            self._graph.replay()
        elif self._should_capture():
            self._capture(warm)
        else:
            self._run(members, step, warm, hooks)
        self._remember(members, state)
        self._steps_taken += 1

    def _should_capture(self) -> bool:
        return (
            self.signature.device.type == "cuda"
            and self._steps_taken >= STEPS_BEFORE_CAPTURE
            and not torch.cuda.is_current_stream_capturing()
        )

    def _capture(self, warm: bool) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Another thread (a loader that pins memory) may use CUDA meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._step(warm, None)
        self._graph.replay()

    def _run(
        self, members: list[Member], step: int, warm: bool, hooks: Iterable[PolarHook]
    ) -> None:
        generator = None
        if self.signature.polar.is_random and not warm:
            generator = rng.generator(*self._key(step), device=self.signature.device)
        M, T, factors = self._step(warm, generator)
        if not hooks:
            return
        if factors is not None:
            T = factors.Q @ factors.Z
            T = T if self.signature.m <= self.signature.n else T.mT
        assert T is not None
        owners = [member for member in members for _ in range(member.count)]
        bucket = Bucket(
            self.signature.polar,
            step,
            self._key(step),
            tuple(member.work.names[member.index] for member in owners),
            tuple(member.param for member in owners),
            M,
            T,
            factors,
        )
        for hook in hooks:
            hook(bucket)

    def _step(
        self, warm: bool, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor | None, Factors | None]:
        """Momentum, polar, apply: launches only, on tensors that keep their place.

        Returns M, and T or its factors.
        """
        from polarstep.kernels.momentum import momentum
        from polarstep.kernels.update import update, update_from_factors

        its = self.signature
        M = torch.empty(self.count, its.m, its.n, dtype=its.product_dtype, device=its.device)
        momentum(
            self._gradients.tensor,
            self._buffers.tensor,
            self._betas.tensor,
            M,
            element=its.dtype,
            nesterov=its.nesterov,
            finite=self._finite,
        )
        tables = (self._decays.tensor, self._steps.tensor)
        if not its.is_sketched:
            T = its.polar(M, generator=generator)
            update(self._weights.tensor, T, *tables, element=its.dtype, finite=self._finite)
            return M, T, None
        assert isinstance(its.polar, LowRank)
        A = M if its.m <= its.n else M.mT
        if warm:
            assert self._start is not None
            assert self._fresh is not None
            factors = its.polar.factors_from(A, self._start, self._fresh)
        else:
            factors = its.polar.factors(A, generator)
        Q, Z = factors.Q, factors.Z
        L, R = (Q, Z) if its.m <= its.n else (Z.mT, Q.mT)
        update_from_factors(
            self._weights.tensor, L, R, *tables, element=its.dtype, finite=self._finite
        )
        if its.polar.is_warm:
            if self._start is None:
                self._start = Z.mT.contiguous()
            else:
                self._start.copy_(Z.mT)
        return M, None, factors

    def _refresh(self, members: list[Member], state: State) -> None:
        """Write what changed since the last step into the tables."""
        weights, gradients, buffers = [], [], []
        betas, decays, steps, finite = [], [], [], []
        m, n = self.signature.m, self.signature.n
        for member in members:
            group, p, i = member.work.group, member.param, member.index
            weights += member.addresses(p)
            gradients += member.addresses(member.work.grads[i])
            buffers += member.addresses(state[p]["momentum_buffer"])
            lr = float(group["lr"])
            betas += [group["momentum"]] * member.count
            decays += [1 - lr * group["weight_decay"]] * member.count
            steps += [lr * resolve_scale(group["lr_scale"])(m, n)] * member.count
            if member.work.finite is not None:
                finite += [member.work.finite[i]] * member.count
        self._weights.fill(weights)
        self._gradients.fill(gradients)
        self._buffers.fill(buffers)
        self._betas.fill(betas)
        self._decays.fill(decays)
        self._steps.fill(steps)
        if finite:
            flags = torch.stack(finite).to(torch.float32)
            self._finite = flags if self._finite is None else self._finite.copy_(flags)

    def _recall(self, members: list[Member], state: State) -> bool:
        """Bring the last step's factors into place; False if there are none at all."""
        if not (self.signature.is_sketched and self.signature.polar.is_warm):
            return False
        known = [state[member.param].get(basis_key(member.block)) for member in members]
        if all(basis is None for basis in known):
            self._start = None
            self._graph = None
            return False
        shapes = {basis.shape[1:] for basis in known if basis is not None}
        if self._start is None or self._start.shape[1:] not in shapes:
            (shape,) = shapes
            self._start = torch.zeros(
                self.count, *shape, dtype=self.signature.product_dtype, device=self.signature.device
            )
            self._graph = None
        for place, basis in zip(self._places(members), known, strict=True):
            if basis is None:
                self._start[place].zero_()
            elif basis.data_ptr() != self._start[place].data_ptr():
                self._start[place].copy_(basis)  # loaded from a checkpoint, or from another bucket
        return True

    def _remember(self, members: list[Member], state: State) -> None:
        if self._start is None:
            return
        for place, member in zip(self._places(members), members, strict=True):
            state[member.param][basis_key(member.block)] = self._start[place]

    @staticmethod
    def _places(members: list[Member]) -> list[slice]:
        places, first = [], 0
        for member in members:
            places.append(slice(first, first + member.count))
            first += member.count
        return places

    def _draw(self, step: int) -> None:
        """Fresh Gaussian numbers, in the place where a captured graph reads them."""
        its = self.signature
        assert isinstance(its.polar, LowRank)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # inside somebody's own graph: the numbers drawn before stay in use
        shape = (max(its.m, its.n), its.polar.width)
        generator = rng.generator(*self._key(step), device=its.device)
        fresh = torch.randn(shape, generator=generator, device=its.device)
        if self._fresh is None:
            self._fresh = torch.empty(shape, dtype=its.product_dtype, device=its.device)
        self._fresh.copy_(fresh)

    def _key(self, step: int) -> tuple[int | str, ...]:
        return (self.signature.seed, f"{self.signature.m}x{self.signature.n}", step)
