"""The rule of :mod:`polarstep.optim.stepping.resting` for matrices of which each rank has a part.

The rule compares the largest entry of the momentum C with a peak. Each rank finds the largest entry of
its part, and a small exchange gives all ranks of a matrix the largest entry of the whole. So they set
C ← 0 at the same step, and have the same peaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polarstep.distributed import wire
from polarstep.distributed.layout import Layout, local, whole
from polarstep.distributed.spread import Part, part_of
from polarstep.optim.stepping.collect import Member, State, Work
from polarstep.optim.stepping.low_precision import keep_momentum, momentum_of
from polarstep.optim.stepping.resting import faded, fading, largest

__all__ = ["let_parts_rest"]


def let_parts_rest(
    works: list[Work], layout_of: Callable[[Tensor], Layout | None], state: State
) -> None:
    """Apply the rule to the matrices of ``works``, whose parts lie where ``layout_of`` says."""
    looked: list[tuple[Tensor, Layout, Work, int, Tensor]] = []
    for work in works:
        if fading(work) is None:
            continue
        for i, p in enumerate(work.params):
            layout = layout_of(p)
            assert layout is not None
            if "momentum_buffer" in state[p] and layout.pieces(work.views[i]) is not None:
                looked.append((p, layout, work, i, _largest(work, i, layout, state)))
    alike: dict[Any, list[tuple[Tensor, Layout, Work, int, Tensor]]] = {}
    for each in looked:
        key = (each[1].ranks, each[-1].dtype, each[-1].device)
        alike.setdefault(key, []).append(each)
    for (ranks, _, _), together in alike.items():
        packed = wire.largest(torch.cat([each[-1] for each in together]), ranks)
        sizes = [len(each[-1]) for each in together]
        for (p, layout, work, i, _), most in zip(together, torch.split(packed, sizes), strict=True):
            fade = fading(work)
            assert fade is not None
            if "peak" in state[p]:  # another plan may have left the peaks in parts
                state[p]["peak"] = whole(state[p]["peak"])
            flags = faded(state[p], most, fade)
            _mask(work, i, layout, state, flags)


def _blocks(work: Work, index: int) -> list[tuple[Member, int]]:
    """The matrices of a parameter, as a block and an index in the block."""
    shapes = work.views[index].shapes
    return [
        (Member(work, index, block), k)
        for block, (count, _, _) in enumerate(shapes)
        for k in range(count)
    ]


def _parts_here(
    work: Work, index: int, layout: Layout, C: Tensor
) -> tuple[Tensor, list[Part | None]]:
    """This rank's part of C, as (batch, rows, columns), and where each matrix lies in it."""
    pieces = layout.pieces(work.views[index])
    assert pieces is not None
    mine = pieces[layout.me]
    parts = [part_of(mine, member, k) for member, k in _blocks(work, index)]
    return C.reshape(mine.shape), parts


def _momentum_here(work: Work, index: int, state: State) -> Tensor:
    p = work.params[index]
    return local(momentum_of(p, state[p], state[p]["momentum_buffer"].dtype))


def _largest(work: Work, index: int, layout: Layout, state: State) -> Tensor:
    """The largest magnitude of this rank's part of each matrix of C."""
    C, parts = _parts_here(work, index, layout, _momentum_here(work, index, state))
    most = C.new_zeros(len(parts))
    for i, part in enumerate(parts):
        if part is not None:
            most[i] = largest(C[part.batch, slice(*part.rows)][None])[0]
    return most


def _mask(work: Work, index: int, layout: Layout, state: State, flags: Tensor) -> None:
    """C ← 0 for this rank's parts of the matrices that rest."""
    kept = _momentum_here(work, index, state)
    C, parts = _parts_here(work, index, layout, kept)
    for flag, part in zip(flags, parts, strict=True):
        if part is not None:
            C[part.batch, slice(*part.rows)].masked_fill_(flag, 0)
    if C.data_ptr() != kept.data_ptr():  # a copy, as of a filter in channels_last
        kept.copy_(C.view(kept.shape))
    p = work.params[index]
    keep_momentum(kept, p, state[p], state[p]["momentum_buffer"].dtype)
