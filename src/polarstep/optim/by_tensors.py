"""A step in plain torch operations, on any device and in any layout, for sharded parameters too.

A parameter may have blocks in several buckets (a fused projection with unequal parts). Its momentum
is advanced for the first of its blocks, and X is updated once T of every block is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from polarstep import products, rng
from polarstep.cuda_graphs import in_a_graph
from polarstep.distributed.gather import Gathering
from polarstep.distributed.layout import is_sharded, local, placed_like, whole
from polarstep.optim.carried import entry, remember
from polarstep.optim.collect import (
    Member,
    Signature,
    State,
    Work,
    all_recalled,
    gathered,
    in_parts,
    momentum_dtype,
)
from polarstep.optim.groups import is_by_norm, scale_of
from polarstep.optim.large import is_large, launch_in_place
from polarstep.optim.low_precision import (
    add_compensated,
    check_blocks,
    is_compensated,
    keep_momentum,
    momentum_of,
    rounding_error,
    stored_dtype,
)
from polarstep.optim.padded import step_padded
from polarstep.optim.scaling import at_assumed_norm
from polarstep.optim.step import PolarHook, launch, show
from polarstep.polar import Carry, Draw, Polar, PolarMap

__all__ = ["PlainStep", "Target", "Tensors", "apply_updates", "finite_flags"]

# Bytes of M that are gathered from shards at a time; a larger bucket is processed in parts.
LARGEST_GATHERED = 512 * 2**20
# On a CPU parts of this size are as fast as larger batches, and need memory for a part of M only.
LARGEST_ON_A_CPU = 10 * 2**20
# Numbers that are the same at every step are kept for at most this many shapes and seeds.
MOST_DRAWN = 64


class PlainStep:
    """Steps in torch's own operations; keeps the random numbers that later steps use again."""

    def __init__(self) -> None:
        self._drawn: dict[tuple[Any, ...], Tensor] = {}

    def __call__(
        self,
        works: list[Work],
        state: State,
        hooks: tuple[PolarHook, ...],
        skip: set[int],
        errors: list[Exception] | None = None,
    ) -> None:
        """Update every parameter of ``works`` whose id is not in ``skip``.

        Where ``errors`` is given, an error goes there, and the step goes on with the next bucket: other
        ranks would wait for this rank's parts of it.
        """
        if skip and all(id(p) in skip for work in works for p in work.params):
            return
        targets: dict[int, Target] = {}

        def selected(work: Work, index: int) -> bool:
            return id(work.params[index]) not in skip

        def target_of(member: Member) -> Target:
            if id(member.param) not in targets:
                targets[id(member.param)] = Target(member.work, member.index, state)
            return targets[id(member.param)]

        buckets = step_padded(gathered(works, state, selected), target_of, hooks)
        runs, numbers = list(_in_parts(buckets)), dict[Signature, Tensor | None]()
        for i, (signature, sharded, part) in enumerate(runs):
            # The matrices of the next bucket are gathered beside the arithmetic of this bucket.
            for _, in_shards, soon in runs[i : i + 2]:
                for member in soon if in_shards else ():
                    target_of(member).begin_gathering()
            if signature not in numbers:
                numbers = {signature: self.drawn(signature)}
            matrices = Tensors(part, [target_of(member) for member in part])
            in_place, drawn = is_large(signature, sharded), numbers[signature]
            try:
                _step(signature, matrices, part, state, drawn, hooks, in_place=in_place)
            except Exception as error:
                if errors is None:
                    raise
                errors.append(error)

    def drawn(self, signature: Signature) -> Tensor | None:
        """The random numbers of a bucket's step, if it needs any; kept if they are always the same.

        Inside a CUDA graph they are not kept, as every replay draws new numbers.
        """
        needed, key = signature.drawn_at(signature.step)
        if needed is None:
            return None
        constant = not needed
        m, n, device = signature.m, signature.n, signature.device
        place = (*key, signature.polar, device, signature.dtype)
        if constant and place in self._drawn and not in_a_graph():
            return self._drawn[place]
        dtype = torch.promote_types(signature.dtype, torch.float32)
        numbers = signature.polar.draw(m, n, rng.generator(*key, device=device), dtype).to(device)
        if constant and not in_a_graph():
            if len(self._drawn) >= MOST_DRAWN:
                del self._drawn[next(iter(self._drawn))]  # the oldest
            self._drawn[place] = numbers
        return numbers


def _step(
    signature: Signature,
    matrices: Tensors,
    members: list[Member],
    state: State,
    numbers: Tensor | None,
    hooks: tuple[PolarHook, ...],
    *,
    in_place: bool,
) -> None:
    """One step of the matrices of a bucket."""
    if in_place:
        polar = launch_in_place(signature, matrices, members, hooks)
    else:
        carry = _joined(signature, members, state)
        draw = Draw(numbers, finite_flags(members), shown=bool(hooks))
        polar, left = launch(signature.polar, matrices, carry, draw)
        _keep(signature, members, state, left)
    if hooks:
        _, key = signature.drawn_at(signature.step)
        show(hooks, signature, members, key, polar)


def _in_parts(
    buckets: dict[tuple[Signature, bool], list[Member]],
) -> Iterator[tuple[Signature, bool, list[Member]]]:
    """The buckets, with large buckets in parts: signature, whether it is sharded, members."""
    for (signature, sharded), members in buckets.items():
        if not sharded and signature.device.type != "cpu":
            yield signature, sharded, members
            continue
        nbytes = max(1, signature.m * signature.n * signature.dtype.itemsize)
        most = (LARGEST_GATHERED if sharded else LARGEST_ON_A_CPU) // nbytes
        for part in in_parts(members, lambda member: member.count, most):
            yield signature, sharded, part


