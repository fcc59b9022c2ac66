"""The steps of an optimizer, alone or with parameters in parts or in copies on several ranks.

The ranks first agree on what has a gradient, and on any error: an error raised on one rank alone would
leave the others waiting. Then each rank does its share of the work (:func:`polarstep.muon.step`).
An error inside that share is raised by all ranks together when the step ends.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from polarstep.bucket import Draws, Observed, PolarHook
from polarstep.context import user_stacklevel
from polarstep.engines.replay import ReplayedStep
from polarstep.gradients import Work, check_gradients, collect
from polarstep.groups import NAMELESS, Group, named_params
from polarstep.muon import step
from polarstep.options import CheckedOptions
from polarstep.others import ELEMENTWISE, prepare_elementwise, step_elementwise
from polarstep.ranks.alike import GroupOptions
from polarstep.ranks.copies import Watch, words_of_differences
from polarstep.ranks.distribution import Distribution
from polarstep.ranks.layout import Layout
from polarstep.ranks.status import (
    Agreement,
    Common,
    Report,
    agreed,
    all_finite,
    in_common,
    stop_together,
)
from polarstep.ranks.unstarted import drop_placeholders
from polarstep.state import State

__all__ = ["StepOverRanks"]


class StepOverRanks:
    """The steps of an optimizer on its ranks, and the error of this rank's share of a step."""

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._failure: Exception | None = None
        self._agreement = Agreement()  # of the ranks, about this step
        self._options = GroupOptions(distribution.plan)
        self._checked = CheckedOptions()
        # What this rank has in common with others, and the list and groups that it was made from.
        self._common: list[Common] = []
        self._made_from: tuple[Sequence[tuple[Tensor, Layout]], list[int]] = ((), [])
        # Whether a state may have come since the last step, as by load_state_dict. A copy may hold one.
        self.loaded = True
        self._differences: str | None = None  # between copies on ranks, in words
        self._watch = Watch()
        self._warned = False  # of differences, since a state has come
        self._is_sharded = False  # whether a parameter is a DTensor on this rank alone

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
        if not spread:
            if error is not None:
                raise error
            for number, group in enumerate(groups):
                self._checked.check(number, group)
            self._is_sharded = bool(self._distribution.whole(groups))
            return [collect(group) for group in groups]
        self._failure = None
        try:
            if spread is not self._made_from[0]:
                for p, layout in spread:
                    layout.check_part(p)
            for number, group in enumerate(groups):
                self._checked.check(number, group)
                check_gradients(group)
                if group["algorithm"] in ELEMENTWISE:
                    given = [(name, p) for name, p in named_params(group) if p.grad is not None]
                    prepare_elementwise(_prepared(group, given), state)
        except Exception as found:  # raised on all ranks together
            error = error or found
        layouts = {id(p): layout for p, layout in spread}
        steps = [group.get("step", 0) for group in groups]
        options = lambda i: self._options.of(i, groups[i])  # noqa: E731
        states = lambda its: _state_codes(its, groups, state)  # noqa: E731
        report = Report(steps, options, states, error, hooked, self.loaded, everywhere)
        sizes = [len(group["params"]) for group in groups]
        common = self._in_common(groups, spread, sizes)
        self._agreement = agreed(common, report)
        self._common, self._made_from = common, (spread, sizes)
        self.loaded = False
        if self._agreement.loaded:
            drop_placeholders(groups, state, self._agreement.loaded)
            self._differences = words_of_differences(common, self._agreement.loaded)
            self._warned = False
        self._watch.look(common, layouts, groups)
        works = [collect(group, self._agreement.with_gradient) for group in groups]
        all_finite(
            (flag, layouts[id(p)])
            for work in works
            for p, flag in zip(work.params, work.finite or (), strict=False)
            if id(p) in layouts
        )
        return works

    def _in_common(
        self, groups: list[Group], spread: Sequence[tuple[Tensor, Layout]], sizes: list[int]
    ) -> list[Common]:
        if self._made_from[0] is spread and self._made_from[1] == sizes:
            return self._common
        named = [
            [(None if name.startswith(NAMELESS) else name, p) for name, p in named_params(group)]
            for group in groups
        ]
        return in_common(spread, named)

    def has_gradient(self, p: Tensor) -> bool:
        """Whether this rank, or another at the last step, has a gradient of ``p``."""
        return p.grad is not None or id(p) in self._agreement.with_gradient

    def update_alone(
        self,
        muon: list[Work],
        state: State,
        replayed: ReplayedStep,
        draws: Draws,
        hooks: tuple[PolarHook, ...],
    ) -> None:
        """Update the matrices of ``muon``, of which no other rank has a part.

        A ``DTensor`` on one rank is updated as the plain tensor that is its local part.
        """
        if not self._is_sharded:
            step(muon, state, draws, replayed, hooks)
            return
        here = self._distribution.local_state(state)
        step(here.begin(muon), here, draws, replayed, hooks)
        here.settle()

    def update_shares(
        self,
        muon: list[Work],
        state: State,
        replayed: ReplayedStep,
        draws: Draws,
        hooks: tuple[PolarHook, ...],
    ) -> None:
        """Do this rank's share of the work on the matrices of ``muon``.

        An error in it is told when the step ends: other ranks wait for what this rank has to send.
        """
        works, shares = self._distribution.shares(muon, state, draws, hooked=self._agreement.hooked)
        here, errors = self._distribution.local_state(state), shares.errors
        hooks = tuple(_noting_errors(hook, errors) for hook in hooks)
        step(works, here, draws, replayed, hooks, shares)
        try:
            here.settle()
        except Exception as error:
            errors.append(error)
        self._failure = errors[0] if errors else None

    def update_elementwise(self, work: Work, state: State) -> None:
        """Update this rank's parts of the parameters of another rule; an error is told as above."""
        late = [pair for pair in zip(work.names, work.params, strict=True) if pair[1].grad is None]
        try:
            prepare_elementwise(_prepared(work.group, late), state)
            step_elementwise(work, state)
        except Exception as error:
            self._failure = self._failure or error

    def end_step(self, groups: list[Group]) -> None:
        """Raise on all ranks if one of them has failed in its share of the step.

        Warn of parameters that should be copies of one another and are not.
        """
        taken = max((group.get("step", 0) for group in groups), default=0)
        end = f"the end of step {max(0, taken - 1)} of the optimizer"
        largest = stop_together(
            self._common, self._agreement.back, self._failure, end, self._watch.told()
        )
        told, self._differences = self._differences or self._watch.words(largest), None
        if told is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"{told} differ between ranks. Copies of a parameter, as with process_group=… or HSDP, "
                "must have the same values and the same gradients on all ranks, or each goes on with a "
                "model of its own. Expected DistributedDataParallel(model), which sends the values of "
                "rank 0 to all and averages the gradients in every backward pass outside no_sync(), or "
                "fully_shard, without set_requires_all_reduce(False) in the last backward pass before a "
                "step; without such copies, give no process_group",
                stacklevel=user_stacklevel(),
            )


