"""What a map carries from step to step, spread over the ranks.

In the optimizer's state a carried tensor of a sharded parameter is a ``DTensor`` on the same mesh, cut
along its last dimension by every axis of the mesh that cuts the parameter. A checkpoint then holds the
whole tensor, and loads at another number of ranks. A tensor that another plan has stored in
another way is read as it is, and stored in this way by the next step.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polarstep.bucket import BucketKey, Draws, Member
from polarstep.maps import Draw, MapState
from polarstep.ranks.layout import Layout, is_sharded, local, whole, wrapped
from polarstep.state import State, entry, written_over

__all__ = ["after_zeros", "found", "placements", "put", "shapes_of", "spans"]

# Shapes of carries by map and shape of the matrices.
_SHAPES: dict[Any, dict[str, tuple[int, ...]]] = {}


def shapes_of(signature: BucketKey, dtype: torch.dtype) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that a step leaves for one matrix, from a step on a matrix of zeros."""
    its = signature
    if not its.polar.traits.carries:
        return {}
    key = (its.polar, its.m, its.n, its.device, dtype)
    if key not in _SHAPES:
        left = after_zeros(signature, dtype)
        _SHAPES[key] = {name: tuple(tensor.shape[1:]) for name, tensor in left.items()}
    return _SHAPES[key]


def after_zeros(signature: BucketKey, dtype: torch.dtype) -> MapState:
    """What the first step leaves for one matrix of zeros."""
    its = replace(signature, resumed=False)
    zero = torch.zeros(1, its.m, its.n, device=its.device, dtype=dtype)
    first = its.polar.init(1, its.m, its.n, its.device, dtype)
    _, left = its.polar.step(zero, first, Draw(Draws().numbers(its)))
    return left


def placements(p: Any, count: int, shape: tuple[int, ...]) -> list[Any]:
    """The placements of a carried tensor: cut along the last dimension by the axes that cut ``p``.

    A carry of one number per matrix, or of no matrices, is a whole copy on each rank.
    """
    from torch.distributed.tensor import Replicate, Shard

    if not shape or count == 0:
        return [Replicate()] * p.device_mesh.ndim
    return [Replicate() if each.is_replicate() else Shard(len(shape)) for each in p.placements]


def spans(p: Tensor, layout: Layout, count: int, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The part of a carried tensor's last dimension that each rank of ``layout`` holds."""
    last = shape[-1] if shape else 1
    if not is_sharded(p) or not shape:
        return [(0, last)] * len(layout.ranks)
    of_carry = Layout.of_placements(p.device_mesh, placements(p, count, shape), (count, *shape))
    return [box[-1] for box in of_carry.boxes]


def found(state: State, member: Member, name: str, shape: tuple[int, ...]) -> Tensor:
    """This rank's part of what the last step left under ``name``."""
    p, X = member.param, state[member.param][entry(name, member.block)]
    if not is_sharded(p):
        return whole(X)
    if is_sharded(X) and list(X.placements) == placements(p, member.count, shape):
        return local(X)
    layout = Layout.of(p)
    assert layout is not None
    start, stop = spans(p, layout, member.count, shape)[layout.me]
    return whole(X)[..., start:stop] if shape else whole(X)


def put(
    state: State,
    member: Member,
    name: str,
    shape: tuple[int, ...],
    part: Tensor,
    finite: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Store this rank's part for the next step; where ``finite`` is false the last step's part stays.

    The part is stored in ``dtype``, by default the precision of the parameter.
    """
    p, key = member.param, entry(name, member.block)
    known = state[p].get(key)
    part = part.to(p.dtype if dtype is None else dtype)
    ours: Tensor | None = known
    if is_sharded(p):
        placed = placements(p, member.count, shape)
        ours = None
        if is_sharded(known) and list(known.placements) == placed:
            ours = local(known)
        elif finite is not None and known is not None and known.shape == (member.count, *shape):
            last = found(state, member, name, shape)  # another plan has left it whole
            part = torch.where(finite, part, last.to(part.dtype))
    kept = written_over(ours, part, finite)
    if kept is not None:
        if is_sharded(p):
            kept = wrapped(kept, p, placed, (member.count, *shape))
        state[p][key] = kept
