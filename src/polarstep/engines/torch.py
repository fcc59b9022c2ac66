"""The engine of torch's operations: on any device, in any layout, for sharded parameters too.

C and X belong to a parameter, which may have blocks in several buckets (a fused projection with unequal
parts). Its momentum is advanced for the first of its blocks, and X is updated once T of every block is
known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polarstep.bucket import TensorBucket
from polarstep.groups import scale_of
from polarstep.maps import Polar
from polarstep.ops import ops_of
from polarstep.ranks.gather import Gathering
from polarstep.ranks.layout import is_sharded, local, placed_like
from polarstep.rates import at_assumed_norm
from polarstep.state import (
    State,
    add_compensated,
    is_compensated,
    keep_momentum,
    momentum_dtype,
    momentum_of,
    rounding_error,
    stored_dtype,
)
from polarstep.stepping.collect import Work

__all__ = ["Target", "TorchEngine", "apply_updates"]


class TorchEngine:
    """Momentum and updates of one step, parameter by parameter."""

    def __init__(self) -> None:
        self._targets: dict[int, Target] = {}
        self._gathered: set[int] = set()  # parameters whose M has been asked for from all ranks

    def begin_gathering(self, b: TensorBucket) -> Exception | None:
        """Begin to gather M of a bucket's parameters.

        Returns an error of this rank. It has then sent zeros, as other ranks wait for its parts.
        """
        failed = None
        for i, p in enumerate(member.param for member in b.members):
            if id(p) not in self._gathered:
                self._gathered.add(id(p))
                try:
                    self.targets(b)[i].begin_gathering()
                except Exception as error:
                    failed = failed or error
                    Gathering(torch.zeros_like(local(p), dtype=momentum_dtype(p.dtype)), p)
        return failed

    def targets(self, b: TensorBucket) -> list[Target]:
        """The parameters of a bucket's blocks."""
        for member in b.members:
            if id(member.param) not in self._targets:
                self._targets[id(member.param)] = Target(member.work, member.index, b.state)
        return [self._targets[id(member.param)] for member in b.members]

    def momentum(self, b: TensorBucket) -> Tensor:
        """M as one batch; each parameter writes its part in place where it can."""
        targets, its = self.targets(b), b.signature
        if len(targets) > 1 and all(target.writes_momentum() for target in targets):
            dtype = momentum_dtype(its.dtype)
            M = torch.empty(sum(b.counts), its.m, its.n, dtype=dtype, device=its.device)
            for target, part in zip(targets, torch.split(M, b.counts), strict=True):
                target.write_momentum(part)
            return M
        blocks = [
            target.momentum(member.block) for target, member in zip(targets, b.members, strict=True)
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def update(self, b: TensorBucket, polar: Polar) -> None:
        """Update X; T = LR is never stored where torch can add the product to X at once."""
        targets = self.targets(b)
        polar = at_assumed_norm(polar, b.map) if b.signature.by_norm else polar
        two = polar.two_factors
        products_taken = [two is not None and t.takes_product(two[0].dtype) for t in targets]
        if two is not None:
            halves = (torch.split(each, b.counts) for each in two)
            for target, taken, L, R in zip(targets, products_taken, *halves, strict=True):
                if taken:
                    target.take_product(L, R)
        if all(products_taken):
            return
        parts = torch.split(polar.dense.to(polar.M.dtype), b.counts)
        ready: list[tuple[Target, tuple[Tensor, Tensor, Any]]] = []
        for target, taken, member, T in zip(targets, products_taken, b.members, parts, strict=True):
            update = None if taken else target.take(member.block, T)
            if update is not None:
                ready.append((target, update))
        apply_updates(ready)


class Target:
    """One parameter during one step."""

    def __init__(self, work: Work, index: int, state: State) -> None:
        self.work, self.index = work, index
        self.p, self.view = work.params[index], work.views[index]
        self.finite = None if work.finite is None else work.finite[index]
        self.is_compensated = is_compensated(work.group, self.p)
        self._state, self._kept = state[self.p], stored_dtype(work.group, self.p)
        self._G = local(work.grads[index])
        self._C = local(momentum_of(self.p, self._state, self._kept))
        self._advanced = False
        self._M: Tensor | None = None  # this rank's part of M
        self._gathering: Gathering | None = None  # the whole of M, where it is sharded
        self._blocks: list[Tensor] | None = None  # the blocks of M
        self._T: list[Tensor | None] = [None] * len(self.view.shapes)

    @property
    def has_one_block(self) -> bool:
        """Whether the parameter is in one bucket."""
        return len(self._T) == 1

    def advance(self) -> None:
        """``C ← βC + G``, at the first call only."""
        if self._advanced:
            return
        self._advanced, beta = True, self.work.group["momentum"]
        if self.finite is None:
            torch.add(self._G, self._C, alpha=beta, out=self._C)  # one pass over memory
        else:
            new = torch.where(self.finite, beta * self._C + self._G, self._C)
            self._C.copy_(new)
        keep_momentum(self._C, self.p, self._state, self._kept)

    def writes_momentum(self) -> bool:
        """Whether :meth:`write_momentum` can be used: M is one block, not C itself, and not sharded."""
        made = self.work.group["nesterov"] and self.finite is None and self.view.in_turn
        return made and self.has_one_block and not is_sharded(self.p)

    def write_momentum(self, out: Tensor) -> None:
        """Compute M in ``out``."""
        self.advance()
        beta = self.work.group["momentum"]
        G, C = (each.reshape(out.shape) for each in (self._G, self._C))
        torch.add(G, C, alpha=beta, out=out)

    def begin_gathering(self) -> None:
        """Begin to gather M of a sharded parameter."""
        self._gathering = Gathering(self.local_momentum(), self.p)

    def momentum(self, block: int) -> Tensor:
        """M of a block, not to be written to: without Nesterov it is C itself."""
        if self._blocks is None:
            gathering = self._gathering
            M = self.local_momentum() if gathering is None else gathering.wait()
            self._blocks = self.view.blocks(M)
        return self._blocks[block]

    def local_momentum(self) -> Tensor:
        """This rank's part of M, not to be written to: without Nesterov it is C itself."""
        if self._M is None:
            self.advance()
            M = self._C.to(momentum_dtype(self.p.dtype))
            if self.work.group["nesterov"]:
                M = torch.add(self._G, self._C, alpha=self.work.group["momentum"])
            if self.finite is not None:
                M = torch.where(self.finite, M, 0)  # T(0) = 0, so X stays
            self._M = M
        return self._M

    def takes_product(self, dtype: torch.dtype) -> bool:
        """Whether torch has X ← βX + αLR as one operation for this X and factors of ``dtype``."""
        return (
            ops_of(self.p.device).host_reads_are_free  # on a GPU factors have 16 bits
            and self.p.dtype == dtype
            and not is_sharded(self.p)
            and self.p.is_contiguous()
            and self.has_one_block
            and self.view.in_turn
            and not self.is_compensated
            and not isinstance(self.work.group["lr"], Tensor)
        )

    def sizes(self) -> list[Any]:
        """−η·scale of each block."""
        group = self.work.group
        lr, scale = group["lr"], scale_of(group, self.p.device)
        lr = lr.reshape(()) if isinstance(lr, Tensor) else lr  # torch allows any one element
        return [-lr * scale(m, n) for _, m, n in self.view.shapes]

    def remains(self) -> Any:
        """The factor on X in the update: 1 − ηλ, or 1 if this call has decayed X already.

        It decays X if the parameter may be skipped and its rounding is not compensated.
        """
        group = self.work.group
        lr, decay = group["lr"], group["weight_decay"]
        lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
        remains = 1 - lr * decay
        if self.finite is None or decay == 0:
            return remains if decay != 0 else 1.0
        if self.is_compensated:
            return torch.where(self.finite, remains, 1.0)
        X = local(self.p)
        X.copy_(torch.where(self.finite, X * remains, X))
        return 1.0

    def add_compensated(self, T: Tensor, size: Any) -> None:
        """``X ← (1 − ηλ)X + size·T``; the rounding error is kept for the next step."""
        R = local(rounding_error(self.p, self._state))
        add_compensated(local(self.p), R, T, size, self.remains())

    def take_product(self, L: Tensor, R: Tensor) -> None:
        """``X ← (1 − ηλ)X − η·scale·LR``."""
        X = self.p.view(self.view.shapes[0])
        X.baddbmm_(L, R, beta=self.remains(), alpha=self.sizes()[0])

    def take(self, block: int, T: Tensor) -> tuple[Tensor, Tensor, Any] | None:
        """(X, T, −η·scale) once T of all blocks is known, with ``T`` for ``block``; ``None`` before."""
        sharded = is_sharded(self.p)
        if self.has_one_block and sharded:  # a rank keeps its own part of T at once
            T = placed_like(self.view.assemble([T], self.p.shape), self.p)
        self._T[block] = T
        blocks = [each for each in self._T if each is not None]
        if len(blocks) < len(self._T):
            return None
        sizes = self.sizes()
        size = sizes[0]
        if len(blocks) > 1 or isinstance(size, Tensor):
            blocks = [each * factor for each, factor in zip(blocks, sizes, strict=True)]
            size = 1.0
        if self.has_one_block and sharded:
            update = blocks[0]
        else:
            update = placed_like(self.view.assemble(blocks, self.p.shape), self.p)
        return local(self.p), local(update), size


def apply_updates(ready: Iterable[tuple[Target, tuple[Tensor, Tensor, Any]]]) -> None:
    """``X ← (1 − ηλ)X − η·scale·T``, grouped so that T is scaled and added in one pass."""
    alike: dict[tuple[float, float], tuple[list[Tensor], list[Tensor]]] = {}
    for target, (X, T, size) in ready:
        if target.is_compensated:
            target.add_compensated(T, size)
            continue
        remains = target.remains()
        if isinstance(remains, Tensor):
            X.mul_(remains)
            remains = 1.0
        params, updates = alike.setdefault((size, remains), ([], []))
        params.append(X)
        updates.append(T)
    for (size, remains), (params, updates) in alike.items():
        if remains != 1.0:
            torch._foreach_mul_(params, remains)
        torch._foreach_add_(params, updates, alpha=size)
