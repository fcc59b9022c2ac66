"""The steps of an optimizer, alone or with parameters in parts or in copies on several ranks.

The ranks first agree on what has a gradient, and on any error: an error raised on one rank alone would
leave the others waiting. Then each rank does its share of the work (:func:`polarstep.muon.step`).
An error inside that share is raised by all ranks together when the step ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from polarstep.bucket import Draws, Observed, PolarHook
from polarstep.context import noting
from polarstep.engines.replay import ReplayedStep
from polarstep.gradients import Work, check_gradients, check_scale, collect
from polarstep.groups import Group, named_params
from polarstep.muon import step
from polarstep.others import ELEMENTWISE, prepare_elementwise, step_elementwise
from polarstep.ranks import collectives
from polarstep.ranks.agree import Agreement, all_finite
from polarstep.ranks.distribution import Distribution
from polarstep.ranks.layout import Layout
from polarstep.ranks.local_shard import LocalState
from polarstep.state import State

__all__ = ["StepOverRanks"]


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
