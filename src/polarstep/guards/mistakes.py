"""Warnings about mistakes that a step would pass over in silence; each is given once, with a remedy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from torch import Tensor

from polarstep.context import user_stacklevel
from polarstep.groups import Group, named_params
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
        self._rested: list[tuple[str, Tensor]] = []  # frozen, with a state from a checkpoint
        self._no_gradient = self._unheld = False
        self._steps = 0  # those whose rates have been looked at
        self._highest = 0.0  # the highest of Muon's rates in them

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

    def of_step(self, groups: list[Group], works: Sequence[Work], unheld: Sequence[str]) -> None:
        """Warn of what is wrong with a step on ``works``, unless the warning was given before.

        ``unheld`` are parameters of the model that have a gradient and are in no group.
        """
        count = sum(len(group["params"]) for group in groups)
        updated = sum(len(work.params) for work in works)
        if not self._no_gradient and updated == 0:
            self._tell_of_no_gradient(count)
        elif unheld and not self._unheld:
            self._tell_of_the_unheld(unheld)
        if self._rested:
            self._tell_of_the_rested()
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
        self._no_gradient = self._unheld = True
        warnings.warn(
            f"step() found no gradient for any of the optimizer's {count} parameters, so nothing was "
            "updated. Expected gradients from backward(). If it has run, these are no longer the "
            "parameters of the model: get_peft_model, fully_shard, and to() or "
            "load_state_dict(assign=True) on some paths put new ones in their place. Make the optimizer "
            "after them, as muon_for(model)",
            stacklevel=user_stacklevel(),
        )

    def _tell_of_the_unheld(self, names: Sequence[str]) -> None:
        """Warn that the parameters ``names`` were unfrozen, or have come into the model, in no group."""
        self._unheld = True
        warnings.warn(
            f"{_have(names)} a gradient, but no group of this optimizer: frozen when muon_for was "
            "called, or added to the model since, as by a new layer or weight_norm. Make the optimizer "
            'after the last change of the model, or add them, by optimizer.add_param_group({"params": '
            "[...]}); each gets the rule it would have had. If another optimizer updates them, say so "
            'in muon_for by rules=[("name.*", None)]',
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


def _have(names: Sequence[str]) -> str:
    """The start of a sentence: ``a.weight has``, or ``a.weight and 2 more have``."""
    return f"{names[0]} and {len(names) - 1} more have" if len(names) > 1 else f"{names[0]} has"