def _state_codes(its: Common, groups: list[Group], state: State) -> list[int]:
    """How many of the entries that ranks exchange the state of each parameter has."""
    names: dict[int, tuple[str, ...]] = {}
    for i in its.groups:
        group = groups[i]
        if group["algorithm"] == "muon":
            names |= dict.fromkeys(map(id, group["params"]), _exchanged(group))
    return [
        sum(name in state[p] for name in names.get(id(p), ())) if p in state else 0
        for p in its.params
    ]


def _exchanged(group: Group) -> tuple[str, ...]:
    """The entries of the state of a parameter in a Muon group of which ranks may exchange parts."""
    transform = group["transform"]
    return (
        "momentum_buffer",
        *group["polar"].traits.carries,
        *(transform.carries if transform else ()),
    )


def _prepared(group: Group, named: list[tuple[str, Tensor]]) -> Work:
    """A work that has what :func:`prepare_elementwise` looks at."""
    return Work(group, [name for name, _ in named], [p for _, p in named], [], None, [])


def _noting_errors(hook: PolarHook, errors: list[Exception]) -> PolarHook:
    """``hook``, with its errors in ``errors``."""

    def noting(bucket: Observed) -> None:
        try:
            hook(bucket)
        except Exception as error:
            errors.append(error)

    return noting
