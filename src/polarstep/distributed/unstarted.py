"""Parameters that never had a gradient, in checkpoints of ``torch.distributed.checkpoint``.

Such a parameter has no state. But torch asks for the same entries on saving and on loading, and makes
the entries for loading by a step with gradients of zero. So a checkpoint that is made where
torch.distributed is initialized has entries for every parameter: zeros for momenta and averages, which
is what they start from, and NaN for what a map carries. On loading, a carry of nothing but NaN is
dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polarstep.distributed import carries, wire
from polarstep.distributed.layout import Layout, is_sharded, local, wrapped
from polarstep.distributed.local import is_cut
from polarstep.optim.carried import entry
from polarstep.optim.collect import State, Work, members_of
from polarstep.optim.groups import ELEMENTWISE, Group, view_of
from polarstep.optim.low_precision import keep_momentum, momentum_of, stored_dtype

__all__ = ["drop_placeholders", "placeholders"]


def placeholders(group: Group, p: Tensor) -> dict[str, Any]:
    """The entries that stand for the state of ``p``, which never had a gradient."""
    if group["algorithm"] in ELEMENTWISE:
        return dict(ELEMENTWISE[group["algorithm"]].new_state(p))
    found: dict[str, Any] = {}
    kept = stored_dtype(group, p)
    keep_momentum(momentum_of(p, found, kept), found, kept)
    work = Work(group, [""], [p], [p], None, [view_of(group, p)])
    for signature, member in members_of(work, 0, {}):
        for name, shape in carries.shapes_of(signature, signature.dtype).items():
            found[entry(name, member.block)] = _nothing(p, member.count, shape)
    return found


def _nothing(p: Any, count: int, shape: tuple[int, ...]) -> Tensor:
    """A carry of NaN, in parts where ``p`` is in parts."""
    if not is_sharded(p):
        return torch.full((count, *shape), torch.nan, dtype=p.dtype, device=p.device)
    layout = Layout.of(p)
    assert layout is not None
    batched = is_cut(p) and layout.cut == (0,) and len(layout.shape) == 3
    placements = p.placements if batched else carries.placements(p, count, shape)
    box = Layout.of_placements(p.device_mesh, placements, (count, *shape))
    mine = [stop - start for start, stop in box.boxes[box.me]]
    part = torch.full(mine, torch.nan, dtype=p.dtype, device=p.device)
    return wrapped(part, p, placements, (count, *shape))


def drop_placeholders(groups: list[Group], state: State) -> None:
    """Remove carries of nothing but NaN; ranks that share a parameter decide together."""
    found: dict[tuple[int, ...], list[tuple[Tensor, str, bool]]] = {}
    for group in groups:
        if group["algorithm"] != "muon":
            continue
        names = {*group["polar"].carries}
        if group["transform"] is not None:
            names |= {*group["transform"].carries}
        for p in group["params"]:
            layout = Layout.of(p)
            for key, value in state.get(p, {}).items():
                if key.partition(".")[0] in names and isinstance(value, Tensor):
                    part = local(value)
                    known = not bool(torch.isnan(part).all()) if part.numel() else False
                    ranks = (0,) if layout is None else layout.ranks
                    found.setdefault(ranks, []).append((p, key, known))
    for ranks, entries in found.items():
        flags = torch.tensor([int(known) for _, _, known in entries], dtype=torch.int64)
        for (p, key, _), known in zip(
            entries, wire.largest(flags, ranks, on_host=True).tolist(), strict=True
        ):
            if not known:
                del state[p][key]
