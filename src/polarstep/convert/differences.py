"""Differences from the other run, as warnings: states that are lost, and steps that change.

Each private function looks for one kind of difference and returns the text of a warning, or ``None``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from polarstep.convert.entries import Entry
from polarstep.convert.matching import ParameterPlace
from polarstep.groups import scale_of, view_of
from polarstep.matrix import MatrixView
from polarstep.transforms import NormalizedRows

__all__ = ["messages"]

ROW_MOMENTS = "variance_neuron"  # the key of dion's NorMuon
Pairs = Sequence[tuple[Entry, ParameterPlace]]


def messages(pairs: Pairs, anew: Sequence[str], left_out: Sequence[str]) -> Iterator[str]:
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
