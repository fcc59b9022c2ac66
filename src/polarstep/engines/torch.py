"""The engine of torch's operations: on any device, in any layout, for sharded parameters too.

C and X belong to a parameter, which may have blocks in several buckets (a fused projection with unequal
parts). Its momentum is advanced for the first of its blocks, and X is updated once T of every block is
known.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polarstep.bucket import Parts, PartsOfT, TensorBucket
from polarstep.gradients import Work
from polarstep.groups import scale_of
from polarstep.maps import Polar
from polarstep.momentum import Momentum
from polarstep.ops import ops_of
from polarstep.ranks.layout import is_sharded, local, placed_like
from polarstep.rates import at_assumed_norm
from polarstep.state import (
    State,
    add_compensated,
    is_compensated,
    keep_momentum,
    kept_by_rule,
    momentum_dtype,
    momentum_of,
    rounding_error,
    stored_dtype,
)

if TYPE_CHECKING:
    from polarstep.ranks.exchange import Gathering

__all__ = ["ParameterUpdate", "TorchEngine"]


# (X, T, the factor on T) of a parameter, both this rank's parts, once T of all its blocks is known.
Known = tuple[Tensor, Tensor, Any]


class TorchEngine:
    """Momentum and updates of one step, parameter by parameter."""

    def __init__(self) -> None:
        self._updates: dict[int, ParameterUpdate] = {}  # those that are not done yet, by id

    def of(self, b: TensorBucket) -> list[ParameterUpdate]:
        """The updates of the parameters of a bucket's blocks."""
        for member in b.members:
            if id(member.param) not in self._updates:
                update = ParameterUpdate(member.work, member.index, b.state)
                self._updates[id(member.param)] = update
        return [self._updates[id(member.param)] for member in b.members]

    def not_gathered(self, b: TensorBucket) -> list[Tensor]:
        """The parameters of a bucket of which no part of M has been sent to other ranks."""
        params = {id(member.param): member.param for member in b.members}
        known = self._updates
        return [p for i, p in params.items() if i not in known or known[i].gathering is None]

    def local_momenta(self, b: TensorBucket) -> list[Tensor]:
        """This rank's part of M of each member's parameter."""
        return [update.local_momentum() for update in self.of(b)]

    def momentum(self, b: TensorBucket) -> Tensor:
        """M as one batch; each parameter writes its part in place where it can."""
        updates, its = self.of(b), b.key
        if len(updates) > 1 and all(each.writes_momentum() for each in updates):
            dtype = momentum_dtype(its.dtype)
            M = torch.empty(sum(b.counts), its.m, its.n, dtype=dtype, device=its.device)
            for update, part in zip(updates, torch.split(M, b.counts), strict=True):
                update.write_momentum(part)
            return M
        blocks = [
            update.momentum(member.block) for update, member in zip(updates, b.members, strict=True)
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def update(self, b: TensorBucket, T: Polar | PartsOfT) -> None:
        """Update X, of each parameter when T of all its blocks is known."""
        updates = self.of(b)
        if isinstance(T, Polar):
            known = self._from_polar(b, T, updates)
        else:
            known = [
                update.take_parts(member.block, shape, parts)
                for update, member, shape, parts in zip(updates, b.members, *T, strict=True)
            ]
        apply_updates(
            (update, its) for update, its in zip(updates, known, strict=True) if its is not None
        )
        for update in updates:
            if update.is_done:
                self._updates.pop(id(update.p), None)

    def _from_polar(
        self, b: TensorBucket, polar: Polar, updates: list[ParameterUpdate]
    ) -> list[Known | None]:
        """T = LR is never stored where torch can add the product to X at once."""
        polar = at_assumed_norm(polar, b.map) if b.key.by_norm else polar
        two = polar.two_factors
        products_taken = [two is not None and each.takes_product(two[0].dtype) for each in updates]
        if two is not None:
            halves = (torch.split(each, b.counts) for each in two)
            for update, taken, L, R in zip(updates, products_taken, *halves, strict=True):
                if taken:
                    update.take_product(L, R)
        if all(products_taken):
            return [None] * len(updates)
        parts = torch.split(polar.dense.to(polar.M.dtype), b.counts)
        return [
            None if taken else update.take(member.block, T)
            for update, taken, member, T in zip(
                updates, products_taken, b.members, parts, strict=True
            )
        ]


class ParameterUpdate:
    """One parameter during one step."""

    def __init__(self, work: Work, index: int, state: State) -> None:
        self.work, self.index = work, index
        self.p, self.view = work.params[index], work.views[index]
        self.finite = None if work.finite is None else work.finite[index]
        self.is_compensated = is_compensated(work.group, self.p)
        self._is_sharded = work.on_ranks and is_sharded(self.p)
        self._state, self._kept = state[self.p], stored_dtype(work.group, self.p)
        C = momentum_of(self.p, self._state, self._kept)
        self._X, self._G, self._C = map(self._here, (self.p, work.grads[index], C))
        self._M: Tensor | None = None  # this rank's part of M
        self.gathering: Gathering | None = None  # the whole of M, where every rank gathers it
        self._blocks: list[Tensor] | None = None  # the blocks of M
        self._T: list[Tensor | None] = [None] * len(self.view.shapes)
        self._U: Tensor | None = None  # T of this rank's part of X, where other ranks compute it
        self._missing = len(self.view.shapes)  # the blocks whose T is not known yet

    def _here(self, X: Tensor) -> Tensor:
        """This rank's part of a tensor that is placed as the parameter."""
        return local(X) if self._is_sharded else X

    @property
    def is_done(self) -> bool:
        """Whether X has been updated, as far as :func:`apply_updates` does not do it."""
        return self._missing == 0

    @property
    def has_one_block(self) -> bool:
        """Whether the parameter is in one bucket."""
        return len(self._T) == 1

    def writes_momentum(self) -> bool:
        """Whether :meth:`write_momentum` can be used: M is one block, not C itself, and not sharded."""
        group = self.work.group
        return (
            group["nesterov"]
            and type(group["momentum_rule"]) is Momentum
            and self.finite is None
            and self._M is None
            and not self._is_sharded
            and self.has_one_block
            and self.view.in_turn
            and self._C.is_contiguous()
        )

    def write_momentum(self, out: Tensor) -> None:
        """``C ← βC + G``, and M in ``out``."""
        group = self.work.group
        G, C = self._G.reshape(out.shape), self._C.view(out.shape)
        group["momentum_rule"].step(group, G, C, {}, out=out)
        keep_momentum(self._C, self.p, self._state, self._kept)

    def momentum(self, block: int) -> Tensor:
        """M of a block, not to be written to: without Nesterov it is C itself."""
        if self._blocks is None:
            gathering = self.gathering
            M = self.local_momentum() if gathering is None else gathering.wait()
            self._blocks = self.view.blocks(M)
        return self._blocks[block]

    def local_momentum(self) -> Tensor:
        """``C ← βC + G``, and this rank's part of M: not to be written to, as it may be C itself."""
        if self._M is None:
            group, C = self.work.group, self._C
            rule: Momentum = group["momentum_rule"]
            kept = kept_by_rule(self.p, self._state, rule)
            kept = {name: self._here(X) for name, X in kept.items()}
            M = rule.step(group, self._G, C, kept, self.finite)
            if not isinstance(M, Tensor) or M.shape != C.shape:
                found = tuple(M.shape) if isinstance(M, Tensor) else f"a {type(M).__name__}"
                raise TypeError(
                    f"{type(rule).__name__}.step returned {found}: expected M, a tensor of shape "
                    f"{tuple(C.shape)}, as its G"
                )
            keep_momentum(C, self.p, self._state, self._kept)
            if M is C:
                M = C.to(momentum_dtype(self.p.dtype))
            if self.finite is not None:
                M = torch.where(self.finite, M, 0)  # T(0) = 0, so X stays
            self._M = M
        return self._M

    def takes_product(self, dtype: torch.dtype) -> bool:
        """Whether torch has X ← βX + αLR as one operation for this X and factors of ``dtype``."""
        return (
            ops_of(self.p.device).host_reads_are_free  # on a GPU factors have 16 bits
            and self.p.dtype == dtype
            and not self._is_sharded
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
        X = self._X
        X.copy_(torch.where(self.finite, X * remains, X))
        return 1.0

    def add_compensated(self, T: Tensor, size: Any) -> None:
        """``X ← (1 − ηλ)X + size·T``; the rounding error is kept for the next step."""
        R = self._here(rounding_error(self.p, self._state))
        add_compensated(self._X, R, T, size, self.remains())

    def take_product(self, L: Tensor, R: Tensor) -> None:
        """``X ← (1 − ηλ)X − η·scale·LR``."""
        X = self.p.view(self.view.shapes[0])
        X.baddbmm_(L, R, beta=self.remains(), alpha=self.sizes()[0])
        self._missing -= 1

    def take(self, block: int, T: Tensor) -> Known | None:
        """(X, T, −η·scale) once T of all blocks is known, with ``T`` for ``block``; ``None`` before."""
        self._missing -= 1
        if self.has_one_block and self._is_sharded:  # a rank keeps its own part of T at once
            T = placed_like(self.view.assemble([T], self.p.shape), self.p)
        self._T[block] = T
        if self._missing:
            return None
        blocks = [each for each in self._T if each is not None]
        sizes = self.sizes()
        size = sizes[0]
        if len(blocks) > 1 or isinstance(size, Tensor):
            blocks = [each * factor for each, factor in zip(blocks, sizes, strict=True)]
            size = 1.0
        if self._is_sharded:
            if not self.has_one_block:
                blocks = [placed_like(self.view.assemble(blocks, self.p.shape), self.p)]
            return self._X, local(blocks[0]), size
        return self._X, self.view.assemble(blocks, self.p.shape), size

    def take_parts(self, block: int, shape: tuple[int, int, int], parts: Parts) -> Known | None:
        """Like :meth:`take`, where T comes in parts of this rank's tensor, read in ``shape``."""
        self._missing -= 1
        X, size = self._X, self.sizes()[block]
        several = not self.has_one_block or isinstance(size, Tensor)
        if X.numel() == 0:
            if self.is_compensated and not self._missing:  # a checkpoint asks all ranks for R
                rounding_error(self.p, self._state)
            return None
        if self._U is None:  # contiguous, also where X is in channels_last
            self._U = torch.empty_like(X, memory_format=torch.contiguous_format)
        for index, T in parts:
            place = self._U.view(shape)[index]
            T = T.to(self._U.dtype)
            place.copy_(T * size if several else T)
        return None if self._missing else (X, self._U, 1.0 if several else size)


def apply_updates(ready: Iterable[tuple[ParameterUpdate, Known]]) -> None:
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
