"""Groups that are added during a run: layers that were frozen before, or new layers.

Lightning's ``BackboneFinetuning`` calls ``add_param_group({"params": layers, "lr": 0.002})``, with
matrices and vectors in one group. Here such a group becomes one group for each rule.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from polarstep.elementwise_rule import Elementwise
from polarstep.groups import Group
from polarstep.options import check_lr, known_options
from polarstep.rates import beside, usual_factor

__all__ = ["sorted_by_rule"]

# Options that say together how a parameter is read as matrices.
READ_BY = frozenset({"layout", "split_sizes", "split_columns", "split_repeats"})


def sorted_by_rule(
    group: Group,
    prepared: Iterable[Group],
    vectors: Elementwise,
    muon_defaults: Group,
) -> list[Group]:
    """``group`` split into groups of one rule each; Muon's comes last, as callers may write to the last.

    ``prepared`` are groups for which :func:`polarstep.muon_for` has chosen the rules, with names in
    their lists of parameters. A parameter in none of them goes to the rule ``vectors`` if it is a
    vector, else to Muon. A group that names its rule is left as it is.

    The other options of ``group`` go to every rule that has them. An option that no rule has goes to all
    of the new groups: if it is misspelt, it is then refused, and a key of the user's own is kept. The
    learning rate is that of all of them (:mod:`polarstep.rates`).
    """
    if "algorithm" in group or "use_muon" in group:
        return [group]
    params: list[Tensor] = group["params"]
    given = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    for key in {"lr", "initial_lr"} & given.keys():
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
        options = beside(vectors, muon_defaults["lr"], usual_factor(muon_defaults["shape_scale"]))
        found.append(options | {"params": flat, "reasons": [why] * len(flat)})
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
        if each["algorithm"] == "muon" and READ_BY & options.keys():
            # The caller says how to read the matrices: drop our own way.
            each = {key: value for key, value in each.items() if key not in READ_BY}
        found[i] = each | options
        if names:
            found[i]["param_names"] = [names[id(p)] for p in each["params"]]
    return sorted(found, key=lambda each: each["algorithm"] == "muon")
