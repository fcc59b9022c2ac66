"""Entries of the state that do not exist yet, in checkpoints of ``torch.distributed.checkpoint``.

``torch.distributed.checkpoint`` asks for the same entries on saving and on loading. Before loading it
makes them by a step with gradients of zero. But a parameter that never had a gradient has no state, and
the peak of a momentum (:mod:`polarstep.stale_momentum`) is first taken at step 64. So a
checkpoint that is made where torch.distributed is initialized has placeholders for missing entries:
zeros for momenta, peaks, averages and rounding errors, which start from zero, and NaN for what a map
carries. On loading, a carry of nothing but NaN beside a momentum of nothing but zeros is dropped. Where
ranks share the parameter, it is dropped at the next step: a rank that loads alone would wait for the
others.
``ZeroRedundancyOptimizer`` puts a checkpoint into the state without ``load_state_dict``, so a step drops
such carries, too (:class:`Arrivals`).
"""

from __future__ import annotations

import operator
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from polarstep.bucket import members_of
from polarstep.gradients import Work
from polarstep.groups import Group, view_of
from polarstep.others import ELEMENTWISE, first_state
from polarstep.ranks import carries, collectives
from polarstep.ranks.layout import Layout, is_sharded, local, placed_by_matrix, wrapped
from polarstep.ranks.local_shard import is_cut
from polarstep.state import (
    State,
    carried_dtype,
    entry,
    is_compensated,
    keep_momentum,
    momentum_of,
    name_of,
    rounding_error,
    stored_dtype,
)

__all__ = ["Arrivals", "drop_placeholders", "has_ranks", "placeholders"]


def has_ranks() -> bool:
    """Whether this process is one of the ranks of a run."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def placeholders(group: Group, p: Tensor, known: dict[str, Any]) -> dict[str, Any]:
    """``known``, the state of ``p``, with placeholders for missing entries, sorted by name.

    Ranks gather the entries one after the other, and a rank without a part of ``p`` may have made them
    in another order.
    """
    if not known:
        known = _of_unstarted(group, p)
    if group["algorithm"] == "muon" and "peak" not in known:
        known = known | {"peak": _no_peak(group, p)}
    if is_compensated(group, p) and "rounding_error" not in known:
        known = known | {"rounding_error": rounding_error(p, {})}
    return dict(sorted(known.items()))


def _no_peak(group: Group, p: Tensor) -> Tensor:
    """A peak of zero for each matrix of ``p``, in parts where its matrices are on several ranks."""
    count, kept = sum(count for count, _, _ in view_of(group, p).shapes), stored_dtype(group, p)
    dtype = torch.float32 if kept == torch.int8 else kept
    if not is_sharded(p) or not _is_cut_between_matrices(p):
        return torch.zeros(count, dtype=dtype, device=p.device)
    return _filled(p, placed_by_matrix(p), (count,), 0.0, dtype)


def _of_unstarted(group: Group, p: Tensor) -> dict[str, Any]:
    """Placeholders for the state of ``p``, which never had a gradient."""
    if group["algorithm"] in ELEMENTWISE:
        return first_state(ELEMENTWISE[group["algorithm"]], p)
    found: dict[str, Any] = {}
    kept = stored_dtype(group, p)
    keep_momentum(momentum_of(p, found, kept), p, found, kept)
    work = Work(group, [""], [p], [p], None, [view_of(group, p)])
    for signature, member in members_of(work, 0, {}):
        for name, shape in carries.shapes_of(signature, signature.dtype).items():
            dtype = carried_dtype(signature.polar, name, p.dtype)
            found[entry(name, member.block)] = _nothing(p, member.count, shape, dtype)
    return found


def _nothing(p: Any, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A carry of NaN, in parts where ``p`` is in parts."""
    if not is_sharded(p):
        return torch.full((count, *shape), torch.nan, dtype=dtype, device=p.device)
    batched = _is_cut_between_matrices(p)
    placements = placed_by_matrix(p) if batched else carries.placements(p, count, shape)
    return _filled(p, placements, (count, *shape), torch.nan, dtype)


def _is_cut_between_matrices(p: Tensor) -> bool:
    """Whether ``p`` is a stack of matrices, of which ranks hold different matrices."""
    layout = Layout.of(p)
    return layout is not None and is_cut(p) and layout.cut == (0,) and len(layout.shape) == 3


