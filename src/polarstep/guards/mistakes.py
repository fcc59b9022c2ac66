"""Warnings about mistakes that a step would pass over in silence; each is given once, with a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import Tensor

from polarstep.context import user_stacklevel
from polarstep.groups import Group, named_params
from polarstep.routing.following import Places
from polarstep.state import State
from polarstep.stepping.collect import Work

__all__ = ["MistakeWarnings"]

# A learning rate is judged by its highest value in so many steps.
LOOKED_AT = 100
# Nothing is known to train well at a lower rate; AdamW's rates, as 3e-4 and 6e-4, are below it.
LOWEST = 1e-3


class MistakeWarnings:
    """The warnings that an optimizer has given, and what it must know to notice a mistake."""

    def __init__(self) -> None:
        self._frozen: dict[int, tuple[str, Tensor]] = {}  # by id, with the names in the model
        self._rested: list[tuple[str, Tensor]] = []  # frozen, with a state from a checkpoint
        self._no_gradient = self._replaced = self._new = False
        self._steps = 0  # those whose rates have been looked at
        self._highest = 0.0  # the highest of Muon's rates in them

    def added(self, group: Group) -> None:
        """Note that none of the parameters of ``group`` is left out now."""
        for p in group["params"]:
            self._frozen.pop(id(p), None)

    def frozen(self, groups: Iterable[Group]) -> None:
        """Note the parameters that :func:`polarstep.muon_for` found frozen and put in no group."""
        self._frozen = {id(p): (name, p) for group in groups for name, p in group["params"]}

    def loaded(self, groups: Iterable[Group], state: State) -> None:
        """Note the frozen parameters that have a state in the checkpoint just loaded.

        Its rates may be the end of a schedule, so they are not looked at.
        """
        self._steps = LOOKED_AT
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
        if self._steps < LOOKED_AT:
            self._look_at_rates(groups)

    def _look_at_rates(self, groups: Sequence[Group]) -> None:
        """Warn, after :data:`LOOKED_AT` steps, if Muon's rate was too low for anything in all of them.

        A warm-up may begin low, so the peak counts that torch's schedulers write to a group. A rate in a
        tensor is not read, as that would wait for the device. With ``shape_scale="rms"``, a function, or
        ``"none"``, which the theorems have, other rates are usual.
        """
        self._steps += 1
        for group in groups:
            if group["algorithm"] == "muon" and group["shape_scale"] in ("spectral", "fan-ratio"):
                rates = [group.get(key, 0.0) for key in ("lr", "initial_lr", "max_lr")]
                if any(isinstance(rate, Tensor) for rate in rates):
                    self._steps = LOOKED_AT
                    return
                self._highest = max(self._highest, *rates)
        if self._steps == LOOKED_AT and 0 < self._highest < LOWEST:
            warnings.warn(
                f"Muon's learning rate was at most {self._highest:g} in the first {LOOKED_AT} steps, "
                "and the matrices hardly move: expected 0.005 to 0.05 for training and 0.001 to 0.005 "
                "for fine-tuning. Rates of AdamW, as 3e-4, are not Muon's: try lr=0.02, which also sets "
                "the rates of everything else. If this is a long warm-up, all is well",
                stacklevel=user_stacklevel(),
            )

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
            stacklevel=user_stacklevel(),
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
            stacklevel=user_stacklevel(),
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
            stacklevel=user_stacklevel(),
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
            stacklevel=user_stacklevel(),
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
            stacklevel=user_stacklevel(),
        )


def _have(names: Sequence[str]) -> str:
    """The start of a sentence: ``a.weight has``, or ``a.weight and 2 more have``."""
    return f"{names[0]} and {len(names) - 1} more have" if len(names) > 1 else f"{names[0]} has"
