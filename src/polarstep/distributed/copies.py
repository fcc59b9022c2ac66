"""Notice plain parameters that are no copies of one another, or have other gradients, on some ranks.

A rank computes some matrices for all others, from its own gradients. So with ``process_group`` all ranks
must have the same parameters and the same gradients, as with DDP. Without DDP, or where the last
backward pass ran in ``no_sync()``, each rank would go on with a model of its own, in silence.

Ranks compare a sum of each tensor once, at the first step and at the first after ``load_state_dict``,
as the host has to wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from polarstep.distributed import wire
from polarstep.distributed.layout import is_sharded
from polarstep.distributed.status import Common
from polarstep.float64 import widest

__all__ = ["words_of_differences"]

# Sums of equal tensors differ by rounding alone, on machines of several kinds. Sums of n independent
# entries of one size differ by about √(2n) entries, and the norm is √n entries.
PART_OF_NORM = 0.02
SHOWN = 3


def words_of_differences(common: Sequence[Common], among: set[int]) -> str | None:
    """What differs between ranks, in words, of the plain parameters whose ids are in ``among``.

    All ranks must call it together, and all of them get the same words.
    """
    found: dict[str, list[str]] = {"values": [], "gradients": []}
    for its in common:
        plain = [i for i, p in enumerate(its.params) if id(p) in among and not is_sharded(p)]
        if not plain:
            continue
        params = [its.params[i] for i in plain]
        mine = _sums([p.detach() for p in params]), _sums([p.grad for p in params])
        of_each: list[tuple[list[list[float]], list[list[float]]] | None]
        of_each = [None for _ in its.ranks]
        dist.all_gather_object(of_each, mine, group=wire.side_group_of(its.ranks))
        for what, of_ranks in zip(found, zip(*filter(None, of_each), strict=True), strict=True):
            for i, pairs in zip(plain, zip(*of_ranks, strict=True), strict=True):
                sums, norms = zip(*pairs, strict=True)
                if max(sums) - min(sums) > PART_OF_NORM * max(norms):
                    found[what].append(its.lines[i])
    told = [
        f"the {what} of {', '.join(those[:SHOWN])}"
        + f" and {len(those) - SHOWN} more" * (len(those) > SHOWN)
        for what, those in found.items()
        if those
    ]
    return " and ".join(told) or None


def _sums(tensors: Sequence[Tensor | None]) -> list[list[float]]:
    """The sum of the entries and the norm of each tensor; zeros where there is none."""
    sums: list[list[float]] = []
    for X in tensors:
        if X is None:
            sums.append([0.0, 0.0])
            continue
        wide = widest(X.device)
        norm = torch.linalg.vector_norm(X, dtype=wide)
        sums.append([float(X.sum(dtype=wide)), float(norm)])
    return sums
