"""Embeddings whose learning rate hardly moves them, as their entries begin at size one.

AdamW changes an entry by about its learning rate in a step. ``torch.nn.Embedding`` begins with entries
of size one, which a rate of 3e-4 changes by as much in some three thousand steps. ``docs/tuning.md``
says what that costs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polarstep.optim.elementwise import AdamW
from polarstep.optim.elementwise_rule import Elementwise

__all__ = ["hardly_moved"]

STEPS = 2000
"""An entry that needs more steps than this to change by its own size is said to hardly move."""
ROWS = 1024
"""The first rows are looked at; all rows of an embedding begin alike."""


def hardly_moved(p: Tensor, rule: Elementwise) -> str:
    """What the routes add to why an embedding has its rule; nothing where its rate is large enough.

    Nothing either of tensors of another class, as shards, which would say another thing on each rank,
    and fake tensors, which have no entries.
    """
    if not isinstance(rule, AdamW) or rule.lr == 0 or not p.numel():
        return ""
    if p.is_meta or type(p) not in (Tensor, nn.Parameter) or not p.is_floating_point():
        return ""
    rows = p.detach()[:ROWS].float()
    steps = float(torch.linalg.vector_norm(rows)) / rows.numel() ** 0.5 / float(rule.lr)
    if not steps > STEPS:
        return ""
    return f", its entries {float(f'{steps:.1g}'):,.0f} × lr: try embeddings=AdamW(lr=…)"
