"""Groups that are added during a run: layers that were frozen before, or new layers.

Lightning's ``BackboneFinetuning`` calls ``add_param_group({"params": layers, "lr": 0.002})``, with
matrices and vectors in one group. Here such a group becomes one group for each rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from polarstep.optim.elementwise_rule import Elementwise, group_of
from polarstep.optim.groups import LR_SCALE, NAMELESS, Group
from polarstep.optim.options import check_lr, known_options

__all__ = ["Rates", "named_uniquely", "sorted_by_rule", "with_names"]

MUON = ("muon", None)  # the key of Muon's rate, whatever the role
# In an added group these options are Muon's learning rate; other rules get a rate in proportion.
LEARNING_RATES = frozenset({"lr", "initial_lr"})
# Options that say together how a parameter is read as matrices.
READ_BY = frozenset({"layout", "split_sizes", "split_columns", "split_repeats"})


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


def sorted_by_rule(
    group: Group,
    prepared: Iterable[Group],
    vectors: Elementwise,
    rates: Rates,
    muon_defaults: Group,
) -> list[Group]:
    """``group`` split into groups of one rule each; Muon's comes last, as callers may write to the last.

    ``prepared`` are groups for which :func:`polarstep.muon_for` has chosen the rules, with names in
    their lists of parameters. A parameter in none of them goes to the rule ``vectors`` if it is a
    vector, else to Muon. A group that names its rule is left as it is.

    The other options of ``group`` go to every rule that has them. An option that no rule has goes to all
    of the new groups: if it is misspelt, it is then refused, and a key of the user's own is kept. The
    learning rate is Muon's; other rules get a rate in proportion (:meth:`Rates.beside`).
    """
    if "algorithm" in group or "use_muon" in group:
        return [group]
    params: list[Tensor] = group["params"]
    given = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if LR_SCALE in given:
        given.setdefault("lr_scale", given.pop(LR_SCALE))
    for key in LEARNING_RATES & given.keys():
        check_lr(given[key])
    left = {id(p): p for p in params}
    found: list[Group] = []
    for ready in prepared:
        members = zip(ready["params"], ready["reasons"], strict=True)
        taken = [(p, why) for (_, p), why in members if left.pop(id(p), None) is not None]
        if taken:
            reasons = [f"{why}, added later" for _, why in taken]
            found.append(ready | {"params": [p for p, _ in taken], "reasons": reasons})
    flat = [p for p in left.values() if isinstance(p, Tensor) and p.ndim < 2]
    if flat:
        why = "vector: added later, fewer than two dimensions"
        found.append(group_of(vectors) | {"params": flat, "reasons": [why] * len(flat)})
    rest = [p for p in params if id(p) in left and not any(p is q for q in flat)]
    if rest or not found:
        found.append({"algorithm": "muon", "params": rest})
    known = {
        algorithm: known_options(algorithm, muon_defaults)
        for algorithm in {each["algorithm"] for each in found}
    }
    somewhere = set().union(*known.values())
    names = {id(p): name for p, name in zip(params, group.get("param_names") or (), strict=False)}
    for i, each in enumerate(found):
        fitting = known[each["algorithm"]] | (given.keys() - somewhere)
        options = {key: value for key, value in given.items() if key in fitting}
        if each["algorithm"] == "muon":
            if (
                READ_BY & options.keys()
            ):  # the caller says how to read the matrices: drop our own way
                each = {key: value for key, value in each.items() if key not in READ_BY}
        else:
            for key in LEARNING_RATES & options.keys():
                options[key] = rates.beside(float(given[key]), float(muon_defaults["lr"]), each)
        found[i] = each | options
        if names:
            found[i]["param_names"] = [names[id(p)] for p in each["params"]]
    return sorted(found, key=lambda each: each["algorithm"] == "muon")


def with_names(group: Group, others: Sequence[Group], known: Mapping[int, str]) -> Group:
    """``group`` with names for its parameters if ``others`` have them: torch wants all or none.

    ``known`` has names in the model by the ids of parameters. If another parameter has the name already,
    as an old head that a new head replaces, a number is added.
    """
    if "param_names" in group or not any("param_names" in other for other in others):
        return group
    first = sum(len(other["params"]) for other in others)
    taken = {name for other in others for name in other.get("param_names") or ()}
    names = []
    for i, p in enumerate(group["params"]):
        names.append(_unused(known.get(id(p), f"{NAMELESS}{first + i}"), taken))
        taken.add(names[-1])
    return group | {"param_names": names}


def named_uniquely(group: Group, others: Sequence[Group]) -> Group:
    """``group`` with a ``"name"`` that no other group has: the name given, its role or its algorithm.

    Monitors of learning rates show the name, and Lightning's refuses two groups of one name.
    """
    base = group.get("name") or group.get("role") or group["algorithm"]
    return group | {"name": _unused(base, {other.get("name") for other in others})}


def _unused(base: str, taken: Container[Any]) -> str:
    """``base``, or ``base`` with the first number from 2 on that makes it a name not yet taken."""
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}-{count}"
    return name
