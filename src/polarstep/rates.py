"""How far a group moves: its rate is ``lr`` · ``lr_factor``, and a matrix's also · scale(m, n).

**One learning rate for a whole model.** All groups of :func:`polarstep.muon_for` have the same ``lr``,
which schedules and loops may change. What a role needs beside it lies in the group's ``lr_factor``:

* hidden matrices: 1, times the factor of their shape (``shape_scale``). With ``"fan-ratio"`` the inputs
  of a convolution count by its channels: its factor is the square root of the positions of its kernel;
* embeddings, routers and other matrices that go to a rule without a rate of its own, as ``AdamW()``:
  :data:`PER_SIZE` times the root mean square (RMS) of their entries. Each embedding and each head is a
  group by itself; other matrices of one role and one shape share a group;
* heads: the same times √(768/n) for n inputs, and n at least 128 (:func:`per_size`);
* vectors, and matrices that begin at zero or close to it: :data:`FIXED`;
* with ``shape_scale="rms"``, where ``lr`` is a rate as AdamW has it: 1 for all of these;
* a rule with a rate of its own, as ``AdamW(lr=1e-3)``: that rate divided by ``lr``.

An AdamW step changes an entry by about its rate, so the rate should be in proportion to the entries.
The RMS is that of the whole parameter when its first step with a rate above zero is taken. Before, a
parameter may lie on meta, be a shard, or wait for its checkpoint. A group that has not been measured yet
has ``lr_factor=None``. A checkpoint holds the factor, and nothing is measured twice.

Weight decay follows ``lr`` alone: in every group a step takes ``lr · weight_decay`` of each entry.

**Matrices of all shapes.** T(M) has singular values near one whatever the shape of M, so the step η·T
changes a layer's output by an amount that depends on the shape. A scale, a factor on η, makes up for
that. ``"fan-ratio"`` is √(m/n), for outputs m and inputs n of a layer. An input x whose entries have an
RMS of one is √n long, and an update η·√(m/n)·T changes the output by at most η√m: by an RMS of η,
whatever the shape. ``"spectral"`` is the same for tall matrices, and 1 for wide matrices.

``"rms"`` is 0.2·√(mn)/‖T‖_F, with which the entries of an update have an RMS of 0.2. Sketched maps
compute ‖T‖_F at every step, from small matrices (``Polar.squared_norm``): a low-rank map ‖T‖_F = ‖Z‖_F
up to rounding, a deflated map an estimate. ‖T‖²_F counts as at least ℓ/9
(:func:`polarstep.maps.base.counted_norm`), so ``"rms"`` is::

    0.2·√(mn)/max(‖T‖_F, √ℓ/3) ≤ 3·0.2·√(mn/ℓ)

The RMS is 0.2 on every spectrum with ‖T‖²_F ≥ ℓ/9, and 0.6·‖T‖_F/√ℓ on others: spectra with fewer than
ℓ/9 directions, and spectra on which the inner map leaves most singular values far below one. Without the
bound, momentum of rank one would step √ℓ times as far along its one direction as other momentum steps
along each of its directions. With the bound it steps at most three times as far.

Full-space maps are taken to have ‖T‖²_F = min(m, n) (:meth:`polarstep.maps.Traits.rank_of`). So
``"rms"`` is 0.2·√max(m, n) for them, as in torch and Moonlight, whose runs can be continued. The RMS is
0.2 where the map lifts all singular values to one, and less where it does not. docs/coming-from.md has
the RMS that maps of both kinds reach, and docs/speed.md what ``"rms"`` costs a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from polarstep.checked_values import is_number
from polarstep.context import noting
from polarstep.maps import Polar, PolarMap
from polarstep.ranks import collectives
from polarstep.ranks.layout import Layout, local

__all__ = [
    "FIXED",
    "PER_SIZE",
    "RMS",
    "SCALES",
    "ShapeScale",
    "as_rule_sees",
    "at_assumed_norm",
    "corrected",
    "in_proportion",
    "measure",
    "measured_factor",
    "per_size",
    "resolve_scale",
    "to_be_measured",
    "to_norm",
    "usual_factor",
]

Group = dict[str, Any]
ShapeScale = Literal["none", "spectral", "fan-ratio", "rms"] | Callable[[int, int], float]

PER_SIZE = 7.5
"""Of a measured group: ``lr_factor`` per RMS. At lr = 0.02 the rate is 0.15 × RMS."""
HEAD_INPUTS = 768
"""The inputs of a head whose rate is that of an embedding with entries of the same RMS."""
FEWEST_INPUTS = 128
"""A head with fewer inputs has the rate of one with so many: 2.45 times that of an embedding."""
FIXED = 0.15
"""``lr_factor`` of vectors and of zeros: 3e-3 at lr = 0.02, as of entries with an RMS of 0.02."""
LEAST = 0.002
"""An RMS below this counts as zero: it does not say yet which size the entries will have."""
DIGITS = 3
"""Of a measured RMS. With all digits it would depend on the order of the sum, and so on the ranks."""
RMS = 0.2
"""The RMS of the entries of an update by ``"rms"``, in units of η, about as with AdamW."""


def usual_factor(shape_scale: object, *, has_size: bool = False) -> float | None:
    """The factor for a rule without a rate of its own; ``has_size``: whether it is a matrix.

    ``None`` if the entries are to be measured.
    """
    if shape_scale == "rms":
        return 1.0
    return None if has_size else FIXED


def per_size(group: Group) -> float:
    """``lr_factor`` per RMS of the entries: :data:`PER_SIZE`, of a head times √(768/n) for n inputs.

    A step of the size η changes each entry by about η. An output of a head changes by ηn times the size
    of its inputs, and begins at √n·RMS times this size. With η in proportion to RMS/√n, a step changes
    the outputs of a wide head and of a narrow one by the same part.

    >>> per_size({"role": "head", "params": [torch.empty(10, 192)]})
    15.0
    """
    if group["role"] != "head":
        return PER_SIZE
    inputs = math.prod(group["params"][0].shape[1:])
    return PER_SIZE * math.sqrt(HEAD_INPUTS / max(inputs, FEWEST_INPUTS))


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


def measure(groups: Sequence[Group], errors: list[Exception] | None = None) -> list[Group]:
    """Set ``lr_factor`` in ``groups`` by the RMS of their entries, over all parts of sharded parameters.

    All ranks that have parts of a parameter call this together; where ``errors`` is given, an error of
    this rank goes there, and its sum is NaN. Returns the groups that are not zeros.
    """
    sums = dict[int, float]()
    apart = dict[tuple[int, ...], list[tuple[Tensor, Layout]]]()
    for p in (p for group in groups for p in group["params"]):
        layout = Layout.of(p)
        sums[id(p)] = math.nan
        with noting(errors):
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
            group["lr_factor"] = per_size(group) * float(f"{rms:.{DIGITS}g}")
            sized.append(group)
    return sized


def measured_factor(group: Group) -> float | None:
    """The measured factor of a loaded group; ``None`` if it is not measured, or was given to zeros."""
    return None if group["lr_factor"] == FIXED else group["lr_factor"]


def _sum_of_squares(X: Tensor) -> float:
    """‖X‖²_F, summed in float64; the host waits for it."""
    return float(torch.linalg.vector_norm(X, dtype=torch.float64)) ** 2


def _none(m: int, n: int, rank: int) -> float:
    return 1.0


def _spectral(m: int, n: int, rank: int) -> float:
    return math.sqrt(max(1.0, m / max(n, 1)))


def _fan_ratio(m: int, n: int, rank: int) -> float:
    return math.sqrt(m / max(n, 1))


def _rms(m: int, n: int, rank: int) -> float:
    return RMS * math.sqrt(m * n / max(rank, 1))


SCALES: dict[str, Callable[[int, int, int], float]] = {
    # Equation (1) as it stands.
    "none": _none,
    # √max(1, m/n): tall layers step in proportion to the RMS of their output (Jordan et al. 2024).
    "spectral": _spectral,
    # √(m/n): wide layers as well (Bernstein and Newhouse 2024; dion's "spectral_norm").
    "fan-ratio": _fan_ratio,
    # 0.2·√(mn/‖T‖²_F), in full space 0.2·√max(m, n): the RMS of an update is 0.2, as with AdamW, so
    # AdamW's learning rate and weight decay are a first guess (Liu et al. 2025, Moonlight).
    "rms": _rms,
}


def resolve_scale(scale: ShapeScale) -> Callable[[int, int, int], float]:
    """The function (m, n, effective rank of T) ↦ factor for a name, or for a function of (m, n).

    >>> resolve_scale("spectral")(3072, 768, 768), resolve_scale("spectral")(768, 3072, 768)
    (2.0, 1.0)
    >>> resolve_scale("fan-ratio")(3072, 768, 768), resolve_scale("fan-ratio")(768, 3072, 768)
    (2.0, 0.5)
    >>> resolve_scale("rms")(100, 400, 100), resolve_scale("rms")(100, 400, 25)
    (4.0, 8.0)
    """
    if callable(scale):
        return lambda m, n, rank: _checked(scale, m, n)
    if scale not in SCALES:
        number = f"; a factor for a group is lr_factor={scale}" if is_number(scale) else ""
        raise ValueError(
            f"shape_scale={scale!r}: expected one of {', '.join(SCALES)}, or a function (m, n) → "
            f"factor{number}"
        )
    return SCALES[scale]


def _checked(scale: Callable[[int, int], float], m: int, n: int) -> float:
    """``scale(m, n)``; raises if it is negative, infinite or no number."""
    value = scale(m, n)
    if not is_number(value) or not 0 <= value < math.inf:
        raise ValueError(
            f"shape_scale({m}, {n}) is {value!r}: expected a finite number ≥ 0, the factor on lr for a "
            f"{m}×{n} matrix"
        )
    return value


def corrected(sizes: Tensor, polar: Polar, made_by: PolarMap) -> Tensor:
    """``sizes`` (batch, …), numbers or matrices, times √(effective rank)/‖T‖_F of each matrix.

    ``sizes`` are returned unchanged where the step does not know ‖T‖_F.
    """
    if polar.squared_norm is None:
        return sizes
    factor = _to_assumed(polar.squared_norm(), polar, made_by)
    return sizes * factor.to(sizes.dtype).reshape(-1, *[1] * (sizes.dim() - 1))


def to_norm(rank: int, squared: Tensor) -> Tensor:
    """√rank/‖T‖_F from ``squared`` = ‖T‖²_F, of shape (batch,); one where T is zero."""
    return torch.where(squared > 0, (rank / squared).sqrt(), 1)


def _to_assumed(squared: Tensor, polar: Polar, made_by: PolarMap) -> Tensor:
    """√effective rank / ‖T‖_F of each matrix, from ``squared`` = ‖T‖²_F."""
    return to_norm(made_by.traits.rank_of(*polar.M.shape[-2:]), squared)


def at_assumed_norm(polar: Polar, made_by: PolarMap) -> Polar:
    """T :func:`corrected` to ‖T‖²_F = the effective rank of its map, which the scale assumes."""
    if polar.squared_norm is None:
        return polar
    if polar.factors is not None:
        factor = _to_assumed(polar.squared_norm(), polar, made_by)
        return replace(polar, factors=polar.factors.times(factor), squared_norm=None)
    return replace(polar, T=corrected(polar.multiplied_out(), polar, made_by), squared_norm=None)
