"""What a step refuses or warns of because it would go wrong in silence.

:class:`MistakeWarnings` warns, once each, of steps without gradients, parameters without a group, layers
that are frozen after a resume, and rates at which nothing trains.

:func:`unheld_params` refuses a step after the model has replaced parameters that the optimizer holds.

:func:`check_state_shapes` refuses a parameter that has another shape than its state, as after
``resize_token_embeddings``, or with the checkpoint of a model with another vocabulary. torch's fused
rules and our kernels take sizes from the parameter and addresses from the state, so they would read and
write beyond the state's memory.

The other functions refuse steps that a CUDA graph of the user's own cannot replay. A replay repeats the
captured kernels and runs no Python. So a captured step must not decide anything that may come out
differently at the next step, nor do anything that may be done only once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from polarstep.bucket import members_of
from polarstep.context import user_stacklevel
from polarstep.gradients import Work
from polarstep.groups import Group, check_whole, named_params
from polarstep.others import ELEMENTWISE
from polarstep.ranks.collectives import has_ranks
from polarstep.ranks.layout import is_sharded
from polarstep.routing.anatomy import unwrapped
from polarstep.state import State, is_shaped_as_parameter

__all__ = [
    "LOOKED_AT",
    "LOOKS_EVERY",
    "LOWEST",
    "OF_LOW_RATES",
    "MistakeWarnings",
    "check_draws",
    "check_shapes",
    "check_started",
    "check_state_shapes",
    "highest_rate",
    "refuse_measuring",
    "refuse_shared",
    "unheld_params",
]

# The first step looks for parameters that the model has replaced or added, and then every step of this
# number, and any step for which no parameter has a gradient.
LOOKS_EVERY = 16
# A learning rate is judged by its highest value in so many steps.
LOOKED_AT = 100
# Nothing is known to train well at a lower rate; AdamW's rates, as 3e-4 and 6e-4, are below it.
LOWEST = 1e-3
OF_LOW_RATES = (
    "expected 0.005 to 0.05. Rates of AdamW, as 3e-4, are not Muon's: try lr=0.02, which also sets the "
    "rates of everything else. If this is a long warm-up, all is well"
)


def highest_rate(groups: Sequence[Group]) -> float | None:
    """The highest of Muon's rates, and of the peaks that torch's schedulers write to a group.

    ``None`` where a rate is a tensor: to read it would wait for the device. Groups whose rates may be of
    any size are not looked at: those with ``shape_scale="rms"``, a function, or ``"none"``.
    """
    highest = 0.0
    for group in groups:
        if group["algorithm"] == "muon" and group["shape_scale"] in ("spectral", "fan-ratio"):
            rates = [group.get(key, 0.0) for key in ("lr", "initial_lr", "max_lr")]
            if any(isinstance(rate, Tensor) for rate in rates):
                return None
            highest = max(highest, *rates)
    return highest


class MistakeWarnings:
    """The warnings that an optimizer has given, and what it must know to notice a mistake."""

    def __init__(self) -> None:
        self._rested: list[tuple[str, Tensor]] = []  # frozen, with a state from a checkpoint
        self._no_gradient = self._unheld = False
        self._looks_at_rates = True
        self._highest = 0.0  # the highest of Muon's rates so far

    def loaded(self, groups: Iterable[Group], state: State) -> None:
        """Note the frozen parameters that have a state in the checkpoint just loaded.

        Its rates may be the end of a schedule, so they are not looked at.
        """
        self._looks_at_rates = False
        self._rested = [
            (name, p)
            for group in groups
            for name, p in named_params(group)
            if not p.requires_grad and state.get(p)
        ]

    def of_step(
        self, groups: list[Group], steps: int, unheld: Sequence[str], *, updated: bool
    ) -> None:
        """Warn of what is wrong with a step, unless the warning was given before.

        It is called where a group has changed, at step :data:`LOOKED_AT`, and where one of these says
        more: ``updated``, whether any parameter had a gradient, and ``unheld``, the parameters of the
        model that have a gradient and are in no group.
        """
        if not updated and not self._no_gradient:
            self._tell_of_no_gradient(sum(len(group["params"]) for group in groups))
        elif unheld and not self._unheld:
            self._tell_of_the_unheld(unheld)
        if self._rested:
            self._tell_of_the_rested()
        if self._looks_at_rates:
            self._look_at_rates(groups, steps)

    def _look_at_rates(self, groups: Sequence[Group], steps: int) -> None:
        """Warn, after :data:`LOOKED_AT` steps, if Muon's rate was too low in all of them."""
        highest = highest_rate(groups)
        if highest is None:
            self._looks_at_rates = False
            return
        self._highest = max(self._highest, highest)
        self._looks_at_rates = steps < LOOKED_AT
        if not self._looks_at_rates and 0 < self._highest < LOWEST:
            warnings.warn(
                f"Muon's learning rate was at most {self._highest:g} in the first {LOOKED_AT} steps, "
                f"and the matrices hardly move: {OF_LOW_RATES}",
                stacklevel=user_stacklevel(),
            )

    def _tell_of_no_gradient(self, count: int) -> None:
        if count == 0:
            return
        self._no_gradient = self._unheld = True
        warnings.warn(
            f"step() found no gradient for any of the optimizer's {count} parameters, so nothing was "
            "updated. Expected gradients: call loss.backward() before step(). If you do, these are no "
            "longer the parameters of the model: get_peft_model, fully_shard, and to() or "
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


def unheld_params(
    groups: Sequence[Group], model: nn.Module | None, elsewhere: Container[int]
) -> list[str]:
    """The parameters of ``model`` that have a gradient and are not in ``groups``.

    Those whose ids are in ``elsewhere`` are left out, as another optimizer may update them. Raises if
    the model has replaced a parameter in ``groups``. The parameter that has taken its place counts if it
    has a gradient and is in no group. Where it is in a group, two layers have been tied.
    """
    if model is None:
        return []
    held = {id(p): name for group in groups for name, p in named_params(group)}
    unheld = {
        unwrapped(name): id(p)
        for name, p in model.named_parameters(remove_duplicate=False)
        if p.grad is not None and p.requires_grad and id(p) not in held
    }
    if replaced := [name for name in held.values() if name in unheld]:
        raise RuntimeError(
            f"{_have(replaced)} been replaced in the model since the optimizer was made, as by "
            "fully_shard, get_peft_model, to_empty, resize_token_embeddings, a new head or "
            "load_state_dict(assign=True). The new parameter has a gradient, and the optimizer "
            "still holds the old one: expected an optimizer that is made after the last of these "
            "calls. Make it then, as muon_for(model), and load the state of this one, if it has any"
        )
    return [name for name, key in unheld.items() if key not in elsewhere]


def _have(names: Sequence[str]) -> str:
    """The start of a sentence: ``a.weight has``, or ``a.weight and 2 more have``."""
    return f"{names[0]} and {len(names) - 1} more have" if len(names) > 1 else f"{names[0]} has"


def check_state_shapes(group: Group, state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Raise for the first parameter of a group whose state has another shape.

    A ``DTensor`` has the shape of the whole parameter, and so has its state.
    """
    if group["algorithm"] == "muon":
        check_whole(named_params(group))
    for name, p in named_params(group):
        check_shapes(name, p, state.get(p, {}), group)


def check_shapes(name: str, p: Tensor, of_parameter: Mapping[str, Any], group: Group) -> None:
    """Raise for the first tensor in the state of ``p`` that has another shape than ``p``."""
    rule = ELEMENTWISE.get(group.get("algorithm", "muon"))
    shaped: Callable[[str], bool] = is_shaped_as_parameter
    if rule is not None:
        shaped = (*rule.buffers, "rounding_error").__contains__
    for key, kept in of_parameter.items():
        if not shaped(key):
            continue
        if kept is not None and getattr(kept, "shape", None) != p.shape:
            found = tuple(kept.shape) if isinstance(kept, Tensor) else type(kept).__name__
            raise ValueError(
                f"{key} of {name} is {found}, and the parameter has shape {tuple(p.shape)}: expected "
                "the same shape. Either the parameter was resized after a step, as by "
                "resize_token_embeddings: make a new optimizer, or let this parameter start anew by "
                "optimizer.state.pop(parameter). Or the checkpoint is of another model, or of one whose "
                "parameters came in another order: build the model as it was"
            )
        if kept is not None and is_sharded(kept) != is_sharded(p):
            which = ("a plain", "is sharded") if is_sharded(p) else ("a sharded", "is not sharded")
            raise ValueError(
                f"{key} of {name} is {which[0]} tensor, and the parameter {which[1]}: expected both "
                "alike. A plain state_dict() goes between optimizers of one sharding; for others take "
                "get_optimizer_state_dict and set_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict, with "
                "StateDictOptions(full_state_dict=True) where one side is not sharded"
            )


def refuse_shared() -> NoReturn:
    """Raise for a step that ranks share."""
    raise RuntimeError(
        "a step that ranks share is being captured in a CUDA graph: expected it outside, as the "
        "ranks must agree at every step on which gradients are there; capture forward and backward alone"
    )


def refuse_measuring(groups: list[Group]) -> NoReturn:
    """Raise for ``groups`` whose rate is still to be measured, which reads their entries."""
    raise RuntimeError(
        f"the rate of group {groups[0]['name']!r} is not measured yet, and a step is being captured in "
        "a CUDA graph: expected a step with lr above zero before the capture, on a side stream, as "
        "torch's notes on CUDA graphs do"
    )


def check_started(works: list[Work], state: State) -> None:
    """Raise if a graph captures the creation of a state, which every replay would repeat."""
    for work in works:
        for name, p in zip(work.names, work.params, strict=True):
            if not state.get(p) and not _needs_no_state(work, p):
                raise RuntimeError(
                    f"the first step of {name} is being captured in a CUDA graph, and every replay "
                    "would start from a state of zeros; call step() a few times before the capture, on "
                    "a side stream, as torch's notes on CUDA graphs do"
                )


def _needs_no_state(work: Work, p: Tensor) -> bool:
    rule = ELEMENTWISE.get(work.group["algorithm"])
    return rule is not None and not rule.new_state(p)


def check_draws(works: list[Work], state: State) -> None:
    """Raise if a graph captures random numbers while there are other ranks.

    In a graph the numbers come from torch's default generator, which each rank may seed differently.
    Copies of a parameter (DDP) would then take different steps and drift apart.
    """
    if not has_ranks():
        return
    ranks = torch.distributed.get_world_size()
    if ranks == 1:
        return
    for work in works:
        for index, name in enumerate(work.names):
            for signature, _ in members_of(work, index, state):
                if signature.drawn_at(signature.step)[0] is not None:
                    raise RuntimeError(
                        f"a step of {name} with {signature.polar} is being captured in a CUDA graph on "
                        f"one of {ranks} ranks: expected a map that draws no random numbers, as in a "
                        "graph each rank draws its own and copies of a parameter would drift apart; "
                        "capture forward and backward alone, or take a map like NewtonSchulz"
                    )
