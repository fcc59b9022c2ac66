"""A step in plain torch operations, on any device and in any layout, for sharded parameters too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polarstep import rng
from polarstep.cuda_graphs import in_a_graph
from polarstep.distributed.layout import is_sharded, whole
from polarstep.float64 import fitting
from polarstep.optim.groups import is_by_norm
from polarstep.optim.scaling import at_assumed_norm
from polarstep.optim.stepping.carried import entry, remember
from polarstep.optim.stepping.collect import (
    Member,
    Signature,
    State,
    Work,
    all_recalled,
    gathered,
    in_parts,
    momentum_dtype,
)
from polarstep.optim.stepping.step import PolarHook, launch, show
from polarstep.optim.stepping.target import Target, apply_updates
from polarstep.polar import Carry, Draw, Polar, PolarMap
from polarstep.undisturbed import on_device

__all__ = ["PlainStep"]

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

        buckets = gathered(works, state, selected)
        runs, numbers = list(_in_parts(buckets)), dict[Signature, Tensor | None]()
        for i, (signature, _, part) in enumerate(runs):
            # The matrices of the next bucket are gathered while this bucket computes.
            for _, in_shards, soon in runs[i : i + 2]:
                for member in soon if in_shards else ():
                    target_of(member).begin_gathering()
            if signature not in numbers:
                numbers = {signature: self.drawn(signature)}
            matrices = _Tensors(part, [target_of(member) for member in part])
            try:
                with on_device(signature.device):
                    _step(signature, matrices, part, state, numbers[signature], hooks)
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
        drawn = signature.polar.draw(m, n, rng.generator(*key, device=device), dtype)
        numbers = fitting(drawn, device)
        if constant and not in_a_graph():
            if len(self._drawn) >= MOST_DRAWN:
                del self._drawn[next(iter(self._drawn))]  # the oldest
            self._drawn[place] = numbers
        return numbers


def _step(
    signature: Signature,
    matrices: _Tensors,
    members: list[Member],
    state: State,
    numbers: Tensor | None,
    hooks: tuple[PolarHook, ...],
) -> None:
    """One step of the matrices of a bucket."""
    carry = _joined(signature, members, state)
    draw = Draw(numbers, _finite_flags(members), shown=bool(hooks))
    polar, left = launch(signature.polar, matrices, carry, draw)
    _keep(signature, members, state, left)
    if hooks:
        show(hooks, signature, members, polar)


def _in_parts(
    buckets: dict[tuple[Signature, bool], list[Member]],
) -> Iterator[tuple[Signature, bool, list[Member]]]:
    """(signature, whether it is sharded, members) of each bucket; large buckets come in parts."""
    for (signature, sharded), members in buckets.items():
        if not sharded and signature.device.type != "cpu":
            yield signature, sharded, members
            continue
        nbytes = max(1, signature.m * signature.n * signature.dtype.itemsize)
        most = (LARGEST_GATHERED if sharded else LARGEST_ON_A_CPU) // nbytes
        for part in in_parts(members, lambda member: member.count, most):
            yield signature, sharded, part


def _joined(signature: Signature, members: list[Member], state: State) -> Carry:
    """What the last step left for the matrices of a bucket, in a copy that this step may write to."""
    its = signature
    for member in members if is_sharded(members[0].param) else ():
        _gather_carry(state[member.param], member.block, its.polar)
    if its.resumed:
        return Carry.joined(all_recalled(its, members, state))
    return its.polar.init(sum(m.count for m in members), its.m, its.n, its.device, its.dtype)


def _gather_carry(of_parameter: dict[str, Any], block: int, polar: PolarMap) -> None:
    """Make the carry of a block whole in the state, where the last step's plan left it in parts.

    A step with hooks gathers matrices that ranks otherwise compute in parts, or for one another.
    """
    for key in (entry(name, block) for name in polar.carries):
        if key in of_parameter:
            of_parameter[key] = whole(of_parameter[key])


def _finite_flags(members: list[Member]) -> Tensor | None:
    """A number per matrix, zero if its gradient is not finite; ``None`` if nothing is skipped."""
    if all(member.work.finite is None for member in members):
        return None
    flags = [
        torch.ones((), dtype=torch.bool, device=member.param.device)
        if member.work.finite is None
        else member.work.finite[member.index]
        for member in members
        for _ in range(member.count)
    ]
    return torch.stack(flags).to(torch.float32)


def _keep(signature: Signature, members: list[Member], state: State, left: Carry) -> None:
    """Put the carry for the next step into the optimizer's state."""
    parts = left.split([member.count for member in members])
    for member, part in zip(members, parts, strict=True):
        work, p = member.work, member.param
        finite = None if work.finite is None else work.finite[member.index]
        remember(state[p], member.block, signature.polar, part, p.dtype, finite)


class _Tensors:
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
