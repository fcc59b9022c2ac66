"""Parameters and groups as callers give them, in the form that :class:`polarstep.Muon` works with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polarstep.groups import Group

__all__ = ["listed_group", "listed_params"]


def listed_params(params: Any) -> list[Any]:
    """The parameters, named parameters or groups that :class:`polarstep.Muon` was given, as a list."""
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params is a {type(params).__name__}, a whole model: let polarstep.muon_for(model) "
            "choose its hidden matrices, or give parameters"
        )
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {type(params).__name__}: expected parameters or groups of them, as "
            "model.parameters() with its brackets"
        )
    if isinstance(params, dict) and "params" in params:
        raise TypeError(
            "params is a dict with the key 'params', a single parameter group: expected a list of "
            'groups, as [{"params": ...}]'
        )
    given = list(params)
    if not given:
        raise ValueError(
            "params is empty: expected at least one parameter. A generator, as model.parameters() "
            "returns, can be read once: make it anew for every use, or give a list"
        )
    return given


def listed_group(group: Group) -> Group:
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
