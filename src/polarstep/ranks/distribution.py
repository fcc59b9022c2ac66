"""The steps of an optimizer whose parameters lie in parts or as copies on several ranks.

A :class:`Distribution` knows which ranks hold and compute the matrices. It keeps from step to step what
does not change: layouts, plans, tables of who computes what, and CUDA graphs.
:meth:`Distribution.shares` divides the matrices of a step by plan.

:class:`StepOverRanks` takes a step. The ranks first agree on what has a gradient, and on any error: an
error raised on one rank alone would leave the others waiting. Then each rank does its share of the work
(:func:`polarstep.muon.step`). An error inside that share is raised by all ranks together when the step
ends.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from polarstep.bucket import Draws, Observed, PolarHook, members_by_key, members_of
from polarstep.checked_values import check_integer
from polarstep.context import noting
from polarstep.engines.replay import ReplayedStep
from polarstep.gradients import Work, check_gradients, check_scale, collect
from polarstep.groups import Group, named_params, view_of, views_of
from polarstep.muon import step
from polarstep.others import ELEMENTWISE, prepare_elementwise, step_elementwise
from polarstep.ranks import carries, collectives
from polarstep.ranks.agree import Agreement, all_finite
from polarstep.ranks.exchange import OverRanks, Shares
from polarstep.ranks.layout import Layout, is_sharded
from polarstep.ranks.local_shard import LocalState
from polarstep.ranks.owned_graph import OwnedGraph, is_worth_a_graph
from polarstep.ranks.parts import SharedBucket, Table, computing_ranks, wire_dtype
from polarstep.ranks.plans import (
    AUTO,
    BY_OWNERS,
    AskedPlan,
    Choice,
    Plan,
    check_plan,
    chosen_plan,
)
from polarstep.state import State, check_blocks

__all__ = ["BYTES_IN_FLIGHT", "Distribution", "StepOverRanks"]


BYTES_IN_FLIGHT = 512 * 2**20


@dataclass
class _Placed:
    """Where a parameter lies and the plan for it, with everything that they depend on.

    To hash layouts and maps at every step would take longer than a step of a small model.
    """

    p: Tensor
    placements: Any
    layout: Layout | None
    options: tuple[Any, ...] = ()  # that the choice depends on
    choice: Choice | None = None
    prepared: Choice | None = None  # for a step: the parameter had a gradient here


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
        bytes_in_flight: what buckets may hold together while they wait for other ranks; one bucket may
            always run.
    """

    def __init__(
        self,
        plan: AskedPlan = AUTO,
        process_group: Any = None,
        bytes_in_flight: int = BYTES_IN_FLIGHT,
    ) -> None:
        check_plan(plan)
        _check_process_group(process_group)
        check_integer("bytes_in_flight", bytes_in_flight, 1, "512 * 2**20, the default, is 512 MiB")
        self.bytes_in_flight = bytes_in_flight
        self.plan, self.process_group = plan, process_group
        if process_group is not None:
            ranks = torch.distributed.get_process_group_ranks(process_group)
            collectives.lend(tuple(sorted(ranks)), process_group)
        self._choices: dict[Any, Choice] = {}
        self._placed: dict[int, _Placed] = {}  # by the id of a parameter
        self._known = _Sorted([], [], [])
        self._local: LocalState | None = None
        self._exchanges: tuple[Any, list[OverRanks]] = ((), [])
        self._graphs: WeakSet[OwnedGraph] = WeakSet()

    def layout_of(self, p: Tensor) -> Layout | None:
        """Where the parts of ``p`` lie; ``None`` if this process alone has it."""
        return self._of(p).layout

    def _of(self, p: Tensor) -> _Placed:
        placements = p.placements if is_sharded(p) else None
        known = self._placed.get(id(p))
        if known is None or known.p is not p or known.placements is not placements:
            known = _Placed(p, placements, Layout.of(p, self.process_group))
            self._placed[id(p)] = known
        return known

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
        self._placed = {key: found for key, found in self._placed.items() if key in kept}
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

    def choice(self, group: Group, p: Tensor, name: str = "the parameter") -> Choice | None:
        """The plan of a parameter in a Muon group; ``None`` if this process alone has it."""
        known = self._of(p)
        layout = known.layout
        if layout is None:
            return None
        view, asked = view_of(group, p, name), group.get("plan") or self.plan
        polar, transform = group["polar"], group["transform"]
        options = (layout, view, polar, transform, p.dtype, p.device, asked)
        if known.options != options:  # tuples compare by identity before they compare by value
            if options not in self._choices:
                check_plan(asked)
                self._choices[options] = chosen_plan(p, layout, view, polar, asked, transform)
            known.options, known.choice = options, self._choices[options]
        return known.choice

    def prepare(self, group: Group, state: State) -> None:
        """Choose the plans of a Muon group's parameters that have a gradient here.

        Ranks call this before they agree on a step, and raise together if one of them fails in it.
        :meth:`shares`, after that, calls no function of a map that was not called here first.
        """
        for name, p in named_params(group):
            known = self._of(p)
            choice = None if p.grad is None else self.choice(group, p, name)
            if choice is not None and choice is not known.prepared and choice.plan in BY_OWNERS:
                work = Work(group, [name], [p], [], None, views_of(group, [name], [p.shape]))
                for key, _ in members_of(work, 0, state):
                    carries.shapes_of(key, wire_dtype(key.polar, key.dtype, key.device))
            known.prepared = choice

    def shares(
        self, works: list[Work], state: State, draws: Draws, *, hooked: Container[int]
    ) -> tuple[list[Work], State, Shares]:
        """The matrices that this rank has whole and their state, and those that it shares with others.

        In the former a sharded parameter is this rank's part, whose state is in :meth:`local_state`.
        Hooks see whole matrices: ``hooked`` has the ids of parameters at which a hook of some rank
        looks, and every rank computes all of their matrices of which it holds a part.
        """
        plans = [[self._plan(work.group, p, hooked) for p in work.params] for work in works]

        def those(*of: Plan) -> list[Work]:
            return [
                work.of([i for i, plan in enumerate(its) if plan in of])
                for work, its in zip(works, plans, strict=True)
            ]

        whole, shared, gathered = those("local"), those(*BY_OWNERS, "gather"), those("gather")
        for work in shared:
            if work.group["momentum_dtype"] == torch.int8:
                for name, p in zip(work.names, work.params, strict=True):
                    check_blocks(p, name)
        here = state
        if any(is_sharded(p) for work in whole for p in work.params):
            here = self.local_state(state)
            whole = here.begin(whole)
        owned = self._owned(those(*BY_OWNERS), state, draws)
        return (
            whole,
            here,
            Shares(shared, owned, gathered, self.layout_of, state, self.bytes_in_flight, []),
        )

    def _plan(self, group: Group, p: Tensor, hooked: Container[int]) -> Plan:
        choice = self._of(p).prepared or self.choice(group, p)
        plan: Plan = "local" if choice is None else choice.plan
        if id(p) not in hooked or plan == "local":
            return plan
        return "local" if plan == "replicated" else "gather"

    def _owned(
        self, works: list[Work], state: State, draws: Draws
    ) -> list[tuple[SharedBucket, OverRanks]]:
        """The buckets of matrices that one rank computes for others; two of them fit into the window.

        The table of who computes what is kept from step to step while the buckets stay the same.
        """

        def ranks_of(p: Tensor) -> tuple[tuple[int, ...], bool]:
            layout = self._layout(p)
            return layout.ranks, layout.cut == ()

        buckets: list[SharedBucket] = []
        for (key, _), members in members_by_key(works, state, ranks_of).items():
            layouts = [self._layout(member.param) for member in members]
            whole = SharedBucket(key, members, layouts, state, draws.of(key))
            buckets += whole.in_parts(self.bytes_in_flight // 2)
        decides = [b.decides for b in buckets]
        if decides != self._exchanges[0]:
            both = zip(buckets, computing_ranks(buckets), strict=True)
            self._exchanges = (decides, [self._exchange(b, computes) for b, computes in both])
        return list(zip(buckets, self._exchanges[1], strict=True))

    def _exchange(self, b: SharedBucket, computes: list[int]) -> OverRanks:
        table = Table(b, computes)
        if not is_worth_a_graph(b, len(table.owned)):
            return OverRanks(table)
        return OverRanks(table, OwnedGraph(b.key.device, self._graphs))

    def _layout(self, p: Tensor) -> Layout:
        layout = self.layout_of(p)
        assert layout is not None
        return layout


class StepOverRanks:
    """The steps of an optimizer on its ranks, and the error of this rank's share of a step."""

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._agreement = Agreement(distribution.plan, distribution.bytes_in_flight)
        self.errors: list[Exception] = []  # of this rank, since the ranks have agreed on the step
        self._checked_for: Sequence[tuple[Tensor, Layout]] = ()

    def collected(
        self,
        groups: list[Group],
        state: State,
        spread: Sequence[tuple[Tensor, Layout]],
        *,
        error: Exception | None = None,
        hooked: bool,
        everywhere: int = 0,
    ) -> list[Work]:
        """What every group has to update, agreed on with the ranks that have parts of it.

        ``spread`` has every parameter that other ranks have a part of. ``error``: what has failed on
        this rank in the step so far. ``hooked``: whether hooks of this rank look at the step;
        ``everywhere``: how many of them all ranks must have.
        """
        self.errors = []
        try:
            if spread is not self._checked_for:
                for p, layout in spread:
                    layout.check_part(p)
                self._checked_for = spread
            for group in groups:
                check_gradients(group)
                check_scale(group)
                if group["algorithm"] in ELEMENTWISE:
                    given = [(name, p) for name, p in named_params(group) if p.grad is not None]
                    prepare_elementwise(_prepared(group, given), state)
                else:
                    self._distribution.prepare(group, state)
        except Exception as found:  # raised on all ranks together
            error = error or found
        self._agreement.before_step(
            groups, state, spread, error=error, hooked=hooked, everywhere=everywhere
        )
        layouts = {id(p): layout for p, layout in spread}
        with noting(self.errors):
            self._agreement.compare_copies(groups, layouts)
        works = [self._collected(group) for group in groups]
        all_finite(
            (flag, layouts[id(p)])
            for work in works
            for p, flag in zip(work.params, work.finite or (), strict=False)
            if id(p) in layouts
        )
        return works

    def _collected(self, group: Group) -> Work:
        """What ``group`` has to update; if this rank fails in it, zeros, and the error is told later."""
        elsewhere = self._agreement.with_gradient
        with noting(self.errors):
            return collect(group, elsewhere)
        return collect(group, elsewhere, failed=True)

    def has_gradient(self, p: Tensor) -> bool:
        """Whether this rank, or another at the last step, has a gradient of ``p``."""
        return p.grad is not None or id(p) in self._agreement.with_gradient

    def update_alone(
        self,
        muon: list[Work],
        state: State,
        replayed: ReplayedStep | None,
        draws: Draws,
        hooks: tuple[PolarHook, ...],
    ) -> None:
        """Update the matrices of ``muon``, of which some are a ``DTensor`` on this rank alone.

        It is updated as the plain tensor that is its local part.
        """
        here = self._distribution.local_state(state)
        step(here.begin(muon), here, draws, replayed, hooks)
        here.settle()

    def update_shares(
        self,
        muon: list[Work],
        state: State,
        replayed: ReplayedStep | None,
        draws: Draws,
        hooks: tuple[PolarHook, ...],
    ) -> None:
        """Do this rank's share of the work on the matrices of ``muon``.

        An error in it is told when the step ends: other ranks wait for what this rank has to send.
        """
        hooked = self._agreement.hooked
        try:
            works, here, shares = self._distribution.shares(muon, state, draws, hooked=hooked)
            errors = shares.errors
            hooks = tuple(_noting_errors(hook, errors) for hook in hooks)
            step(works, here, draws, replayed, hooks, shares)
        except Exception as error:  # this rank cannot send what others wait for
            collectives.leave_words(error)
            raise
        with noting(errors):
            if isinstance(here, LocalState):
                here.settle()
        self.errors += errors

    def update_elementwise(self, work: Work, state: State) -> None:
        """Update this rank's parts of the parameters of another rule; an error is told as above."""
        late = [pair for pair in zip(work.names, work.params, strict=True) if pair[1].grad is None]
        with noting(self.errors):
            prepare_elementwise(_prepared(work.group, late), state)
            step_elementwise(work, state)

    def end_step(self, groups: list[Group]) -> None:
        """Raise on all ranks if one of them has failed in its share of the step."""
        self._agreement.after_step(groups, self.errors[0] if self.errors else None)


def _prepared(group: Group, named: list[tuple[str, Tensor]]) -> Work:
    """A work that has what :func:`prepare_elementwise` looks at."""
    return Work(group, [name for name, _ in named], [p for _, p in named], [], None, [])


def _noting_errors(hook: PolarHook, errors: list[Exception]) -> PolarHook:
    """``hook``, with its errors in ``errors``."""

    def safe(bucket: Observed) -> None:
        with noting(errors):
            hook(bucket)

    return safe
