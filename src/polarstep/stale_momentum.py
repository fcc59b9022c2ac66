"""Stop a matrix whose gradient has become zero, once its momentum has faded.

T(cM) = T(M), so a step is as long for faded momentum as for fresh momentum. After the gradient of a
matrix has become zero (an expert that no token reaches, a frozen branch), C shrinks by the factor β in
each step. Without a rule its parameter would take full steps until C underflows: two thousand at β =
0.95.

The rule: C ← 0 where the largest entry of C is below 1e-6 of a peak. The peak is the largest entry that
C has had. It fades by the factor √β in each step, half as fast as C without a gradient. So a matrix that
gets no gradient stops moving after 2·ln(1e-6)/ln β steps (540 at β = 0.95, 262 at 0.9) and at most 64
more, as the rule is applied at every 64th step. Momentum that falls by no more than √β in each step is
never touched, however far it falls, nor is momentum that comes back from a spike a trillion times its
size. If C falls below the smallest normal number of its precision, it counts as zero whatever its peak,
because β times such a number may round to the number itself, for ever.

Where ranks have parts of a matrix, each rank finds the largest entry of its part, and a small exchange
gives all of them the largest entry of the whole (:func:`reset_parts`). So they set C ← 0 at the
same step, and have the same peaks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from polarstep.bucket import Member
from polarstep.context import noting
from polarstep.gradients import Work, largest, largest_of_each
from polarstep.matrix import MatrixView
from polarstep.ranks import collectives
from polarstep.ranks.layout import Layout, local, whole
from polarstep.ranks.parts import Part, part_of
from polarstep.state import State, keep_momentum, momentum_of

__all__ = ["EVERY", "FADED", "reset", "reset_parts", "stop"]

if TYPE_CHECKING:
    from polarstep.ranks.exchange import Shares

EVERY = 64
FADED = 1e-6


def stop(works: list[Work], state: State, shares: Shares | None) -> None:
    """Apply the rule to the matrices of a step, also to those that this rank shares with others."""
    with noting(None if shares is None else shares.errors):
        reset(works, state)
    if shares is not None:
        reset_parts(shares.works, shares.layout_of, shares.state, shares.errors)


def reset(works: list[Work], state: State) -> None:
    """Apply the rule to every matrix that this rank holds whole; nothing waits for a GPU.

    On a GPU it takes some twenty launches for all matrices, and one more for each parameter: it writes
    all of C, as the host does not know which matrices are stale.
    """
    alike: dict[tuple[float, torch.dtype, torch.device, torch.dtype], list[_Momentum]] = {}
    for work in works:
        fade = fading(work)
        if fade is None:
            continue
        for p, view in zip(work.params, work.views, strict=True):
            if "momentum_buffer" in state[p]:
                kept = state[p]["momentum_buffer"].dtype
                C = momentum_of(p, state[p], kept)
                count = sum(batch for batch, _, _ in view.shapes)
                peak = _peak_of(state[p], count, C)
                each = _Momentum(p, view, C, kept, peak)
                alike.setdefault((fade, C.dtype, C.device, peak.dtype), []).append(each)
    for (fade, *_), together in alike.items():
        blocks = [block for each in together for block in _matrices(each)]
        peaks = [each.peak for each in together]
        for each, flags in zip(together, _faded(peaks, largest_of_each(blocks), fade), strict=True):
            if flags.device.type != "cpu" or bool(flags.any()):
                _set_to_zero(each, flags)
        for each in together:
            keep_momentum(each.C, each.p, state[each.p], each.kept)


def fading(work: Work) -> float | None:
    """The factor on the peaks since the rule was last applied; ``None`` if this step skips it.

    Inside a CUDA graph of the user's own every step applies it, as the graph repeats one step.
    """
    steps = 1 if work.captured else EVERY
    if work.group["step"] % steps or work.group["step"] == 0:
        return None
    fade: float = work.group["momentum"] ** (steps / 2)
    return fade


class _Momentum(NamedTuple):
    """The momentum of a parameter, and the peaks of its matrices."""

    p: Tensor
    view: MatrixView
    C: Tensor
    kept: torch.dtype  # the precision that the state keeps it in
    peak: Tensor


def _peak_of(of_parameter: dict[str, Tensor], count: int, C: Tensor) -> Tensor:
    """The peaks of the ``count`` matrices of a parameter, in its state; zero at first.

    They start anew if the parameter is cut into other matrices than before, by other ``split_sizes``.
    """
    known = of_parameter.get("peak")
    if known is None or known.shape != (count,):
        known = of_parameter["peak"] = C.new_zeros(count)
    return known


def _faded(peaks: list[Tensor], most: Tensor, fade: float) -> tuple[Tensor, ...]:
    """Which matrices of each parameter are stale, from their largest entries; updates ``peaks``.

    ``peaks`` has the peaks of each parameter, all in one precision, and ``most`` all matrices in turn.
    """
    known = torch.cat(peaks)
    peak = torch.maximum(most, fade * known)
    # An infinite or NaN entry of C must not become the peak.
    known = torch.where(peak.isfinite(), peak, known).to(known.dtype)
    counts = [len(each) for each in peaks]
    torch._foreach_copy_(peaks, torch.split(known, counts))
    return torch.split(most < (FADED * known).clamp_min(torch.finfo(known.dtype).tiny), counts)


def _matrices(momentum: _Momentum) -> list[Tensor]:
    """The matrices of C in batches, by as few views as there can be."""
    C, view = momentum.C, momentum.view
    if view.is_cut:
        return view.blocks(C)
    return [C[None] if view.batch == 1 else C.flatten(0, -3)]


def _set_to_zero(momentum: _Momentum, flags: Tensor) -> None:
    """C ← 0 for the matrices whose flag is set, in place where the matrices are parts of C."""
    C, view = momentum.C, momentum.view
    if not view.is_cut:
        batch = (*C.shape[:-2], 1, 1) if view.batch > 1 else ()
        C.masked_fill_(flags.view(batch), 0)
        return
    blocks = view.blocks(C)
    parts = [part[:, None, None] for part in torch.split(flags, [len(block) for block in blocks])]
    if all(_is_part(block, of=C) for block in blocks):
        for block, part in zip(blocks, parts, strict=True):
            block.masked_fill_(part, 0)
        return
    kept = [block.masked_fill(part, 0) for block, part in zip(blocks, parts, strict=True)]
    C.copy_(view.assemble(kept, C.shape))


def _is_part(X: Tensor, of: Tensor) -> bool:
    return X.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()


def reset_parts(
    works: list[Work],
    layout_of: Callable[[Tensor], Layout | None],
    state: State,
    errors: list[Exception],
) -> None:
    """Apply the rule to matrices in parts, whose layouts ``layout_of`` has; all ranks call together.

    An error goes to ``errors``. This rank's parts then count as infinite, which changes no matrix.
    """
    alike: dict[Any, list[_InParts]] = {}
    for work in works:
        if fading(work) is None:
            continue
        for i, p in enumerate(work.params):
            layout = layout_of(p)
            assert layout is not None
            if "momentum_buffer" in state[p] and layout.pieces(work.views[i]) is not None:
                kept = state[p]["momentum_buffer"].dtype
                dtype = torch.float32 if kept == torch.int8 else kept
                alike.setdefault((layout.ranks, dtype, p.device), []).append(
                    _InParts(work, i, layout)
                )
    for (ranks, dtype, device), together in alike.items():
        count = sum(each.matrices for each in together)
        most = torch.full((count,), torch.inf, dtype=dtype, device=device)
        with noting(errors):
            most = largest([part for each in together for part in _parts_of_C(each, state)])
        most = collectives.largest_of_ranks(most, ranks)
        for each in together:  # another plan may have left the peaks in parts
            if "peak" in state[each.p]:
                state[each.p]["peak"] = whole(state[each.p]["peak"])
        with noting(errors):
            _reset_stale(together, torch.split(most, [each.matrices for each in together]), state)


class _InParts(NamedTuple):
    """A parameter of whose matrices ranks have parts."""

    work: Work
    at: int  # its index in the work
    layout: Layout

    @property
    def p(self) -> Tensor:
        """The parameter."""
        return self.work.params[self.at]

    @property
    def matrices(self) -> int:
        """The number of its matrices."""
        return sum(count for count, _, _ in self.work.views[self.at].shapes)


def _reset_stale(together: list[_InParts], most_of_each: Sequence[Tensor], state: State) -> None:
    """Apply the rule to this rank's parts, given the largest entries of the whole matrices."""
    by_fade: dict[tuple[float, torch.dtype], list[tuple[_InParts, Tensor, Tensor]]] = {}
    for each, most in zip(together, most_of_each, strict=True):
        fade, peak = fading(each.work), _peak_of(state[each.p], each.matrices, most)
        assert fade is not None
        by_fade.setdefault((fade, peak.dtype), []).append((each, most, peak))
    for (fade, _), those in by_fade.items():
        peaks = [peak for _, _, peak in those]
        all_flags = _faded(peaks, torch.cat([most for _, most, _ in those]), fade)
        for (each, _, _), flags in zip(those, all_flags, strict=True):
            _mask(each, state, flags)


