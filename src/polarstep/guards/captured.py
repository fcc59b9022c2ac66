"""What a step cannot do while a CUDA graph of the user's own captures it.

A replay repeats the captured kernels and runs no Python. So a captured step must not decide anything
that may come out differently at the next step, nor do anything that may be done only once.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from polarstep.bucket import members_of
from polarstep.groups import Group
from polarstep.others import ELEMENTWISE
from polarstep.ranks.unstarted import has_ranks
from polarstep.state import State
from polarstep.stepping.collect import Work

__all__ = ["check_draws", "check_started", "refuse_measuring", "refuse_shared"]


def refuse_shared() -> NoReturn:
    """Raise for a step that ranks share."""
    raise RuntimeError(
        "a step that ranks share is being captured in a CUDA graph: expected it outside, as the "
        "ranks must agree at every step on which gradients are there; capture forward and backward alone"
    )


def refuse_measuring(groups: list[Group]) -> NoReturn:
    """Raise for ``groups`` whose rate is still to be measured, which reads their entries."""
    raise RuntimeError(
        f"the rate of group {groups[0]['name']!r} is not measured yet, and a step is being captured in "
        "a CUDA graph: expected a step with lr above zero before the capture, on a side stream, as "
        "torch's notes on CUDA graphs do"
    )


def check_started(works: list[Work], state: State) -> None:
    """Raise if a graph captures the creation of a state, which every replay would repeat."""
    for work in works:
        for name, p in zip(work.names, work.params, strict=True):
            if not state.get(p) and not _needs_no_state(work, p):
                raise RuntimeError(
                    f"the first step of {name} is being captured in a CUDA graph, and every replay "
                    "would start from a state of zeros; call step() a few times before the capture, on "
                    "a side stream, as torch's notes on CUDA graphs do"
                )


def _needs_no_state(work: Work, p: Tensor) -> bool:
    rule = ELEMENTWISE.get(work.group["algorithm"])
    return rule is not None and not rule.new_state(p)


def check_draws(works: list[Work], state: State) -> None:
    """Raise if a graph captures random numbers while there are other ranks.

    In a graph the numbers come from torch's default generator, which each rank may seed differently.
    Copies of a parameter (DDP) would then take different steps and drift apart.
    """
    if not has_ranks():
        return
    ranks = torch.distributed.get_world_size()
    if ranks == 1:
        return
    for work in works:
        for index, name in enumerate(work.names):
            for signature, _ in members_of(work, index, state):
                if signature.drawn_at(signature.step)[0] is not None:
                    raise RuntimeError(
                        f"a step of {name} with {signature.polar} is being captured in a CUDA graph on "
                        f"one of {ranks} ranks: expected a map that draws no random numbers, as in a "
                        "graph each rank draws its own and copies of a parameter would drift apart; "
                        "capture forward and backward alone, or take a map like NewtonSchulz"
                    )
