"""The learning rates of a run, from which groups that are added later get theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from polarstep.optim.groups import Group

__all__ = ["Rates"]

MUON = ("muon", None)  # the key of Muon's rate, whatever the role


class Rates:
    """The learning rates with which groups were made, and the learning rates of a loaded checkpoint.

    A schedule multiplies all rates by one factor, which leaves their ratios as they are. So these are
    the rates before the schedule, which torch's schedulers keep as ``"initial_lr"``.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str | None], float] = {}  # by algorithm and role
        self._loaded: dict[tuple[str, str | None], float] = {}

    def made(self, groups: Iterable[Group]) -> None:
        """Note the rates of a new optimizer."""
        self._made = _rates(groups)

    def loaded(self, groups: Iterable[Group]) -> None:
        """Note the rates of a checkpoint, unless it was saved while Muon's rate was zero."""
        rates = _rates(groups)
        self._loaded = rates if rates.get(MUON) else {}

    def beside(self, lr: float, muon_default: float, group: Group) -> Any:
        """The rate for ``group`` of another rule, where Muon's parameters get the rate ``lr``.

        It is the rule's own rate times the ratio of ``lr`` to Muon's rate. If a checkpoint was loaded,
        both rates come from the checkpoint. Where Muon's rate is zero there is no ratio, and the rule
        keeps its own rate.
        """
        muon = self._loaded.get(MUON) or muon_default
        own = group["lr"]
        for key in ((group["algorithm"], group.get("role")), (group["algorithm"], None)):
            if self._made.get(key) and key in self._loaded:
                own = own * (self._loaded[key] / self._made[key])
                break
        return own * (lr / muon) if muon else own


def _rates(groups: Iterable[Group]) -> dict[tuple[str, str | None], float]:
    """The rate that most parameters have, by (algorithm, role) and by (algorithm, None) for any role."""
    counts: dict[tuple[str, str | None], Counter[float]] = {}
    for group in groups:
        rate = float(group["initial_lr" if "initial_lr" in group else "lr"])
        for key in {(group["algorithm"], group.get("role")), (group["algorithm"], None)}:
            counts.setdefault(key, Counter())[rate] += len(group["params"])
    return {key: count.most_common(1)[0][0] for key, count in counts.items()}
