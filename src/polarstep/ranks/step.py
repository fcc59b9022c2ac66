"""One step of all parameters of which other ranks hold a part or a copy.

Every bucket is a generator that yields where it waits for other ranks
(:mod:`polarstep.ranks.owner`). The buckets are resumed in turn, so that the communication of one
runs beside the arithmetic of the others. All ranks resume them in the same order.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polarstep.bucket import Draws, Member, members_of
from polarstep.engines.torch import Target, apply_updates
from polarstep.groups import Group, view_of
from polarstep.ranks import carries, collectives
from polarstep.ranks.layout import Layout, is_sharded, local, placed_by_matrix, wrapped
from polarstep.ranks.local import LocalState, localized
from polarstep.ranks.owned_graph import OwnedGraphs
from polarstep.ranks.owner import Trip
from polarstep.ranks.plans import (
    AUTO,
    BY_OWNERS,
    AskedPlan,
    Choice,
    Plan,
    asked_of,
    check_plan,
    chosen_plan,
)
from polarstep.ranks.resting import let_parts_rest
from polarstep.ranks.spread import Part, Spread, balanced
from polarstep.state import (
    State,
    carried_dtype,
    check_blocks,
    entry,
    is_compensated,
    keep_momentum,
    momentum_of,
    rounding_error,
    stored_dtype,
)
from polarstep.stepping.collect import Work

__all__ = ["Distribution", "Split"]


@dataclass
class _Update:
    """The update of this rank's part of X, and how many blocks of it are not known yet."""

    U: Tensor
    missing: int


@dataclass
class _Sorted:
    """An optimizer's parameters, sorted by which ranks hold them."""

    params: list[Tensor]
    spread: list[tuple[Tensor, Layout]]  # parameters of which other ranks hold a part
    whole: list[Tensor]  # sharded parameters on a mesh of one rank


def _check_process_group(group: Any) -> None:
    if group is None:
        return
    if not torch.distributed.is_available() or not isinstance(
        group, torch.distributed.ProcessGroup
    ):
        raise TypeError(
            f"process_group={group!r}: expected the ranks that hold copies of the plain parameters, as "
            "torch.distributed.group.WORLD after init_process_group, or get_group() of a DeviceMesh; "
            "None if there are no copies. On ranks outside of a group new_group returns -100: give them "
            "a group of their own"
        )


class Distribution:
    """How an optimizer's parameters are spread over ranks.

    Args:
        plan: the plan to prefer, ``"auto"`` for the cheapest; a group may have its own under ``"plan"``.
        process_group: the ranks that hold copies of all plain parameters (DDP); ``None``: this process
            has its plain parameters to itself.
    """

    def __init__(self, plan: AskedPlan = AUTO, process_group: Any = None) -> None:
        check_plan(plan)
        _check_process_group(process_group)
        self.plan, self.process_group = plan, process_group
        if process_group is not None:
            ranks = torch.distributed.get_process_group_ranks(process_group)
            collectives.lend(tuple(sorted(ranks)), process_group)
        self._choices: dict[Any, Choice] = {}
        # The layout and the choice for a parameter, by its id, with everything they depend on: hashing
        # layouts and maps at every step would take longer than a step of a small model.
        self._layouts: dict[int, tuple[Tensor, Any, Layout | None]] = {}
        self._recent: dict[int, tuple[tuple[Any, ...], Choice]] = {}
        self._known = _Sorted([], [], [])
        self._local: LocalState | None = None
        self._trips: tuple[Any, list[Trip]] = ((), [])
        self.graphs = OwnedGraphs()

    def layout_of(self, p: Tensor) -> Layout | None:
        """Where the parts of ``p`` lie; ``None`` if this process alone has it."""
        placements = p.placements if is_sharded(p) else None
        known = self._layouts.get(id(p))
        if known is None or known[0] is not p or known[1] is not placements:
            known = (p, placements, Layout.of(p, self.process_group))
            self._layouts[id(p)] = known
        return known[2]

    def spread(self, groups: Iterable[Group]) -> list[tuple[Tensor, Layout]]:
        """The parameters of which other ranks hold a part, with their layouts."""
        return self._sorted(groups).spread

    def whole(self, groups: Iterable[Group]) -> list[Tensor]:
        """The sharded parameters of Muon's groups whose mesh is this rank alone."""
        return self._sorted(groups).whole

    def _sorted(self, groups: Iterable[Group]) -> _Sorted:
        """The parameters by where they lie, found anew when a group has other parameters."""
        params = [p for group in groups for p in group["params"]]
        known = self._known
        if len(params) == len(known.params) and all(map(operator.is_, params, known.params)):
            return known
        self._known = known = _Sorted(params, [], [])
        kept = set(map(id, params))  # forget parameters that were taken out of their groups
        self._layouts = {key: found for key, found in self._layouts.items() if key in kept}
        self._recent = {key: found for key, found in self._recent.items() if key in kept}
        for group in groups:
            for p in group["params"]:
                layout = self.layout_of(p)
                if layout is not None and len(layout.ranks) > 1:
                    known.spread.append((p, layout))
                elif is_sharded(p) and group["algorithm"] == "muon" and p.numel() > 0:
                    assert layout is not None
                    layout.check_part(p)
                    known.whole.append(p)
        return known

    def local_state(self, state: State) -> LocalState:
        """The optimizer's ``state`` in plain tensors, for the parts of sharded parameters."""
        if self._local is None or not self._local.is_of(state):
            self._local = LocalState(state)
        return self._local

    def choice(self, group: Group, p: Tensor) -> Choice | None:
        """The plan of a parameter in a Muon group; ``None`` if this process alone has it."""
        layout = self.layout_of(p)
        if layout is None:
            return None
        view, asked = view_of(group, p), asked_of(group, self.plan)
        polar, transform = group["polar"], group["transform"]
        now = (p, layout, view, polar, transform, p.dtype, p.device, asked)
        known = self._recent.get(id(p))
        # Tuples compare by identity before they compare by value.
        if known is not None and known[0][0] is p and known[0] == now:
            return known[1]
        key = now[1:]
        if key not in self._choices:
            self._choices[key] = chosen_plan(p, layout, view, polar, asked, transform)
        self._recent[id(p)] = now, self._choices[key]
        return self._choices[key]

    def split(self, works: list[Work], state: State, *, hooked: Container[int]) -> Split:
        """The parameters of this step, divided by the plan that each follows.

        Hooks see whole matrices. ``hooked`` has the ids of parameters at which a hook of some rank
        looks: every rank computes all of their matrices of which it holds a part.
        """
        return Split(self, works, state, self.local_state(state), hooked=hooked)

    def trips(self, buckets: list[Spread]) -> list[Trip]:
        """Who sends what to whom, kept from step to step while the buckets stay the same."""
        key = [bucket.key for bucket in buckets]
        if key != self._trips[0]:
            owners = balanced(buckets)
            self._trips = (key, [Trip(b, o) for b, o in zip(buckets, owners, strict=True)])
        for trip, bucket in zip(self._trips[1], buckets, strict=True):
            trip.bucket = bucket
        return self._trips[1]


