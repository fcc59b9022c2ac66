"""The states of a checkpoint, in the units and under the names of :class:`polarstep.Muon`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polarstep.context import user_stacklevel
from polarstep.convert.differences import messages
from polarstep.convert.entries import Entry, entries_of
from polarstep.convert.formats import option_of
from polarstep.convert.matching import ParameterPlace, indices, places_of
from polarstep.optimizer import Muon

__all__ = ["state_dict"]


def state_dict(
    theirs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    optimizer: Muon,
    *,
    params: Iterable[Tensor] | None = None,
    source: str | None = None,
) -> dict[str, Any]:
    """A checkpoint for ``optimizer.load_state_dict`` with the momentum of other optimizers.

    The options stay those of ``optimizer``. Parameters are matched by ``params`` if it is given, else
    by name if both sides have the same names, else by their order, if no name contradicts it.

    Args:
        theirs: the ``state_dict()`` of the other optimizer, or a list of several, as of
            ``torch.optim.Muon`` and ``torch.optim.AdamW`` that were used side by side.
        optimizer: the optimizer that goes on.
        params: the parameters in the order of the other optimizer's groups, where it is not the order
            in ``optimizer``: ``[p for group in other.param_groups for p in group["params"]]``.
        source: a name in :data:`FORMATS`; by default found from the keys of the groups.

    Raises:
        ValueError: if the parameters cannot be matched, or if a state has another shape than its
            parameter.
    """
    if not isinstance(optimizer, Muon):
        kind = type(optimizer)
        raise TypeError(
            f"optimizer is a {kind.__module__}.{kind.__name__}: expected the polarstep.Muon that goes "
            "on, as made by polarstep.muon_for(model, **polarstep.convert.options(theirs))"
        )
    checkpoints: Sequence[Any] = theirs if isinstance(theirs, list | tuple) else [theirs]
    if not checkpoints:
        raise ValueError("theirs is empty: expected the state_dict() of at least one optimizer")
    entries = [entry for each in checkpoints for entry in entries_of(each, source)]
    places = places_of(optimizer)
    order = indices(entries, places, params)
    ours = optimizer.state_dict()
    states: dict[int, dict[str, Any]] = {}
    anew = []
    for entry, index in zip(entries, order, strict=True):
        if entry.empty:
            continue
        state = _converted(entry, places[index])
        if state is None:
            anew.append(places[index].name)
        else:
            states[index] = state
    pairs = [(entry, places[index]) for entry, index in zip(entries, order, strict=True)]
    left_out = [place.name for i, place in enumerate(places) if i not in set(order)]
    for message in messages(pairs, anew, left_out if states else []):
        warnings.warn(message, stacklevel=user_stacklevel())
    steps = max((entry.steps for entry in entries if entry.steps is not None), default=0)
    for group in ours["param_groups"]:
        if group["algorithm"] == "muon":
            group["step"] = steps
    return ours | {"state": states}


def _converted(entry: Entry, place: ParameterPlace) -> dict[str, Any] | None:
    """The state of ``entry`` for the parameter at ``place``; ``None`` if it has another rule there."""
    its = entry.kept
    if place.is_for_muon and entry.sums_gradients and its.momentum in entry.state:
        found = {"momentum_buffer": _sum_of_gradients(entry, place.param.shape)}
    elif place.group["algorithm"] == "adamw" and {its.first, its.second} <= set(entry.state):
        found = _moments(entry)
    else:
        return None
    for key, value in found.items():
        if key != "step" and value.shape != place.param.shape:
            raise ValueError(
                f"{key} of {place.name} has shape {tuple(value.shape)} in the checkpoint, and the "
                f"parameter {tuple(place.param.shape)}: expected the same; give params= in the order of "
                "the other optimizer's groups"
            )
    return found


def _sum_of_gradients(entry: Entry, shape: torch.Size) -> Tensor:
    """C of a parameter of ``shape``, from the sum or the average of gradients in the checkpoint."""
    buffer: Tensor = entry.state[entry.kept.momentum]
    if entry.kept.as_matrix and buffer.shape == (shape[0], math.prod(shape[1:])):
        buffer = buffer.reshape(shape)
    # 1/(1 − β) times a float16 average may be infinite in float16; here C is in float32.
    return buffer.to(torch.promote_types(buffer.dtype, torch.float32)) / _share(entry)


def _share(entry: Entry) -> float:
    """The momentum of the checkpoint as a share of C: 1 − β of an average, 1 of a sum."""
    its = entry.kept
    if not its.averages:
        return 1.0
    beta = option_of(entry.group, its.beta, entry.source)
    if not 0 <= beta < 1:
        raise ValueError(
            f"{its.beta}={beta} in a group of the checkpoint: expected 0 ≤ β < 1, as its "
            "momentum is an average with the share 1 − β of every gradient; let the momentum start "
            "anew, by loading no state for Muon"
        )
    return float(1 - beta)


def _moments(entry: Entry) -> dict[str, Tensor]:
    """AdamW's moments and counter."""
    step = torch.tensor(float(entry.steps or 0), dtype=torch.float32, device="cpu")
    # Copies, as torch loads a state without one, and both optimizers would write to it.
    first, second = (entry.state[key].clone() for key in (entry.kept.first, entry.kept.second))
    return {"step": step, "exp_avg": first, "exp_avg_sq": second}
