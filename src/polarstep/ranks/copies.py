"""Notice parameters that are no copies of one another, or have other gradients, on some ranks.

A rank computes some matrices for all others, from its own gradients. So with ``process_group`` all ranks
must have the same parameters and the same gradients, as with DDP, and so must the copies of HSDP. If a
backward pass ran without DDP, or in ``no_sync()``, each rank would go on with a model of its own, in
silence.

Ranks compare a sum of each plain tensor once, at the first step and at the first after
``load_state_dict``, as the host has to wait for it. At every step they compare one parameter and its
gradient, each in its turn (:class:`Watch`): a backward pass without DDP's reductions leaves other
gradients of all parameters, so that the first of them shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polarstep.numerics import widest
from polarstep.ranks import collectives
from polarstep.ranks.layout import Layout, is_sharded, local
from polarstep.ranks.status import Common

__all__ = ["Watch", "words_of_differences"]

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
        sums = _usable(_sums(tensors).cpu())
        highest, lowest, norms = collectives.largest_of_ranks(sums, its.ranks).unbind()
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
    """The sum of each tensor, minus that sum, and the norm; zeros where there is none.

    The largest of the first two over ranks are the highest sum and minus the lowest.
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
    return torch.stack(found, dim=1)


def _usable(sums: Tensor) -> Tensor:
    """``sums`` in float64; a rank with a NaN has no part in what is compared: its sums are −∞."""
    return sums.double().nan_to_num(-torch.inf, torch.inf, -torch.inf)


# What a rank tells that has no part in a comparison: sums and norm of a value, and of a gradient.
_NOTHING = [-torch.inf] * 6


@dataclass
class _Looked:
    """The sums of one parameter and of its gradient, on their way to the host."""

    line: str
    sums: Tensor | None  # None: this rank has no copy of the part that is compared
    event: Any = None

    def told(self) -> list[float]:
        """The six numbers, on the host."""
        if self.sums is None:
            return _NOTHING
        if self.event is not None:
            self.event.synchronize()
        return [float(x) for x in _usable(self.sums).T.flatten()]


class Watch:
    """Compares one parameter, and its gradient, of those that several ranks hold as copies.

    The numbers are sent with the exchange that ends the next step, so that the host waits for no GPU.
    """

    def __init__(self) -> None:
        self._of: Sequence[Common] = ()
        self._copied: dict[tuple[int, ...], list[int]] = {}  # parameters of which there are copies
        self._looked: list[dict[tuple[int, ...], _Looked]] = [
            {},
            {},
        ]  # at the last step, and at this

    def look(
        self, common: Sequence[Common], layouts: Mapping[int, Layout], groups: Sequence[Any]
    ) -> None:
        """Begin to sum what is compared of this step, of which all ranks have the same number."""
        if common is not self._of:
            self._of, self._looked = common, [{}, {}]
            self._copied = {
                its.ranks: [i for i, p in enumerate(its.params) if layouts[id(p)].has_copies]
                for its in common
            }
        now = {}
        for its in common:
            copied = self._copied[its.ranks]
            if copied:
                turn, which = divmod(max(groups[i].get("step", 0) for i in its.groups), len(copied))
                index = copied[which]
                p = its.params[index]
                now[its.ranks] = _looked(its.lines[index], p, layouts[id(p)], turn)
        self._looked = [self._looked[1], now]

    def told(self) -> dict[tuple[int, ...], list[float]]:
        """What this rank tells each set of ranks of the step before."""
        return {
            its.ranks: self._looked[0][its.ranks].told()
            if its.ranks in self._looked[0]
            else _NOTHING
            for its in self._of
        }

    def words(self, largest: Mapping[tuple[int, ...], list[float]]) -> str | None:
        """What differs between ranks, in words; ``largest`` has the largest numbers of all ranks."""
        told = []
        for ranks, looked in self._looked[0].items():
            numbers = largest.get(ranks, _NOTHING)
            for what, (high, low, norm) in (("values", numbers[:3]), ("gradients", numbers[3:])):
                if high + low > PART_OF_NORM * norm:
                    told.append(f"the {what} of {looked.line}")
        return " and ".join(told) or None


def _looked(line: str, p: Tensor, layout: Layout, turn: int) -> _Looked:
    """Begin to sum the part of ``p`` whose ``turn`` it is; ranks that hold it as copies compare it."""
    parts = layout.parts
    if not parts or layout.boxes[layout.me] != parts[turn % len(parts)]:
        return _Looked(line, None)
    X, G = local(p).detach(), p.grad
    sums = torch.full((3, 2), -torch.inf, dtype=widest(X.device), device=X.device)
    sums[:, :1] = _sums([X])
    # A gradient that is placed otherwise is a sum that is still to be made.
    if G is not None and getattr(G, "placements", None) == getattr(p, "placements", None):
        sums[:, 1:] = _sums([local(G)])
    if X.device.type != "cuda":
        return _Looked(line, sums.cpu())
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    host.copy_(sums, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(X.device))
    return _Looked(line, host, event)