def _blocks(work: Work, index: int) -> list[tuple[Member, int]]:
    """The matrices of a parameter, as a block and an index in the block."""
    shapes = work.views[index].shapes
    return [
        (Member(work, index, block), k)
        for block, (count, _, _) in enumerate(shapes)
        for k in range(count)
    ]


def _parts_here(its: _InParts, C: Tensor) -> tuple[Tensor, list[Part | None]]:
    """This rank's part of C, as (batch, rows, columns), and where each matrix lies in it."""
    pieces = its.layout.pieces(its.work.views[its.at])
    assert pieces is not None
    mine = pieces[its.layout.me]
    parts = [part_of(mine, member, k) for member, k in _blocks(its.work, its.at)]
    return C.reshape(mine.shape), parts


def _momentum_here(p: Tensor, state: State) -> Tensor:
    return local(momentum_of(p, state[p], state[p]["momentum_buffer"].dtype))


def _parts_of_C(its: _InParts, state: State) -> list[Tensor]:
    """This rank's part of each matrix of C; empty where it has none."""
    C, parts = _parts_here(its, _momentum_here(its.p, state))
    return [C.new_empty(0) if part is None else C[part.batch, slice(*part.rows)] for part in parts]


def _mask(its: _InParts, state: State, flags: Tensor) -> None:
    """C ← 0 for this rank's parts of the stale matrices."""
    p = its.p
    kept = _momentum_here(p, state)
    C, parts = _parts_here(its, kept)
    for flag, part in zip(flags, parts, strict=True):
        if part is not None:
            C[part.batch, slice(*part.rows)].masked_fill_(flag, 0)
    if C.data_ptr() != kept.data_ptr():  # a copy, as of a filter in channels_last
        kept.copy_(C.view(kept.shape))
    keep_momentum(kept, p, state[p], state[p]["momentum_buffer"].dtype)