class Split:
    """The Muon parameters of one step, divided by the plan that each follows."""

    def __init__(
        self,
        distribution: Distribution,
        works: list[Work],
        state: State,
        local_state: LocalState,
        *,
        hooked: Container[int],
    ) -> None:
        self._distribution, self._works, self._state = distribution, works, state
        self.state = local_state
        self._plans = [[self._plan(work.group, p, hooked) for p in work.params] for work in works]
        self._check_momentum()
        self.errors: list[Exception] = []
        self._sources: dict[int, tuple[Work, int]] = {}  # of parameters that ranks compute together
        self._targets: dict[int, Target] = {}
        self._updates: dict[int, _Update] = {}
        local_state.begin(self._whole_here())
        # Parameters whose whole matrices lie on this rank, for the steps of a single process.
        self.here = [
            localized(work, local_state, self._indices(w, "local")) for w, work in enumerate(works)
        ]
        # Parameters whose matrices every rank gathers and computes.
        self.gathered = [self._selected(w, "gather") for w in range(len(works))]

    def _check_momentum(self) -> None:
        """Raise, on all ranks together, where the blocks of 8-bit momentum would be cut."""
        for work, plans in zip(self._works, self._plans, strict=True):
            if work.group["momentum_dtype"] == torch.int8:
                for name, p, plan in zip(work.names, work.params, plans, strict=True):
                    if plan != "local":
                        check_blocks(p, name)

    def _whole_here(self) -> list[Tensor]:
        """The sharded parameters whose matrices are whole on their ranks; the same list on all ranks."""
        return [
            p
            for work, plans in zip(self._works, self._plans, strict=True)
            for p, plan in zip(work.params, plans, strict=True)
            if plan == "local" and is_sharded(p)
        ]

    def _plan(self, group: Group, p: Tensor, hooked: Container[int]) -> Plan:
        choice = self._distribution.choice(group, p)
        plan: Plan = "local" if choice is None else choice.plan
        if id(p) not in hooked or plan == "local":
            return plan
        return "local" if plan == "replicated" else "gather"

    def _indices(self, w: int, *plans: Plan) -> list[int]:
        params = self._works[w].params
        return [
            i
            for i, plan in enumerate(self._plans[w])
            if plan in plans and local(params[i]).numel() + (plan != "local")
        ]

    def _selected(self, w: int, *plans: Plan) -> Work:
        work, kept = self._works[w], self._indices(w, *plans)
        return Work(
            work.group,
            [work.names[i] for i in kept],
            [work.params[i] for i in kept],
            [work.grads[i] for i in kept],
            None if work.finite is None else [work.finite[i] for i in kept],
            [work.views[i] for i in kept],
        )

    def steps(
        self, draws: Draws, window: int
    ) -> list[tuple[torch.device, Generator[int, None, None]]]:
        """The steps of the matrices that ranks compute together, each with its device.

        Two of them fit into ``window`` bytes, if a single parameter does.
        """
        owned: dict[Any, Spread] = {}
        for w in range(len(self._works)):
            far = self._selected(w, *BY_OWNERS)
            lasting = far.without_gradients()  # trips keep their members until the next step
            for index, p in enumerate(far.params):
                if p.numel() == 0:
                    continue
                layout = self._distribution.layout_of(p)
                assert layout is not None
                self._sources[id(p)] = (far, index)
                for signature, member in members_of(lasting, index, self._state):
                    # Nesterov and skipping are up to each parameter here, and not to its bucket.
                    its = replace(signature, nesterov=True, skips_nonfinite=False)
                    key = (its, layout.ranks, layout.cut == ())
                    spread = owned.setdefault(key, Spread(its, [], []))
                    spread.members.append(member)
                    spread.layouts.append(layout)
        buckets = [part for spread in owned.values() for part in spread.in_parts(window // 2)]
        return [
            (trip.bucket.signature.device, self._step(trip, draws))
            for trip in self._distribution.trips(buckets)
        ]

    def _step(self, trip: Trip, draws: Draws) -> Generator[int, None, None]:
        """The step of a bucket, and the update of the parameters that it completes."""
        target = lambda i: self._target(trip.bucket.members[i].param)  # noqa: E731
        numbers = lambda: draws.numbers(trip.bucket.signature)  # noqa: E731
        graphs = self._distribution.graphs
        found = yield from trip.step(target, self._state, numbers, self.errors, graphs)
        ready = []
        for member, parts in found:
            update = self._with(member, parts)
            if update is not None:
                ready.append(update)
        apply_updates(ready)

    def _target(self, p: Tensor) -> Target:
        """The parameter during this step; made where an error of it does not leave ranks waiting."""
        if id(p) not in self._targets:
            self._targets[id(p)] = Target(*self._sources[id(p)], self._state)
        return self._targets[id(p)]

    def _with(
        self, member: Member, parts: list[tuple[Part | None, Tensor]]
    ) -> tuple[Target, tuple[Tensor, Tensor, Any]] | None:
        """The update of a parameter, once this rank's parts of T of all its blocks are known."""
        p, target = member.param, self._target(member.param)
        X = local(p)
        if id(p) not in self._updates:  # contiguous, also where X is in channels_last
            U = torch.empty_like(X, memory_format=torch.contiguous_format)
            self._updates[id(p)] = _Update(U, len(member.view.shapes))
        update = self._updates[id(p)]
        if X.numel() > 0:
            self._write(member, parts, update.U)
        update.missing -= 1
        if update.missing:
            return None
        del self._updates[id(p)], self._targets[id(p)]
        if X.numel() == 0:
            if target.is_compensated:  # a checkpoint asks all ranks for R
                rounding_error(p, self._state[p])
            return None
        size = target.sizes()[0]
        several = not target.has_one_block or isinstance(size, Tensor)
        return target, (X, update.U, 1.0 if several else size)

    def _write(self, member: Member, parts: list[tuple[Part | None, Tensor]], U: Tensor) -> None:
        """Write the parts of T of ``member`` into ``U``, the update of this rank's part of X."""
        target = self._target(member.param)
        layout = self._distribution.layout_of(member.param)
        assert layout is not None
        pieces = layout.pieces(member.view)
        assert pieces is not None
        size = target.sizes()[member.block]
        several = not target.has_one_block or isinstance(size, Tensor)
        spread_out = U.view(pieces[layout.me].shape)
        for part, T in parts:
            place = spread_out
            if part is not None:
                place = spread_out[part.batch, slice(*part.rows)]
            T = T.to(U.dtype).view(place.shape)
            place.copy_(T * size if several else T)

    def settle(self) -> None:
        """Write what the steps on local parts have changed into the optimizer's state."""
        try:
            self._settle()
        except Exception as error:
            self.errors.append(error)

    def _settle(self) -> None:
        for w, work in enumerate(self._works):
            for i, p in enumerate(work.params):
                if self._plans[w][i] == "local" and is_sharded(p) and not local(p).numel():
                    self._settle_empty(work, i)
        self.state.settle()

    def _settle_empty(self, work: Work, index: int) -> None:
        """Make empty entries for a parameter without a part here; a checkpoint asks all ranks."""
        p: Any = work.params[index]
        kept = stored_dtype(work.group, p)
        keep_momentum(momentum_of(p, self._state[p], kept), p, self._state[p], kept)
        if is_compensated(work.group, p):
            rounding_error(p, self._state[p])
        for signature, member in members_of(work, index, self._state):
            for name, shape in carries.shapes_of(signature, signature.dtype).items():
                key, of_all = entry(name, member.block), (member.count, *shape)
                known = self._state[p].get(key)
                dtype = carried_dtype(signature.polar, name, p.dtype)
                there = is_sharded(known) and (known.shape, known.dtype) == (of_all, dtype)
                if not there:
                    part = torch.empty((0, *shape), dtype=dtype, device=p.device)
                    self._state[p][key] = wrapped(part, p, placed_by_matrix(p), of_all)

    def let_rest(self) -> None:
        """Stop matrices in parts whose gradients have become zero; all ranks decide together."""
        works = [self._selected(w, *BY_OWNERS, "gather") for w in range(len(self._works))]
        let_parts_rest(works, self._distribution.layout_of, self._state)
