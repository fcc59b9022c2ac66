"""What a step of a sketched map leaves for the next ones, in the optimizer's state.

A warm sketch leaves what the next one starts from, and a basis that is kept is left as it is. Both are
there per parameter and block, so that a checkpoint has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep.cuda_graphs import in_a_graph
from polarstep.optim.work import Placed, State
from polarstep.polar import LowRank
from polarstep.polar.base import Kept, PolarMap
from polarstep.sharded import whole
from polarstep.sketch.warm import Start

__all__ = ["basis_key", "kept_key", "remember", "start_entries", "start_of", "whitening_key"]


def basis_key(block: int) -> str:
    """Where the state of a parameter keeps S of a warm sketch for its ``block``-th block."""
    return "basis" if block == 0 else f"basis.{block}"


def whitening_key(block: int) -> str:
    """Where it keeps V, if there is one."""
    return "whitening" if block == 0 else f"whitening.{block}"


def kept_key(block: int) -> str:
    """Where it keeps a basis for the next steps."""
    return "kept" if block == 0 else f"kept.{block}"


def start_entries(block: int, start: Start | Kept) -> tuple[tuple[str, Tensor | None], ...]:
    """What the state of a parameter has of a start: keys, and what belongs there."""
    if isinstance(start, Kept):
        return ((kept_key(block), start.Qt),)
    return (basis_key(block), start.S), (whitening_key(block), start.V)


def start_of(
    members: list[Placed], state: State, polar_map: PolarMap, numbers: Tensor | None
) -> Start | Kept | None:
    """What earlier steps have left for this one; ``numbers`` are those of a warm sketch."""
    if polar_map.is_warm:
        assert numbers is not None
        return _recall(members, state, polar_map, numbers)
    if polar_map.keeps_basis:
        return _kept(members, state, polar_map)
    return None


def _kept(members: list[Placed], state: State, polar_map: PolarMap) -> Kept | None:
    """The bases of a bucket, unless it is time for new ones or one of them is missing."""
    assert isinstance(polar_map, LowRank)
    # A graph of somebody's own repeats one step for ever, and should not be one without a new basis.
    if in_a_graph() or polar_map.makes_basis(members[0][0].group["step"]):
        return None
    known = []
    for work, i, j, block in members:
        Qt = state[work.params[i]].get(kept_key(j))
        if Qt is None or Qt.shape != (len(block), polar_map.width, min(block.shape[-2:])):
            return None
        known.append(Qt)
    return Kept(torch.cat(known))  # a copy: who looks at a step must not see the basis change


def _recall(
    members: list[Placed], state: State, polar_map: PolarMap, numbers: Tensor
) -> Start | None:
    """What the last step of every matrix of a bucket left; a Gaussian sketch for new ones.

    One of another width counts for none: somebody has changed the rank since.
    """
    assert isinstance(polar_map, LowRank)
    starts, none_known = list[Start](), True
    for work, i, j, block in members:
        of_parameter = state[work.params[i]]
        basis, whitening = of_parameter.get(basis_key(j)), of_parameter.get(whitening_key(j))
        shape = (len(block), polar_map.width, max(block.shape[-2:]))
        if basis is None or basis.shape != shape:
            starts.append(Start(numbers.mT.to(block.dtype).expand(shape)))
        else:
            starts.append(Start(basis, whitening))
            none_known = False
    return None if none_known else Start.joined(starts)


def remember(members: list[Placed], state: State, start: Start | Kept) -> None:
    """Keep what the next step starts from, but where the parameter is skipped.

    In the parameter's own precision, to which torch casts what it loads from a checkpoint; and in
    one place, where somebody's own CUDA graph finds it at its next replay.
    """
    counts = [len(block) for *_, block in members]
    parts: list[Start | Kept] = [*start.split(counts)]
    for (work, i, j, _), part in zip(members, parts, strict=True):
        p = work.params[i]
        finite = None if work.finite is None else whole(work.finite[i])
        for key, value in start_entries(j, part):
            if value is None:
                state[p].pop(key, None)
                continue
            value, known = value.to(p.dtype), state[p].get(key)
            if known is None or (known.shape, known.dtype) != (value.shape, value.dtype):
                state[p][key] = value.clone(memory_format=torch.contiguous_format)
            elif finite is None:
                known.copy_(value)
            else:
                known.copy_(torch.where(finite, value, known))
