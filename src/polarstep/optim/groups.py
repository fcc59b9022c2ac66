"""Parameter groups: which keys an algorithm has, their defaults, and what may stand in them.

A group is a plain dict, as torch wants it, and ``group["algorithm"]`` says who updates its
parameters: ``"muon"``, ``"adamw"`` or ``"sgd"``. Everything is checked before anything is changed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, get_args

import torch
from torch import Tensor

from polarstep.matrix import Layout, MatrixView
from polarstep.optim.elementwise import SGD, AdamW, group_of
from polarstep.optim.scaling import resolve_scale
from polarstep.polar import PolarMap

__all__ = ["ELEMENTWISE", "Group", "complete", "named_params", "view_of"]

Group = dict[str, Any]

ELEMENTWISE: dict[str, type[AdamW] | type[SGD]] = {"adamw": AdamW, "sgd": SGD}
NONFINITE = ("propagate", "skip")


def complete(group: Group, muon_defaults: Group) -> Group:
    """``group`` with its algorithm's defaults filled in and every value checked."""
    algorithm = group.get("algorithm", "muon")
    if algorithm == "muon":
        defaults = muon_defaults
    elif algorithm in ELEMENTWISE:
        defaults = group_of(ELEMENTWISE[algorithm]()) | {"nonfinite": muon_defaults["nonfinite"]}
    else:
        known = ", ".join(("muon", *ELEMENTWISE))
        raise ValueError(f"algorithm={algorithm!r}: expected one of {known}")
    _check_keys(group, algorithm, set(defaults), set(muon_defaults))
    group = defaults | group
    if group.get("split_sizes") is not None:
        group["split_sizes"] = tuple(group["split_sizes"])
    _check_nonfinite(group)
    if algorithm == "muon":
        check_muon(group)
    else:
        rule = ELEMENTWISE[algorithm]
        _check_lr(group["lr"])
        rule(**{key: group[key] for key in group_of(rule()) if key not in ("algorithm", "lr")})
    return group


def check_muon(group: Group) -> None:
    """Raise a ``ValueError`` or ``TypeError`` for the first bad hyperparameter of a Muon group."""
    _check_lr(group["lr"])
    _check_nonfinite(group)
    if not 0 <= group["momentum"] < 1:
        raise ValueError(
            f"momentum={group['momentum']}: expected 0 ≤ momentum < 1; "
            "the paper's schedule for K=10,000 gives 0.99"
        )
    if not 0 <= group["weight_decay"] < float("inf"):
        raise ValueError(f"weight_decay={group['weight_decay']}: expected a finite number ≥ 0")
    if not isinstance(group["polar"], PolarMap):
        raise TypeError(
            f"polar={group['polar']!r}: expected a polar map such as polarstep.NewtonSchulz()"
        )
    resolve_scale(group["lr_scale"])
    if group["layout"] not in get_args(Layout):
        raise ValueError(
            f"layout={group['layout']!r}: expected one of {', '.join(get_args(Layout))}"
        )
    if not isinstance(group["seed"], int):
        raise TypeError(f"seed={group['seed']!r}: expected an integer")


def check_params(group: Group) -> None:
    """Raise for the first parameter that the group's algorithm cannot update."""
    for name, p in named_params(group):
        if not isinstance(p, Tensor):
            raise TypeError(f"{name} is a {type(p).__name__}: expected a tensor")
        if not p.is_floating_point():
            kind = "complex" if p.is_complex() else str(p.dtype).removeprefix("torch.")
            raise TypeError(
                f"{name} is {kind}: expected real floating-point parameters; "
                "leave it out, or view a complex one as real with torch.view_as_real"
            )
        if p.layout != torch.strided:
            raise TypeError(f"{name} has layout {p.layout}: expected a dense (strided) parameter")
        if group["algorithm"] == "muon":
            view_of(group, p, name)


def named_params(group: Group) -> Iterator[tuple[str, Tensor]]:
    """Parameters with the best name there is: their own, or their place in the group."""
    params: list[Tensor] = group["params"]
    names = group.get("param_names") or [f"parameter {i}" for i in range(len(params))]
    return zip(names, params, strict=True)


def view_of(group: Group, p: Tensor, name: str = "the parameter") -> MatrixView:
    """How a Muon group reads ``p`` as matrices."""
    try:
        return _view(p.shape, group["layout"], group["split_sizes"])
    except ValueError:  # once more, for a message with the parameter's name in it
        return MatrixView.of(
            p.shape, layout=group["layout"], split_sizes=group["split_sizes"], name=name
        )


@lru_cache(maxsize=4096)  # asked for every parameter at every step
def _view(shape: torch.Size, layout: Layout, split_sizes: tuple[int, ...] | None) -> MatrixView:
    return MatrixView.of(shape, layout=layout, split_sizes=split_sizes)


def _check_keys(group: Group, algorithm: str, own: set[str], muon: set[str]) -> None:
    """Refuse another algorithm's options and misspelt ones.

    torch lets a group carry any key, and so do we; but ``betas`` in a Muon group, or ``momentun``,
    is a misunderstanding that would go unnoticed for a whole training run.
    """
    others = muon.union(*(group_of(rule()) for rule in ELEMENTWISE.values())) - own
    for key in sorted(set(group) - own - {"params", "param_names"}):
        close = difflib.get_close_matches(key, own, n=1, cutoff=0.8)
        if key in others or close:
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"option {key!r} in a group with algorithm={algorithm!r}: {hint}"
                f"expected some of {', '.join(sorted(own))}"
            )


def _check_nonfinite(group: Group) -> None:
    if group["nonfinite"] not in NONFINITE:
        raise ValueError(
            f"nonfinite={group['nonfinite']!r}: expected one of {', '.join(NONFINITE)}"
        )


def _check_lr(lr: float | Tensor) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr has shape {tuple(lr.shape)}: expected a number or one element")
    elif not 0 <= lr < float("inf"):
        raise ValueError(f"lr={lr}: expected a finite number ≥ 0; 0.02 is usual for Muon")
