"""Refuse a step on a parameter that has another shape than its state.

``resize_token_embeddings`` gives a parameter new data of another size, and a checkpoint may come from a
model with another vocabulary. torch's fused rules and our kernels take sizes from the parameter and
addresses from the state, so they would read and write beyond the state's memory. A parameter that was
transposed has as many entries as before, and each would be updated with the averages of another entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from polarstep.flattened import check_whole
from polarstep.groups import Group, named_params
from polarstep.others import ELEMENTWISE
from polarstep.ranks.layout import is_sharded

__all__ = ["Sizes", "check_shapes"]


class Sizes:
    """The shapes that parameters had when their state was last compared with them.

    Reading the shapes of the parameters is quick; every tensor of the state is compared only after some
    shape has changed. A ``DTensor`` has the shape of the whole parameter, and so has its state.
    """

    def __init__(self) -> None:
        self._known: list[torch.Size] = []

    def check(self, groups: Iterable[Group], state: Mapping[Tensor, dict[str, Any]]) -> None:
        """Raise for a parameter whose state has another shape, if some shape has changed."""
        groups = list(groups)
        shapes = [p.shape for group in groups for p in group["params"]]
        if shapes == self._known:
            return
        for group in groups:
            if group.get("algorithm") == "muon":
                check_whole(named_params(group))
            for name, p in named_params(group):
                check_shapes(name, p, state.get(p, {}), group)
        self._known = shapes


def check_shapes(name: str, p: Tensor, of_parameter: Mapping[str, Any], group: Group) -> None:
    """Raise for the first tensor in the state of ``p`` that has another shape than ``p``."""
    rule = ELEMENTWISE.get(group.get("algorithm", "muon"))
    for key in (*(("momentum_buffer",) if rule is None else rule.buffers), "rounding_error"):
        kept = of_parameter.get(key)
        if kept is not None and getattr(kept, "shape", None) != p.shape:
            found = tuple(kept.shape) if isinstance(kept, Tensor) else type(kept).__name__
            raise ValueError(
                f"{key} of {name} is {found}, and the parameter has shape {tuple(p.shape)}: expected "
                "the same shape. Either the parameter was resized after a step, as by "
                "resize_token_embeddings: make a new optimizer, or let this parameter start anew by "
                "optimizer.state.pop(parameter). Or the checkpoint is of another model, or of one whose "
                "parameters came in another order"
            )
        if kept is not None and is_sharded(kept) != is_sharded(p):
            which = ("a plain", "is sharded") if is_sharded(p) else ("a sharded", "is not sharded")
            raise ValueError(
                f"{key} of {name} is {which[0]} tensor, and the parameter {which[1]}: expected both "
                "alike. A plain state_dict() goes between optimizers of one sharding; for others take "
                "get_optimizer_state_dict and set_optimizer_state_dict of "
                "torch.distributed.checkpoint.state_dict, with "
                "StateDictOptions(full_state_dict=True) where one side is not sharded"
            )