def _filled(
    p: Any, placements: Any, shape: tuple[int, ...], value: float, dtype: torch.dtype
) -> Tensor:
    """A sharded tensor of ``shape`` on the mesh of ``p``, filled with ``value``."""
    box = Layout.of_placements(p.device_mesh, placements, shape)
    mine = [stop - start for start, stop in box.boxes[box.me]]
    part = torch.full(mine, value, dtype=dtype, device=p.device)
    return wrapped(part, p, placements, shape)


def drop_placeholders(
    groups: list[Group], state: State, shared: Container[int] | None = None
) -> None:
    """Remove carries that are placeholders.

    Those of parameters that this rank has alone, or of those whose ids are in ``shared``: ranks that
    share a parameter decide together, and so in a step, where all of them know of it.

    A momentum that a NaN gradient has made NaN for good leaves carries of nothing but NaN, too. These
    stay: without them the parameter would leave the batch of its shape, and the last digits of the other
    matrices may depend on the size of the batch.
    """
    found: dict[tuple[int, ...], list[tuple[Tensor, str, bool]]] = {}
    for group in groups:
        if group["algorithm"] != "muon":
            continue
        names = _carried_names(group)
        for p in group["params"]:
            layout, known_of_p = Layout.of(p), state.get(p, {})
            is_shared = layout is not None and len(layout.ranks) > 1
            if is_shared if shared is None else id(p) not in shared:
                continue
            for key, value in known_of_p.items():
                if name_of(key) in names and isinstance(value, Tensor):
                    part = local(value)
                    known = part.numel() > 0 and (part.is_meta or not bool(torch.isnan(part).all()))
                    known = known or _has_started(known_of_p)
                    ranks = (0,) if layout is None else layout.ranks
                    found.setdefault(ranks, []).append((p, key, known))
    for ranks, entries in found.items():
        flags = torch.tensor([int(known) for _, _, known in entries], device="cpu")
        for (p, key, _), known in zip(
            entries, collectives.largest_of_ranks(flags, ranks).tolist(), strict=True
        ):
            if not known:
                del state[p][key]


def _carried_names(group: Group) -> set[str]:
    """The names of what a Muon group's polar map and transform carry from step to step."""
    names = {*group["polar"].traits.carries}
    return names if group["transform"] is None else names | {*group["transform"].carries}


class Arrivals:
    """Notices a plain parameter's state that came without ``load_state_dict``.

    Such a state is a dict that no step of this optimizer has made. The next step reads its values once
    and drops the placeholders. If all dicts are the same as after the last step, nothing is read, as the
    host would wait for the GPU. Sharded parameters are left out: ranks would have to read their parts
    together.
    """

    def __init__(self) -> None:
        self._known: list[dict[str, Any] | None] = []

    def drop_placeholders(self, groups: list[Group], state: State) -> None:
        """Drop the placeholders in what came since the last step."""
        params = _carrying(groups)
        now = [state.get(p) for p in params]
        if len(now) == len(self._known) and all(map(operator.is_, now, self._known)):
            return
        seen = {id(each) for each in self._known}
        new = {
            p: its
            for p, its in zip(params, now, strict=True)
            if its and id(its) not in seen and not is_sharded(p)
        }
        drop_placeholders(groups, new)
        self._known = now

    def note(self, groups: list[Group], state: State) -> None:
        """Remember the dicts that a step has made, or a checkpoint whose placeholders are dropped."""
        self._known = [state.get(p) for p in _carrying(groups)]

    def note_first(self, groups: list[Group], state: State) -> None:
        """:meth:`note`, after a step that may have made a parameter's first state."""
        if None in self._known:
            self.note(groups, state)


def _carrying(groups: list[Group]) -> list[Tensor]:
    """The parameters of which a step carries something to the next."""
    return [
        p
        for group in groups
        if group["algorithm"] == "muon" and _carried_names(group)
        for p in group["params"]
    ]


def _has_started(known: dict[str, Any]) -> bool:
    """Whether this rank's part of the momentum has an entry other than zero."""
    stored = [known[name] for name in ("momentum_buffer", "momentum_scale") if name in known]
    return any(isinstance(each, Tensor) and bool((local(each) != 0).any()) for each in stored)
