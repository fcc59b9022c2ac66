"""One learning rate for a whole model: a group's rate is ``lr`` · ``lr_factor``.

All groups of :func:`polarstep.muon_for` have the same ``lr``, which schedules and loops may change. What
a role needs beside it lies in the group's ``lr_factor``:

* hidden matrices: 1, times the factor of their shape (``shape_scale``);
* embeddings, heads, routers and other matrices that go to a rule without a rate of its own, as
  ``AdamW()``: :data:`PER_SIZE` times the root mean square (RMS) of their entries. Each embedding and
  each head is a group by itself; other matrices of one role and one shape share a group;
* vectors, and matrices that begin at zero or close to it: :data:`FIXED`;
* with ``shape_scale="rms"``, where ``lr`` is a rate as AdamW has it: 1 for all of these;
* a rule with a rate of its own, as ``AdamW(lr=1e-3)``: that rate divided by ``lr``.

An AdamW step changes an entry by about its rate, so the rate should be in proportion to the entries.
The RMS is that of the whole parameter when its first step with a rate above zero is taken. Before, a
parameter may lie on meta, be a shard, or wait for its checkpoint. A group that has not been measured yet
has ``lr_factor=None``. A checkpoint holds the factor, and nothing is measured twice.

Weight decay follows ``lr`` alone: in every group a step takes ``lr · weight_decay`` of each entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polarstep.checked_values import is_number
from polarstep.elementwise_rule import Elementwise, group_of
from polarstep.ranks import collectives
from polarstep.ranks.layout import Layout, local

__all__ = [
    "FIXED",
    "PER_SIZE",
    "as_rule_sees",
    "beside",
    "in_proportion",
    "measure",
    "measured_factor",
    "to_be_measured",
    "usual_factor",
]

Group = dict[str, Any]

PER_SIZE = 7.5
"""Of a measured group: ``lr_factor`` per RMS. At lr = 0.02 the rate is 0.15 × RMS."""
FIXED = 0.15
"""``lr_factor`` of vectors and of zeros: 3e-3 at lr = 0.02, as of entries with an RMS of 0.02."""
LEAST = 0.002
"""An RMS below this counts as zero: it does not say yet which size the entries will have."""
DIGITS = 3
"""Of a measured RMS. With all digits it would depend on the order of the sum, and so on the ranks."""


def beside(rule: Elementwise, lr: float | Tensor, factor: float | None) -> Group:
    """The options of a group that ``rule`` updates in an optimizer whose learning rate is ``lr``.

    ``factor`` is for a rule without a rate of its own; ``None`` if it is still to be measured.

    >>> from polarstep import SGD
    >>> beside(SGD(lr=0.1), 0.02, None)["lr_factor"]
    5.0
    """
    options = group_of(rule)
    if options["lr"] is None:
        return options | {"lr": lr, "lr_factor": factor}
    return in_proportion(options, lr, f"{type(rule).__name__}(lr={options['lr']:g})")


def usual_factor(shape_scale: object, *, has_size: bool = False) -> float | None:
    """The factor for a rule without a rate of its own; ``has_size``: whether it is a matrix.

    ``None`` if the entries are to be measured.
    """
    if shape_scale == "rms":
        return 1.0
    return None if has_size else FIXED


def in_proportion(options: Group, lr: float | Tensor, title: str) -> Group:
    """``options`` with a rate of their own, in an optimizer whose learning rate is ``lr``.

    ``title`` is how the caller has written them. Their weight decay is at their own rate.

    >>> in_proportion({"lr": 0.1, "weight_decay": 0.5}, 0.02, "the group")
    {'lr': 0.02, 'weight_decay': 2.5, 'lr_factor': 5.0}
    """
    own, base = float(options["lr"]), float(lr)
    if own and not base:
        raise ValueError(
            f"{title} beside lr={base:g}: expected an lr above zero, as each rate is kept in proportion "
            "to it; give an lr, or leave out this one"
        )
    factor = own / base if own else 0.0
    options = options | {"lr": lr, "lr_factor": options.get("lr_factor", 1.0) * factor}
    if is_number(options.get("weight_decay")):
        options["weight_decay"] *= factor
    return options


def as_rule_sees(group: Group) -> Group:
    """``group`` as the ``update`` of its rule reads it: with the rate of this group, and its decay."""
    lr, factor = group["lr"], group["lr_factor"]
    if factor is None:  # not measured, so lr is zero or nothing has entries
        factor = 1.0
    seen = group | {"lr": lr * factor}
    if factor and is_number(group.get("weight_decay")):
        seen["weight_decay"] = group["weight_decay"] / factor
    return seen


def to_be_measured(groups: Iterable[Group]) -> list[Group]:
    """The groups whose factor this step has to measure; it waits where the rate is zero.

    ``torch.distributed.checkpoint`` steps an optimizer at a rate of zero, before anything is loaded.
    Parameters on the meta device have no entries to measure.
    With ``ZeroRedundancyOptimizer`` a group may be empty on this rank.
    """
    return [
        group
        for group in groups
        if group["lr_factor"] is None and any(p.numel() and not p.is_meta for p in group["params"])
        if isinstance(group["lr"], Tensor) or group["lr"] > 0
    ]


def measure(groups: Sequence[Group]) -> list[Group]:
    """Set ``lr_factor`` in ``groups`` by the RMS of their entries, over all parts of sharded parameters.

    All ranks that have parts of a parameter call this together. Returns the groups that are not zeros.
    """
    sums = dict[int, float]()
    apart = dict[tuple[int, ...], list[tuple[Tensor, Layout]]]()
    for p in (p for group in groups for p in group["params"]):
        layout = Layout.of(p)
        sums[id(p)] = _sum_of_squares(local(p).detach())
        if layout is not None and len(layout.ranks) > 1:
            apart.setdefault(layout.ranks, []).append((p, layout))
    for ranks, those in apart.items():
        # A part that several ranks hold counts once.
        shares = [sums[id(p)] / its.boxes.count(its.boxes[its.me]) for p, its in those]
        total = torch.tensor(shares, dtype=torch.float64, device="cpu")
        dist.all_reduce(total, group=collectives.side_group_of(ranks))
        sums |= zip((id(p) for p, _ in those), total.tolist(), strict=True)
    sized = []
    for group in groups:
        entries = sum(p.numel() for p in group["params"])
        rms = math.sqrt(sum(sums[id(p)] for p in group["params"]) / entries)
        group["lr_factor"] = FIXED
        if LEAST <= rms < math.inf:
            group["lr_factor"] = PER_SIZE * float(f"{rms:.{DIGITS}g}")
            sized.append(group)
    return sized


def measured_factor(group: Group) -> float | None:
    """The measured factor of a loaded group; ``None`` if it is not measured, or was given to zeros."""
    return None if group["lr_factor"] == FIXED else group["lr_factor"]


def _sum_of_squares(X: Tensor) -> float:
    """‖X‖²_F, summed in float64; the host waits for it."""
    return float(torch.linalg.vector_norm(X, dtype=torch.float64)) ** 2
