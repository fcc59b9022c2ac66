"""The states of a checkpoint, in the units and under the names of :class:`polarstep.Muon`.

Warnings say what differs from the other run: states that are lost, and steps that change.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polarstep.context import user_stacklevel
from polarstep.convert.entries import Entry, ParameterPlace, entries_of, indices, places_of
from polarstep.convert.formats import option_of
from polarstep.groups import scale_of, view_of
from polarstep.matrix import MatrixView
from polarstep.optimizer import Muon
from polarstep.transforms import NormalizedRows

__all__ = ["state_dict"]

ROW_MOMENTS = "variance_neuron"  # the key of dion's NorMuon
Pairs = Sequence[tuple[Entry, ParameterPlace]]


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
    for message in _differences(pairs, anew, left_out if states else []):
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


# --- differences from the other run: each function returns the text of a warning, or None


def _differences(pairs: Pairs, anew: Sequence[str], left_out: Sequence[str]) -> Iterator[str]:
    """The texts of all warnings.

    Args:
        pairs: the entries of the checkpoints, each with its parameter here.
        anew: names of parameters whose states could not be converted.
        left_out: names of parameters that are in none of the checkpoints.
    """
    found = (
        _other_rules(anew),
        _row_moments(pairs),
        _other_ranks(pairs),
        _other_matrices(pairs),
        _other_scales(pairs),
        _other_checkpoints(left_out),
    )
    return (message for message in found if message is not None)


def _other_rules(anew: Sequence[str]) -> str | None:
    """A parameter that Muon updated there and AdamW here, or the other way round, has no state."""
    if not anew:
        return None
    return (
        f"{_listed(anew)} had another rule in the checkpoint than in this optimizer, so its state "
        "starts anew; to keep it, give the parameter the rule it had, by rules=[…] of muon_for"
    )


def _row_moments(pairs: Pairs) -> str | None:
    """NorMuon also keeps second moments of the rows of T; only its momentum is converted."""
    its = [
        (place.name, place.group)
        for entry, place in pairs
        if place.is_for_muon and entry.sums_gradients and ROW_MOMENTS in entry.state
    ]
    if not its:
        return None
    remedy = (
        "; for NorMuon's steps make the optimizer with transform=polarstep.NormalizedRows(beta2), with "
        "the muon_beta2 of the checkpoint"
    )
    if all(isinstance(group["transform"], NormalizedRows) for _, group in its):
        remedy = ""
    return (
        f"{_listed([name for name, _ in its])}: NorMuon's second moments of rows, {ROW_MOMENTS}, are "
        f"not converted and start anew, while the momentum goes on{remedy}"
    )


def _other_ranks(pairs: Pairs) -> str | None:
    """A checkpoint of KellerJordan's Muon may lack the momentum of some matrices.

    A rank of a distributed run updates some of the matrices, and keeps the momentum of these alone.
    """
    its = [
        (entry, place.name)
        for entry, place in pairs
        if place.is_for_muon and entry.kept.by_rank and entry.sums_gradients
    ]
    without = [name for entry, name in its if entry.empty]
    if not without or len(without) == len(its):
        return None
    return (
        f"the checkpoint has no momentum of {_listed(without)}, so it starts anew while other "
        "matrices go on; each rank of KellerJordan's Muon keeps the momentum of its own "
        'matrices alone: after a run on several ranks put the "state" of all their checkpoints '
        "together, and convert again"
    )


def _other_matrices(pairs: Pairs) -> str | None:
    """Tensors of three or more dimensions were other matrices in the checkpoint's Muon than here."""
    changed = []
    for entry, place in pairs:
        name, p, group = place
        layout = entry.layout(p.dim())
        if not place.is_for_muon or not entry.sums_gradients or layout is None:
            continue
        theirs, ours = MatrixView.of(p.shape, layout=layout), view_of(group, p, name)
        if theirs.shapes != ours.shapes and not ours.is_cut:
            changed.append((name, theirs, ours, layout))
    if not changed:
        return None
    name, theirs, ours, layout = changed[0]
    return (
        f"{_listed([name for name, *_ in changed])}: the Muon of the checkpoint read {name} as "
        f"{theirs}, and this optimizer reads it as {ours}, so that its steps are others; to go on "
        f'as before, give such tensors a group with layout="{layout}"'
    )


def _other_scales(pairs: Pairs) -> str | None:
    """Steps of convolution filters had another scale in the checkpoint's Muon than they have here.

    KellerJordan's ``muon_update`` computes the scale √max(1, m/n) from the last two dimensions of the
    gradient, which are kh and kw for a filter; here m × n is the shape of the matrix, out × in·kh·kw.
    """
    changed = []
    for entry, place in pairs:
        name, p, group = place
        filters = entry.kept.by_kernel and p.dim() == 4 and place.is_for_muon
        if not filters or group["shape_scale"] != "spectral":
            continue
        theirs = math.sqrt(max(1.0, p.shape[2] / p.shape[3]))
        (_, m, n), *_ = view_of(group, p, name).shapes
        ours = scale_of(group, p.device)(m, n)
        if not math.isclose(ours, theirs):
            changed.append((name, theirs, ours))
    if not changed:
        return None
    name, theirs, ours = changed[0]
    factor = "" if theirs == 1 else f" and lr_factor={theirs:.4g}"
    return (
        f"{_listed([name for name, _, _ in changed])}: KellerJordan's Muon scales the steps of a "
        "convolution filter by √max(1, kh/kw), polarstep by √max(1, out/(in·kh·kw)), so that the steps "
        f"of {name} are multiplied by {ours:.4g} where they were by {theirs:.4g}; to go on as "
        f'before, give such filters a group with shape_scale="none"{factor}'
    )


def _other_checkpoints(left_out: Sequence[str]) -> str | None:
    """The checkpoint of a second optimizer, as AdamW beside Muon, may have been forgotten."""
    if not left_out:
        return None
    return (
        f"none of the checkpoints has {_listed(left_out)}, so their states start anew while others "
        "go on; if the other run had two optimizers, give a list of checkpoints, as "
        "[muon.state_dict(), adamw.state_dict()]"
    )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
