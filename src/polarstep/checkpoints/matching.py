"""Which parameter of a checkpoint is which parameter of the optimizer.

torch matches parameters by their order. Here names must agree with it where both sides have names:

- no name in common, as in a renamed model, or no names at all: the order counts, as in torch;
- some names in common, and another order, other groups or other names beside them, as where another
  layer is frozen: an error. Layers would get the momentum of other layers of their shape.

Prefixes of wrappers, as DDP's ``module.``, make no difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from polarstep.groups import NAMELESS, Group
from polarstep.routing.anatomy import unwrapped

__all__ = ["check_order", "check_ours", "check_sizes", "named_in_order", "told_of_mixed"]

# The names that add_param_group makes up for parameters without names: they say no more than the order.
MADE_UP = re.compile(rf"{NAMELESS}\d+(-\d+)?")
SHOWN = 3  # names of each side in an error


def check_ours(group: Group) -> None:
    """Raise if a checkpoint's ``group`` was saved by another optimizer."""
    if "algorithm" not in group:
        if "betas" in group and "momentum" not in group:
            raise ValueError(
                "the checkpoint is AdamW's: expected the state_dict() of a polarstep.Muon. To go over "
                "from AdamW, its weights are enough: Muon's momentum begins at zero, so warm up again. "
                "To keep AdamW's moments of the parameters that AdamW goes on updating: "
                "optimizer.load_state_dict(polarstep.convert.state_dict(theirs, optimizer, "
                "params=model.parameters()))"
            )
        only = ", ".join(map(str, group))
        raise ValueError(
            f"a parameter group of the checkpoint has no 'algorithm', only {only}: "
            "expected the state_dict() of a polarstep.Muon; polarstep.convert reads that of other Muon "
            "optimizers, as load_state_dict(polarstep.convert.state_dict(theirs, optimizer))"
        )


def named_in_order(group: Group) -> Group:
    """``group`` of a checkpoint, with its list of names in the order of its parameters.

    ``torch.distributed.checkpoint`` lists parameters by name, in the order of the optimizer that loads
    them, but leaves ``"param_names"`` in the order of the optimizer that was saved.
    """
    params, names = group.get("params") or (), group.get("param_names") or ()
    if not names or list(params) == list(names) or not all(isinstance(p, str) for p in params):
        return group
    if set(params) <= set(names):
        return group | {"param_names": list(params)}
    # Where a user has given other names, they do not say which parameter is meant, and the order counts.
    return {key: value for key, value in group.items() if key != "param_names"}


def told_of_mixed(saved: Sequence[Group]) -> str | None:
    """A warning where ``torch.distributed.checkpoint`` has mixed groups up; else ``None``.

    It fills a group of the optimizer that loads with the options of a saved group that shares a
    parameter with it. The result has the ``"params"`` of the first and the ``"param_names"`` of the
    second.
    """
    apart = [
        name
        for group in saved
        if set(group.get("params") or ()) & (names := set(group.get("param_names") or ()))
        for name in group["params"]
        if name not in names
    ]
    if not apart:
        return None
    return (
        f"{_listed(apart, SHOWN)} had another group in the checkpoint than in this optimizer, and "
        "torch.distributed.checkpoint gives a group one set of options: learning rate and other options "
        "may belong to other parameters. Expected the groups of the run that was saved: freeze and "
        "unfreeze the same layers, add the same groups, and make the optimizer with the same rules"
    )


def check_sizes(groups: Sequence[Group], saved: Sequence[Group]) -> None:
    """Raise if a checkpoint has other numbers of parameters than the optimizer, or is another's."""
    then, now = ([len(group["params"]) for group in each] for each in (saved, groups))
    if then == now:
        return
    for group in saved:
        check_ours(group)
    names_then, names_now = map(_flat, _names_of(saved, groups))
    told = ""
    if any(names_then) and any(names_now):
        told = "".join(f"; {each}" for each in _apart(names_then, names_now, shown=1))
    sizes_then, sizes_now = (", ".join(map(str, sizes)) or "no" for sizes in (then, now))
    raise ValueError(
        f"the checkpoint has groups of {sizes_then} parameters, and the optimizer "
        f"groups of {sizes_now}{told}. Expected the same "
        "parameters in the same groups: build the model as it was, freeze and unfreeze the same layers, "
        "and make the optimizer with the same arguments by the same version of polarstep"
    )


def check_order(groups: Sequence[Group], saved: Sequence[Group]) -> None:
    """Raise if names contradict the order, by which torch matches the parameters.

    A parameter without a name, or with a name that was made up for it, fits any other. Without a name in
    common nothing contradicts the order. Groups of other sizes are left to torch, which refuses them.
    """
    then, now = map(_flat, _names_of(saved, groups))
    common = {name for name in now if name is not None} & set(then)
    if not common or [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        return
    if all(
        a == b or (not {a, b} & common and None in (a, b)) for a, b in zip(then, now, strict=True)
    ):
        return
    for group in saved:
        check_ours(group)
    told = _apart(then, now, SHOWN)
    if not told:
        moved = next(a for a, b in zip(then, now, strict=True) if a != b and a in common)
        told = [f"{moved} is number {then.index(moved)} there and number {now.index(moved)} here"]
    shared = _listed([name for name in now if name in common], 1)
    raise ValueError(
        f"the checkpoint and the optimizer both have {shared}, but {'; '.join(told)}: by their order, "
        "parameters would get the momentum of others. Expected the same names: freeze and unfreeze the "
        "same layers as in the run that was saved, and make the optimizer over the same parameters. If "
        "parameters were renamed and their order is the same, load by the order: "
        'for group in state_dict["param_groups"]: del group["param_names"]'
    )


def _names_of(*sides: Sequence[Group]) -> list[list[list[str | None]]]:
    """For each side and each of its groups the names of the parameters; ``None`` where there is none.

    Prefixes of wrappers are left out, unless that would make two names of one side the same. If a list
    of names is longer or shorter than the list of parameters, as with ``ZeroRedundancyOptimizer``, it
    counts as no names.
    """
    given = [[_own_names(group) for group in side] for side in sides]
    if all(
        len({unwrapped(name) for name in names}) == len(set(names))
        for names in ([name for name in _flat(side) if name is not None] for side in given)
    ):
        return [
            [[name if name is None else unwrapped(name) for name in names] for names in side]
            for side in given
        ]
    return given


def _own_names(group: Group) -> list[str | None]:
    names: list[str | None] = list(group.get("param_names") or ())
    return names if len(names) == len(group["params"]) else [None] * len(group["params"])


def _flat(names: Sequence[Sequence[str | None]]) -> list[str | None]:
    """The names of all groups in one list, with ``None`` for names that were made up."""
    return [
        None if name is not None and MADE_UP.fullmatch(name) else name
        for name in chain.from_iterable(names)
    ]


def _apart(then: Sequence[str | None], now: Sequence[str | None], shown: int) -> list[str]:
    """Which names only the checkpoint has, and which only the optimizer has, in words."""
    told = []
    for names, others, which in ((then, now, "the checkpoint"), (now, then, "the optimizer")):
        alone = [name for name in names if name is not None and name not in set(others)]
        if alone:
            told.append(f"{which} alone has {_listed(alone, shown)}")
    return told


def _listed(names: Sequence[str | None], shown: int) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(map(str, names[:shown]))}{more}"
