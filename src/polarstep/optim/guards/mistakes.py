"""Warnings about mistakes that a step would pass over in silence; each is given once, with a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import Tensor

from polarstep.callers_level import callers_level
from polarstep.optim.groups import ELEMENTWISE, Group, named_params
from polarstep.optim.routing.following import Places
from polarstep.optim.stepping.collect import State, Work

__all__ = ["MistakeWarnings"]


class MistakeWarnings:
    """The warnings that an optimizer has given, and what it must know to notice a mistake."""

    def __init__(self) -> None:
        self._made_with: dict[str, float] = {}  # the learning rate of each group when it was added
        self._frozen: dict[int, tuple[str, Tensor]] = {}  # by id, with the names in the model
        self._rested: list[tuple[str, Tensor]] = []  # frozen, with a state from a checkpoint
        self._no_gradient = self._replaced = self._new = self._one_rate = False
        self._were_apart = False  # whether a step has found two rates that were made different
        self._together: float | None = None  # the first rate, not zero, that two such groups shared

    def added(self, group: Group) -> None:
        """Note the learning rate of a group that was added; none of its parameters is left out now."""
        if not isinstance(group["lr"], Tensor):
            self._made_with[group["name"]] = group["lr"]
        for p in group["params"]:
            self._frozen.pop(id(p), None)

    def frozen(self, groups: Iterable[Group]) -> None:
        """Note the parameters that :func:`polarstep.muon_for` found frozen and put in no group."""
        self._frozen = {id(p): (name, p) for group in groups for name, p in group["params"]}

    def loaded(self, groups: Iterable[Group], state: State) -> None:
        """Note the frozen parameters that have a state in the checkpoint just loaded.

        Its rates may be the end of a schedule that brings all groups down to one small rate.
        """
        self._were_apart = True
        self._rested = [
            (name, p)
            for group in groups
            for name, p in named_params(group)
            if not p.requires_grad and state.get(p)
        ]

    def of_step(
        self, groups: list[Group], works: Sequence[Work], places: Places | None = None
    ) -> None:
        """Warn of what is wrong with a step on ``works``, unless the warning was given before."""
        count = sum(len(group["params"]) for group in groups)
        updated = sum(len(work.params) for work in works)
        if not self._no_gradient and updated == 0:
            self._tell_of_no_gradient(count)
        elif places is not None:
            if not self._replaced:
                self._tell_of_the_replaced(places.replaced(groups))
            if not self._new:
                self._tell_of_the_new(places.new(groups))
        if self._rested:
            self._tell_of_the_rested()
        if self._frozen:
            self._tell_of_the_unfrozen(groups)
        if not self._one_rate:
            self._tell_of_one_rate(groups)

    def _tell_of_no_gradient(self, count: int) -> None:
        if count == 0:
            return
        self._no_gradient = self._replaced = self._new = True
        warnings.warn(
            f"step() found no gradient for any of the optimizer's {count} parameters, so nothing was "
            "updated. Expected gradients from backward(). If it has run, these are no longer the "
            "parameters of the model: get_peft_model, fully_shard, and to() or "
            "load_state_dict(assign=True) on some paths put new ones in their place. Make the optimizer "
            "after them, as muon_for(model)",
            stacklevel=callers_level(),
        )

    def _tell_of_the_replaced(self, names: list[str]) -> None:
        """Warn that the model has replaced the parameters ``names``."""
        if not names:
            return
        self._replaced = True
        warnings.warn(
            f"{_have(names)} been replaced in the model since muon_for was called, as by "
            "resize_token_embeddings, a new head or load_state_dict(assign=True). The new parameter has "
            "a gradient, but this optimizer still holds the old one. Make the optimizer after the last "
            "call that replaces parameters",
            stacklevel=callers_level(),
        )

    def _tell_of_the_new(self, names: list[str]) -> None:
        """Warn that the model has got the parameters ``names`` since the optimizer was made."""
        if not names:
            return
        self._new = True
        warnings.warn(
            f"{_have(names)} been added to the model since muon_for was called, as by a new layer, or "
            "by weight_norm that was put on a layer or removed. There is a gradient, but no group of "
            "this optimizer. Make the optimizer after the last change of the model, or add such "
            'parameters by optimizer.add_param_group({"params": [...]}); each gets the rule it would '
            "have had",
            stacklevel=callers_level(),
        )

    def _tell_of_the_rested(self) -> None:
        """Warn of parameters that the saved run updated and that are frozen in this run."""
        names = [name for name, p in self._rested if not p.requires_grad]
        self._rested = []
        if not names:
            return
        warnings.warn(
            f"{_have(names)} a state in the checkpoint that was loaded, but requires_grad=False: the "
            "run that was saved updated what this one leaves alone. Expected the same layers to train. "
            "Lightning's BackboneFinetuning freezes its backbone again when a run is resumed. Unfreeze "
            "the layers before the first step, by module.requires_grad_(True); if they are meant to "
            "stay frozen, all is well",
            stacklevel=callers_level(),
        )

    def _tell_of_the_unfrozen(self, groups: Iterable[Group]) -> None:
        """Warn of parameters that were frozen, and now have a gradient but no group.

        One that is still frozen may have a gradient from before.
        """
        if not any(p.requires_grad and p.grad is not None for _, p in self._frozen.values()):
            return
        # Lightning writes to optimizer.param_groups itself when it resumes a run.
        for group in groups:
            for p in group["params"]:
                self._frozen.pop(id(p), None)
        frozen = self._frozen.values()
        names = [name for name, p in frozen if p.requires_grad and p.grad is not None]
        if not names:
            return
        self._frozen = {}
        warnings.warn(
            f"{_have(names)} a gradient, but no group of this optimizer: frozen parameters are left "
            "out when muon_for is called. Unfrozen later, they must be added, by "
            'optimizer.add_param_group({"params": [...]}); each gets the rule it would have had. If '
            'another optimizer updates them, say so in muon_for by rules=[("name.*", None)]',
            stacklevel=callers_level(),
        )

    def _tell_of_one_rate(self, groups: Sequence[Group]) -> None:
        """Warn if another rule has Muon's learning rate, and was made with another one.

        A loop that writes the same ``group["lr"]`` to all groups leads to this, as does ``OneCycleLR``
        with one number. Where that number is small, Muon hardly moves. A schedule may begin or end at
        one small rate for all groups, so a rate below the one that the rule was made with is told of
        only if the two were never apart, and if the rate has changed since. A rate in a tensor is not
        read, as that would wait for the device.
        """
        known = [
            (group, self._made_with[group["name"]])
            for group in groups
            if group.get("name") in self._made_with and not isinstance(group["lr"], Tensor)
        ]
        muon = [(group, made) for group, made in known if group["algorithm"] == "muon"]
        pairs = [
            (other, made_too, group, made)
            for group, made in known
            if group["algorithm"] != "muon"
            for other, made_too in muon
            if made_too != made
        ]
        self._were_apart |= any(other["lr"] != group["lr"] for other, _, group, _ in pairs)
        for other, made_too, group, made in pairs:
            lr = group["lr"]
            if lr != other["lr"] or lr == 0:
                continue
            if self._together is None:
                self._together = lr
            if lr > made or (not self._were_apart and (lr == made or lr != self._together)):
                self._one_rate = True
                _warn_of_one_rate(other, made_too, group, made)
                return


def _warn_of_one_rate(muon: Group, made: float, other: Group, other_made: float) -> None:
    rule = ELEMENTWISE[other["algorithm"]].__name__
    warnings.warn(
        f"the groups {muon['name']!r} (Muon) and {other['name']!r} ({rule}) both have "
        f"lr={muon['lr']:g} now; they were made with {made:g} and {other_made:g}. Expected a schedule "
        "that multiplies each group's own rate by a factor, as LambdaLR does; OneCycleLR takes a list "
        "with a rate for each group. If one rate for all is meant, make the optimizer with it",
        stacklevel=callers_level(),
    )


def _have(names: Sequence[str]) -> str:
    """The start of a sentence: ``a.weight has``, or ``a.weight and 2 more have``."""
    return f"{names[0]} and {len(names) - 1} more have" if len(names) > 1 else f"{names[0]} has"
