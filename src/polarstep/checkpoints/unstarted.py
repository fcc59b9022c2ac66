"""Entries that the state of a parameter does not have yet, in the checkpoints of ranks.

``torch.distributed.checkpoint`` asks for the same entries on saving and on loading. Before loading it
makes them by a step with gradients of zero. But a parameter that never had a gradient has no state, and
the peak of a momentum (:mod:`polarstep.stale_momentum`) is first taken at step 64. So where
torch.distributed is initialized, a checkpoint has what a gradient of zero would have left: zeros for
momenta, peaks, averages and rounding errors, and what the map makes of a matrix of zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polarstep.bucket import members_of
from polarstep.gradients import Work
from polarstep.groups import Group, view_of
from polarstep.others import ELEMENTWISE, first_state
from polarstep.ranks import carries
from polarstep.ranks.layout import Layout, is_sharded, placed_by_matrix, wrapped
from polarstep.state import (
    carried_dtype,
    entry,
    is_compensated,
    keep_momentum,
    kept_by_rule,
    momentum_of,
    rounding_error,
    stored_dtype,
)

__all__ = ["with_all_entries"]


def with_all_entries(group: Group, p: Tensor, known: dict[str, Any]) -> dict[str, Any]:
    """``known``, the state of ``p``, and the entries that it lacks, sorted by name.

    Ranks gather the entries one after the other, and a rank without a part of ``p`` may have made them
    in another order.
    """
    if not known:
        known = _after_zeros(group, p)
    if group["algorithm"] == "muon" and "peak" not in known:
        known = known | {"peak": _no_peak(group, p)}
    if is_compensated(group, p) and "rounding_error" not in known:
        known = known | {"rounding_error": rounding_error(p, {})}
    return dict(sorted(known.items()))


def _after_zeros(group: Group, p: Tensor) -> dict[str, Any]:
    """What a step with a gradient of zero leaves in the state of ``p``."""
    if group["algorithm"] in ELEMENTWISE:
        return first_state(ELEMENTWISE[group["algorithm"]], p)
    found: dict[str, Any] = {}
    kept = stored_dtype(group, p)
    keep_momentum(momentum_of(p, found, kept), p, found, kept)
    kept_by_rule(p, found, group["momentum_rule"])
    work = Work(group, [""], [p], [p], None, [view_of(group, p)])
    for signature, member in members_of(work, 0, {}):
        for name, X in carries.after_zeros(signature, signature.dtype).items():
            X = X.to(carried_dtype(signature.polar, name, p.dtype))
            X = X.expand(member.count, *X.shape[1:])
            if is_sharded(p) and not _is_cut_between_matrices(p):
                found[entry(name, member.block)] = _placed(
                    X, p, carries.placements(p, member.count, tuple(X.shape[1:]))
                )
            else:
                found[entry(name, member.block)] = _by_matrix(X, p)
    return found


def _no_peak(group: Group, p: Tensor) -> Tensor:
    """A peak of zero for each matrix of ``p``."""
    count, kept = sum(count for count, _, _ in view_of(group, p).shapes), stored_dtype(group, p)
    dtype = torch.float32 if kept == torch.int8 else kept
    return _by_matrix(torch.zeros(count, dtype=dtype, device=p.device), p)


def _by_matrix(X: Tensor, p: Tensor) -> Tensor:
    """``X``, which has a row for each matrix; in parts where the matrices are on several ranks."""
    if not is_sharded(p) or not _is_cut_between_matrices(p):
        return X.contiguous()
    return _placed(X, p, placed_by_matrix(p))


def _is_cut_between_matrices(p: Tensor) -> bool:
    """Whether ``p`` is a stack of matrices, of which ranks hold different matrices."""
    layout = Layout.of(p)
    return layout is not None and layout.cut == (0,) and len(layout.shape) == 3


def _placed(X: Tensor, p: Any, placements: Any) -> Tensor:
    """A sharded tensor on the mesh of ``p``, of which this rank has its part of the whole ``X``."""
    layout = Layout.of_placements(p.device_mesh, placements, tuple(X.shape))
    mine = X[tuple(slice(*span) for span in layout.boxes[layout.me])]
    # A clone, as copy.deepcopy fails for an empty view.
    mine = mine.clone(memory_format=torch.contiguous_format)
    return wrapped(mine, p, placements, X.shape)
