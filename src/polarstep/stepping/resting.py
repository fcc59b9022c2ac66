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
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from polarstep.cuda_graphs import in_a_graph
from polarstep.matrix import MatrixView
from polarstep.ranks.layout import is_sharded, placed_like, whole
from polarstep.state import State, keep_momentum, momentum_of
from polarstep.stepping.collect import Work
from polarstep.stepping.magnitude import largest_of_each

__all__ = ["EVERY", "FADED", "faded", "fading", "let_rest", "peak_of"]

EVERY = 64
FADED = 1e-6


def let_rest(works: list[Work], state: State) -> None:
    """Apply the rule to the momentum of every matrix, at every 64th step; nothing waits for a GPU.

    Inside a CUDA graph of the user's own every step applies it, as the graph repeats one step. On a GPU
    it takes some twenty launches for all matrices, and one more for each parameter: it writes all of C,
    as the host does not know which matrices rest.
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
                X = whole(C)
                peak = peak_of(state[p], count, X)
                each = _Momentum(p, view, C, X, kept, peak)
                alike.setdefault((fade, C.dtype, C.device, peak.dtype), []).append(each)
    for (fade, *_), together in alike.items():
        blocks = [block for each in together for block in _matrices(each)]
        peaks = [each.peak for each in together]
        for each, flags in zip(together, faded(peaks, largest_of_each(blocks), fade), strict=True):
            if flags.device.type != "cpu" or bool(flags.any()):
                _set_to_zero(each, flags)
        for each in together:
            keep_momentum(each.C, each.p, state[each.p], each.kept)


class _Momentum(NamedTuple):
    """The momentum of a parameter, and the peaks of its matrices."""

    p: Tensor
    view: MatrixView
    C: Tensor
    X: Tensor  # C, gathered where it is sharded
    kept: torch.dtype  # the precision that the state keeps it in
    peak: Tensor


def fading(work: Work) -> float | None:
    """The factor on the peaks since the rule was last applied; ``None`` if this step skips it."""
    steps = 1 if in_a_graph() else EVERY
    if work.group["step"] % steps or work.group["step"] == 0:
        return None
    fade: float = work.group["momentum"] ** (steps / 2)
    return fade


def peak_of(of_parameter: dict[str, Tensor], count: int, C: Tensor) -> Tensor:
    """The peaks of the ``count`` matrices of a parameter, in its state; zero at first.

    They start anew if the parameter is cut into other matrices than before, by other ``split_sizes``.
    """
    known = of_parameter.get("peak")
    if known is None or known.shape != (count,):
        known = of_parameter["peak"] = C.new_zeros(count)
    return known


def faded(peaks: list[Tensor], most: Tensor, fade: float) -> tuple[Tensor, ...]:
    """Which matrices of each parameter rest, from ``most``, their largest entries; updates ``peaks``.

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
    X, view = momentum.X, momentum.view
    if view.is_cut:
        return view.blocks(X)
    return [X[None] if view.batch == 1 else X.flatten(0, -3)]


def _set_to_zero(momentum: _Momentum, flags: Tensor) -> None:
    """C ← 0 for the matrices whose flag is set, in place where the matrices are parts of C."""
    C, X, view = momentum.C, momentum.X, momentum.view
    if X is C and not view.is_cut:
        batch = (*C.shape[:-2], 1, 1) if view.batch > 1 else ()
        C.masked_fill_(flags.view(batch), 0)
        return
    blocks = view.blocks(X)
    parts = [part[:, None, None] for part in torch.split(flags, [len(block) for block in blocks])]
    if X is C and all(_is_part(block, of=C) for block in blocks):
        for block, part in zip(blocks, parts, strict=True):
            block.masked_fill_(part, 0)
        return
    kept = [block.masked_fill(part, 0) for block, part in zip(blocks, parts, strict=True)]
    X = view.assemble(kept, C.shape)
    C.copy_(placed_like(X, C) if is_sharded(C) else X)


def _is_part(X: Tensor, of: Tensor) -> bool:
    return X.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()
