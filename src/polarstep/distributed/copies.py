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
        tensors = [p.detach() for p in params] + [p.grad for p in params]
        highest, lowest, norms = wire.largest_of_ranks(_sums(tensors), its.ranks).unbind()
        apart = (highest + lowest > PART_OF_NORM * norms).view(len(found), -1)
        for those, flags in zip(found.values(), apart.tolist(), strict=True):
            those += [its.lines[i] for i, flag in zip(plain, flags, strict=True) if flag]
    told = [
        f"the {what} of {', '.join(those[:SHOWN])}"
        + f" and {len(those) - SHOWN} more" * (len(those) > SHOWN)
        for what, those in found.items()
        if those
    ]
    return " and ".join(told) or None


def _sums(tensors: Sequence[Tensor | None]) -> Tensor:
    """The sum of each tensor, minus that sum, and the norm, on the host; zeros where there is none.

    The largest of the first two over ranks are the highest sum and minus the lowest. A rank with a NaN
    has no part in that: its sums are −∞.
    """
    device = next(X.device for X in tensors if X is not None)
    wide = widest(device)
    nothing = torch.zeros(3, dtype=wide, device=device)
    found = []
    for X in tensors:
        if X is None:
            found.append(nothing)
            continue
        s = X.sum(dtype=wide)
        found.append(torch.stack([s, -s, torch.linalg.vector_norm(X, dtype=wide)]).to(device))
    return torch.stack(found, dim=1).cpu().double().nan_to_num(-torch.inf, torch.inf, -torch.inf)
