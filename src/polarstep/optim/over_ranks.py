"""The steps of an optimizer, alone or with parameters in parts or in copies on several ranks.

The ranks first agree on what has a gradient, and on any error: an error raised on one rank alone would
leave the others waiting. Then each rank does its share of the work (:mod:`polarstep.distributed.step`).
An error inside that share is raised by all ranks together at the next step, when they agree again.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from polarstep.distributed.layout import Layout
from polarstep.distributed.status import Agreement, Report, agreed, all_finite, check_alike
from polarstep.distributed.step import Distribution
from polarstep.optim.groups import Group
from polarstep.optim.guards.mistakes import callers_level
from polarstep.optim.stepping.by_tensors import PlainStep
from polarstep.optim.stepping.collect import State, Work, check_gradients, collect
from polarstep.optim.stepping.replay import ReplayedStep
from polarstep.optim.stepping.resting import let_rest
from polarstep.optim.stepping.step import Bucket, PolarHook

__all__ = ["StepOverRanks"]


class StepOverRanks:
    """The steps of an optimizer on its ranks, and the error that the last shared step left."""

    def __init__(self, distribution: Distribution) -> None:
        self._distribution = distribution
        self._failure: Exception | None = None
        self._agreement = Agreement()  # of the ranks, about this step
        self._alike: Sequence[tuple[Tensor, Layout]] = ()  # parameters that all ranks have alike
        # Whether plain tensors stand in for sharded parameters at this step.
        self._stand_ins = False

    def collected(
        self,
        groups: list[Group],
        state: State,
        spread: Sequence[tuple[Tensor, Layout]],
        *,
        hooked: bool,
    ) -> list[Work]:
        """What every group has to update, agreed on with the ranks that have parts of it.

        ``spread`` has every parameter that other ranks have a part of. ``hooked``: whether hooks of this
        rank look at the step.
        """
        if not spread:
            whole, stand_ins = self._distribution.whole(groups), None
            self._stand_ins = bool(whole)
            if whole:
                stand_ins = self._distribution.local_state(state).stand_ins(whole)
            return [collect(group, stand_ins=stand_ins) for group in groups]
        if spread is not self._alike:
            # A rank may add parameters that no other has; then the list is new, and has the same.
            if [id(p) for p, _ in spread] != [id(p) for p, _ in self._alike]:
                check_alike(spread)
            self._alike = spread
        error, self._failure = self._failure, None
        try:
            for group in groups:
                check_gradients(group)
        except Exception as found:  # raised on all ranks together
            error = error or found
        layouts = {id(p): layout for p, layout in spread}
        memory = self._distribution.memory
        outdated = not memory.is_of(state, spread)
        report = Report(_steps(groups, layouts), error, hooked, outdated)
        self._agreement = agreed(spread, report)
        memory.forget(self._agreement.outdated)
        works = [collect(group, self._agreement.with_gradient) for group in groups]
        all_finite(
            (flag, layouts[id(p)])
            for work in works
            for p, flag in zip(work.params, work.finite or (), strict=False)
            if id(p) in layouts
        )
        return works

    def update_alone(
        self,
        muon: list[Work],
        state: State,
        replayed: ReplayedStep,
        plain: PlainStep,
        hooks: tuple[PolarHook, ...],
    ) -> None:
        """Update the matrices of ``muon``, of which no other rank has a part.

        A ``DTensor`` on one rank is updated as the plain tensor that stands in for it.
        """
        local_state = self._distribution.local_state(state) if self._stand_ins else None
        here = state if local_state is None else local_state
        let_rest(muon, here)
        updated = replayed(muon, here, hooks)
        plain(muon, here, hooks, skip=updated)
        if local_state is not None:
            local_state.settle()

    def update_shares(
        self,
        muon: list[Work],
        state: State,
        replayed: ReplayedStep,
        plain: PlainStep,
        hooks: tuple[PolarHook, ...],
    ) -> None:
        """Do this rank's share of the work on the matrices of ``muon``.

        An error in it is told at the next step: other ranks wait for what this rank has to send.
        """
        split = self._distribution.split(muon, state, hooked=self._agreement.hooked)
        hooks = tuple(_noting_errors(hook, split.errors) for hook in hooks)
        let_rest(split.here, split.state)
        split.let_rest()
        split.begin(plain)
        try:
            updated = replayed(split.here, split.state, hooks)
            plain(split.here, split.state, hooks, skip=updated)
        except Exception as error:
            split.errors.append(error)
        plain(split.gathered, state, hooks, skip=set())
        split.finish()
        split.settle()
        self._failure = split.errors[0] if split.errors else None

    def tell_of_failure(self) -> None:
        """Warn of an error in this rank's share, which all ranks will raise at the next step."""
        if self._failure is not None:
            warnings.warn(
                f"{type(self._failure).__name__}: {self._failure}; this rank may not have updated all "
                "of its matrices, and all ranks will raise this error at the next step",
                RuntimeWarning,
                stacklevel=callers_level(),
            )


def _steps(groups: list[Group], layouts: dict[int, Layout]) -> dict[tuple[int, ...], int]:
    """The sum of the steps of all groups that have parameters in common with a set of ranks.

    ``layouts`` has those of the parameters that other ranks have a part of, by id. A rank may have more
    groups than others, with parameters of its own.
    """
    steps: dict[tuple[int, ...], int] = {}
    for group in groups:
        found = [layouts[id(p)] for p in group["params"] if id(p) in layouts]
        # Parameters of a shape and mesh have one layout; to hash the ranks of all would take longer.
        for ranks in {layout.ranks for layout in {id(each): each for each in found}.values()}:
            steps[ranks] = steps.get(ranks, 0) + group.get("step", 0)
    return steps


def _noting_errors(hook: PolarHook, errors: list[Exception]) -> PolarHook:
    """``hook``, with its errors in ``errors``."""

    def noting(bucket: Bucket) -> None:
        try:
            hook(bucket)
        except Exception as error:
            errors.append(error)

    return noting
