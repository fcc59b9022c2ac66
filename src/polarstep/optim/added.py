"""Groups that somebody else adds to an optimizer: frozen layers that are unfrozen during a run.

Lightning's ``BackboneFinetuning`` calls ``add_param_group({"params": layers, "lr": 0.002})``, which
brings matrices and vectors alike. Here such a group becomes one group for each rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from polarstep.optim.elementwise_rule import Elementwise, group_of
from polarstep.optim.groups import Group, check_lr

__all__ = ["as_listed", "named_uniquely", "sorted_by_rule", "with_names"]


def as_listed(group: Group) -> Group:
    """``group`` with its parameters as a list, and names as a list of their own, as in torch."""
    if "params" not in group:
        raise ValueError(
            f"a parameter group has no 'params', only {', '.join(group)}; "
            "expected {'params': [...], ...}"
        )
    params = group["params"]
    if isinstance(params, Tensor):
        params = [params]
    elif not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {type(params).__name__}: expected a list of parameters, as "
            "list(module.parameters())"
        )
    elif isinstance(params, set):
        raise TypeError("parameters in a set have no order, which a checkpoint needs; give a list")
    else:
        params = list(params)
    if params and all(isinstance(p, tuple) for p in params):
        names = [name for name, _ in params]
        return group | {"params": [p for _, p in params], "param_names": names}
    return group | {"params": params}


def sorted_by_rule(
    group: Group, waiting: Sequence[Group], vectors: Elementwise, muon_lr: float | Tensor
) -> list[Group]:
    """``group`` split into groups of one rule each. Muon's comes last: callers may write to the last.

    ``waiting`` are the groups that :func:`polarstep.muon_for` has made for frozen parameters. A
    parameter in none of them goes to the rule ``vectors`` if it is a vector, else to Muon. A learning
    rate in ``group`` is Muon's; other rules get their own rate times its ratio to ``muon_lr``.
    """
    if "algorithm" in group:
        return [group]
    params: list[Tensor] = group["params"]
    given = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    ratio = 1.0
    if "lr" in given:
        check_lr(given["lr"])
        ratio = float(given["lr"]) / (float(muon_lr) or 1.0)
    names = {id(p): name for p, name in zip(params, group.get("param_names") or (), strict=False)}
    left = {id(p): p for p in params}
    found: list[Group] = []
    for prepared in waiting:
        members = zip(prepared["params"], prepared["reasons"], strict=True)
        taken = [(name, p, why) for (name, p), why in members if left.pop(id(p), None) is not None]
        if taken:
            options = {key: prepared[key] for key in prepared.keys() - {"params", "reasons"}}
            if prepared["algorithm"] == "muon":
                options |= given
            else:
                options["lr"] *= ratio
            options["params"] = [p for _, p, _ in taken]
            options["param_names"] = [names.get(id(p), name) for name, p, _ in taken]
            found.append(options | {"reasons": [f"{why}, added later" for _, _, why in taken]})
    flat = [p for p in left.values() if isinstance(p, Tensor) and p.ndim < 2]
    if flat:
        options = group_of(vectors)
        options |= {"lr": options["lr"] * ratio, "params": flat}
        options["reasons"] = ["vector: added later, fewer than two dimensions"] * len(flat)
        if names:
            options["param_names"] = [names[id(p)] for p in flat]
        found.append(options)
    rest = [p for p in params if id(p) in left and not any(p is q for q in flat)]
    if rest or not found:
        options = given | {"params": rest}
        if names:
            options["param_names"] = [names[id(p)] for p in rest]
        found.append(options)
    return sorted(found, key=lambda each: each.get("algorithm", "muon") == "muon")


def with_names(group: Group, others: Sequence[Group]) -> Group:
    """``group`` with names for its parameters if ``others`` have them: torch wants all or none."""
    if "param_names" in group or not any("param_names" in other for other in others):
        return group
    first = sum(len(other["params"]) for other in others)
    return group | {"param_names": [f"parameter {first + i}" for i in range(len(group["params"]))]}


def named_uniquely(group: Group, others: Sequence[Group]) -> Group:
    """``group`` with a ``"name"`` that no other group has: the name given, its role or its algorithm.

    Monitors of learning rates show the name, and Lightning's refuses two groups of one name.
    """
    taken: set[Any] = {other.get("name") for other in others}
    base = group.get("name") or group.get("role") or group["algorithm"]
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}-{count}"
    return group | {"name": name}
