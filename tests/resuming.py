"""A run that goes on beside its copy, which started from a checkpoint of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import polarstep as ps


def gone_on_beside(
    params: list[Tensor],
    opt: ps.Muon,
    groups: Callable[[list[Tensor]], Any],
    set_gradients: Callable[[list[Tensor], int], None],
    steps: Iterable[int],
    **options: Any,
) -> list[Tensor]:
    """Run both through ``steps``; the parameters of the copy, made of ``groups`` with ``options``."""
    copies: list[Tensor] = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = ps.Muon(groups(copies), **options)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for step in steps:
        for these, optimizer in ((params, opt), (copies, resumed)):
            set_gradients(these, step)
            optimizer.step()
    return copies