def _joined(signature: Signature, members: list[Member], state: State) -> Carry:
    """What the last step left for the matrices of a bucket, as a copy that the step may write to."""
    its = signature
    for member in members if is_sharded(members[0].param) else ():
        _gather_carry(state[member.param], member.block, its.polar)
    if its.resumed:
        return Carry.joined(all_recalled(its, members, state))
    return its.polar.init(sum(m.count for m in members), its.m, its.n, its.device, its.dtype)


def _gather_carry(of_parameter: dict[str, Any], block: int, polar: PolarMap) -> None:
    """Make the carry of a block whole in the state, where another plan has left it in parts.

    A step with hooks gathers the matrices that ranks otherwise compute in parts or for one another.
    """
    for key in (entry(name, block) for name in polar.carries):
        if key in of_parameter:
            of_parameter[key] = whole(of_parameter[key])


def finite_flags(members: list[Member]) -> Tensor | None:
    """A number per matrix, zero if its gradient is not finite; ``None`` if nothing is skipped."""
    if all(member.work.finite is None for member in members):
        return None
    flags = [
        torch.ones((), device=member.param.device)
        if member.work.finite is None
        else member.work.finite[member.index].to(torch.float32)
        for member in members
        for _ in range(member.count)
    ]
    return torch.stack(flags)


def _keep(signature: Signature, members: list[Member], state: State, left: Carry) -> None:
    """Put the carry for the next step into the optimizer's state."""
    parts = left.split([member.count for member in members])
    for member, part in zip(members, parts, strict=True):
        work, p = member.work, member.param
        finite = None if work.finite is None else work.finite[member.index]
        remember(state[p], member.block, signature.polar, part, p.dtype, finite)


class Target:
    """One parameter during one step."""

    def __init__(self, work: Work, index: int, state: State) -> None:
        self.work, self.index = work, index
        self.p, self.view = work.params[index], work.views[index]
        self.finite = None if work.finite is None else work.finite[index]
        self.is_compensated = is_compensated(work.group, self.p)
        self._state, self._kept = state[self.p], stored_dtype(work.group, self.p)
        if self._kept == torch.int8:
            check_blocks(self.p, work.names[index])
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
        """Whether :meth:`write_momentum` can be used: M is not C, and is one block, not sharded."""
        made = self.work.group["nesterov"] and self.finite is None and self.view.in_turn
        return made and self.has_one_block and not is_sharded(self.p)

    def write_momentum(self, out: Tensor) -> None:
        """Compute M in ``out``."""
        self.advance()
        beta = self.work.group["momentum"]
        # A part of a padded batch has gaps, so out cannot always be viewed in the shape of X.
        G, C = (each.reshape(out.shape) for each in (self._G, self._C))
        torch.add(G, C, alpha=beta, out=out)

    def begin_gathering(self) -> None:
        """Begin to gather M of a sharded parameter."""
        if self._gathering is None:
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
            products.of(self.p.device).looks_for_free  # on a GPU factors have 16 bits
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
        """The factor on X that is left for the update: 1 − ηλ, or 1 where X has been decayed here.

        X is decayed here if the parameter may be skipped and its rounding is not compensated.
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
        """``X ← (1 − ηλ)X + size·T``, with what rounding takes off kept for the next step."""
        R = local(rounding_error(self.p, self._state))
        add_compensated(local(self.p), R, T, size, self.remains())

    def take_product(self, L: Tensor, R: Tensor) -> None:
        """``X ← (1 − ηλ)X − η·scale·LR``."""
        X = self.p.view(self.view.shapes[0])
        X.baddbmm_(L, R, beta=self.remains(), alpha=self.sizes()[0])

    def take(self, block: int, T: Tensor) -> tuple[Tensor, Tensor, Any] | None:
        """X, T and −η·scale, once T of all blocks is known; ``None`` until then."""
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


class Tensors:
    """G, C and X of the blocks of a bucket, parameter by parameter."""

    def __init__(self, members: list[Member], targets: list[Target]) -> None:
        self._members, self._targets = members, targets
        self._counts = [member.count for member in members]

    def momentum(self) -> Tensor:
        """M as one batch; each parameter writes its part in place where it can."""
        if len(self._members) > 1 and all(target.writes_momentum() for target in self._targets):
            p = self._members[0].param
            _, m, n = self._members[0].view.shapes[self._members[0].block]
            dtype = momentum_dtype(p.dtype)
            M = torch.empty(sum(self._counts), m, n, dtype=dtype, device=p.device)
            for target, part in zip(self._targets, torch.split(M, self._counts), strict=True):
                target.write_momentum(part)
            return M
        blocks = [
            target.momentum(member.block)
            for target, member in zip(self._targets, self._members, strict=True)
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def update(self, polar: Polar) -> None:
        """Update X; T = LR is never stored where torch can add the product to X at once."""
        group = self._members[0].group
        if is_by_norm(group):
            _, m, n = polar.M.shape
            polar = at_assumed_norm(polar, group["polar"].on(m, n, polar.M.device))
        two = polar.two_factors
        products_taken = [two is not None and t.takes_product(two[0].dtype) for t in self._targets]
        if two is not None:
            halves = (torch.split(each, self._counts) for each in two)
            pairs = zip(self._targets, products_taken, *halves, strict=True)
            for target, taken, L, R in pairs:
                if taken:
                    target.take_product(L, R)
        if all(products_taken):
            return
        parts = torch.split(polar.dense.to(polar.M.dtype), self._counts)
        ready: list[tuple[Target, tuple[Tensor, Tensor, Any]]] = []
        for target, taken, member, T in zip(
            self._targets, products_taken, self._members, parts, strict=True
        ):
            update = None if taken else target.take(member.block, T)
            if update is not None:
                ready.append((target, update))
        apply_updates(ready)


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
