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

import torch
from torch import Tensor

from polarstep.cuda_graphs import in_a_graph
from polarstep.distributed.layout import is_sharded, placed_like, whole
from polarstep.matrix import MatrixView
from polarstep.optim.stepping.collect import State, Work
from polarstep.optim.stepping.low_precision import keep_momentum, momentum_of

__all__ = ["EVERY", "FADED", "faded", "fading", "largest", "let_rest"]

EVERY = 64
FADED = 1e-6


def let_rest(works: list[Work], state: State) -> None:
    """Apply the rule to the momentum of every matrix, at every 64th step; nothing waits for a GPU.

    Inside a CUDA graph of the user's own every step applies it, as the graph repeats one step.
    """
    for work in works:
        fade = fading(work)
        for p, view in zip(work.params, work.views, strict=True):
            if fade is not None and "momentum_buffer" in state[p]:
                kept = state[p]["momentum_buffer"].dtype
                C = momentum_of(p, state[p], kept)
                _rest_if_faded(state[p], C, view, fade)
                keep_momentum(C, p, state[p], kept)


def fading(work: Work) -> float | None:
    """The factor on the peaks since the rule was last applied; ``None`` if this step skips it."""
    steps = 1 if in_a_graph() else EVERY
    if work.group["step"] % steps or work.group["step"] == 0:
        return None
    fade: float = work.group["momentum"] ** (steps / 2)
    return fade


def _rest_if_faded(
    of_parameter: dict[str, Tensor], buffer: Tensor, view: MatrixView, fade: float
) -> None:
    blocks = view.blocks(whole(buffer))
    flags = faded(of_parameter, torch.cat([largest(block) for block in blocks]), fade)
    if flags.device.type == "cpu" and not bool(flags.any()):
        return
    each = torch.split(flags, [len(block) for block in blocks])
    kept = [block.masked_fill(f[:, None, None], 0) for block, f in zip(blocks, each, strict=True)]
    C = view.assemble(kept, buffer.shape)
    buffer.copy_(placed_like(C, buffer) if is_sharded(buffer) else C)


def faded(of_parameter: dict[str, Tensor], most: Tensor, fade: float) -> Tensor:
    """Which matrices of a parameter rest, from ``most``, the largest entry of each; updates their peaks.

    The peaks start anew if the parameter is cut into other matrices than before, by other
    ``split_sizes``.
    """
    known = of_parameter.get("peak")
    if known is None or known.shape != most.shape:
        known = of_parameter["peak"] = torch.zeros_like(most)
    peak = torch.maximum(most, fade * known)
    # An infinite or NaN entry of C must not become the peak.
    known.copy_(torch.where(peak.isfinite(), peak, known))
    return most < (FADED * known).clamp_min(torch.finfo(known.dtype).tiny)


def largest(block: Tensor) -> Tensor:
    """The largest magnitude in each matrix of a block; on a CPU twenty times as fast as a norm."""
    if block.numel() == 0:
        return block.new_zeros(len(block))
    return torch.maximum(block.amax((-2, -1)), -block.amin((-2, -1)))
