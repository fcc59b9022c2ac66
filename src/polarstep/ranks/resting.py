"""The rule of :mod:`polarstep.stepping.resting` for matrices of which each rank has a part.

The rule compares the largest entry of the momentum C with a peak. Each rank finds the largest entry of
its part, and a small exchange gives all ranks of a matrix the largest entry of the whole. So they set
C ← 0 at the same step, and have the same peaks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polarstep.bucket import Member
from polarstep.ranks import collectives
from polarstep.ranks.layout import Layout, local, whole
from polarstep.ranks.spread import Part, part_of
from polarstep.state import State, keep_momentum, momentum_of
from polarstep.stepping.collect import Work
from polarstep.stepping.magnitude import largest
from polarstep.stepping.resting import faded, fading, peak_of

__all__ = ["let_parts_rest"]


def let_parts_rest(
    works: list[Work], layout_of: Callable[[Tensor], Layout | None], state: State
) -> None:
    """Apply the rule to the matrices of ``works``, whose parts lie where ``layout_of`` says."""
    alike: dict[Any, list[_Looked]] = {}
    for work in works:
        if fading(work) is None:
            continue
        for i, p in enumerate(work.params):
            layout = layout_of(p)
            assert layout is not None
            if "momentum_buffer" in state[p] and layout.pieces(work.views[i]) is not None:
                here = _parts_of_momentum(work, i, layout, state)
                key = (layout.ranks, here[0].dtype, here[0].device)
                alike.setdefault(key, []).append(_Looked(work, i, layout, here))
    for (ranks, _, _), together in alike.items():
        packed = collectives.largest_of_ranks(
            largest([part for each in together for part in each.parts]), ranks
        )
        most_of_each = torch.split(packed, [len(each.parts) for each in together])
        by_fade: dict[tuple[float, torch.dtype], list[tuple[_Looked, Tensor, Tensor]]] = {}
        for each, most in zip(together, most_of_each, strict=True):
            fade, of_parameter = fading(each.work), state[each.work.params[each.at]]
            assert fade is not None
            if "peak" in of_parameter:  # another plan may have left the peaks in parts
                of_parameter["peak"] = whole(of_parameter["peak"])
            peak = peak_of(of_parameter, len(most), most)
            by_fade.setdefault((fade, peak.dtype), []).append((each, most, peak))
        for (fade, _), those in by_fade.items():
            peaks = [peak for _, _, peak in those]
            all_flags = faded(peaks, torch.cat([most for _, most, _ in those]), fade)
            for (each, _, _), flags in zip(those, all_flags, strict=True):
                _mask(each.work, each.at, each.layout, state, flags)


class _Looked(NamedTuple):
    """A parameter, and this rank's part of each of its matrices of C; empty where it has none."""

    work: Work
    at: int  # its index in the work
    layout: Layout
    parts: list[Tensor]


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


def _parts_of_momentum(work: Work, index: int, layout: Layout, state: State) -> list[Tensor]:
    C, parts = _parts_here(work, index, layout, _momentum_here(work, index, state))
    return [C.new_empty(0) if part is None else C[part.batch, slice(*part.rows)] for part in parts]


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
