"""The first phase of a step: which parameters have gradients. It changes nothing."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from polarstep.groups import (
    Group,
    named_params,
    scale_of,
    views_of,
)
from polarstep.matrix import MatrixView
from polarstep.ranks.layout import is_sharded, local, placed_like
from polarstep.stepping.magnitude import largest

__all__ = [
    "Work",
    "check_gradients",
    "collect",
]


@dataclass
class Work:
    """What one step does to one parameter group."""

    group: Group
    names: list[str]
    params: list[Tensor]
    grads: list[Tensor]
    finite: list[Tensor] | None  # a flag on the device per parameter, where nonfinite="skip"
    views: list[MatrixView]  # empty unless the group is Muon's

    def without_gradients(self) -> Work:
        """This work without gradients, for a plan that outlives the step: it would hold their memory."""
        return replace(self, grads=[])


def check_gradients(group: Group) -> None:
    """Raise for the first gradient of a group that cannot be used."""
    for name, p in named_params(group):
        if (grad := p.grad) is not None:
            _check(name, p, grad)


def _check(name: str, p: Tensor, grad: Tensor) -> None:
    if grad.layout != torch.strided:
        raise TypeError(
            f"{name} has a gradient of layout {grad.layout}: expected a dense gradient; "
            "build its module with sparse=False"
        )
    if grad.shape != p.shape:
        raise ValueError(
            f"{name} has shape {tuple(p.shape)}, but its gradient has shape "
            f"{tuple(grad.shape)}; call zero_grad() after changing a parameter's shape"
        )


def collect(
    group: Group,
    elsewhere: Container[int] = (),
    stand_ins: Mapping[int, tuple[Tensor, Tensor]] | None = None,
) -> Work:
    """The parameters of a group that have a gradient, checked.

    A parameter without a gradient is left alone altogether, weight decay included. ``elsewhere`` has the
    ids of parameters that have a gradient on another rank; if such a gradient is missing here, it counts
    as zero. ``stand_ins`` maps the id of a sharded parameter to the plain tensors that are used in place
    of the parameter and of its gradient.
    """
    names, params, grads, shapes = list[str](), list[Tensor](), list[Tensor](), list[torch.Size]()
    for name, p in named_params(group):
        if stand_ins and id(p) in stand_ins:
            p, grad = stand_ins[id(p)]
        elif (given := p.grad) is not None:
            grad = given
        elif id(p) in elsewhere:
            grad = torch.zeros_like(p)
        else:
            continue
        shape = p.shape
        if grad.shape != shape or grad.layout != torch.strided:
            _check(name, p, grad)
        names.append(name)
        params.append(p)
        grads.append(placed_like(grad, p) if is_sharded(p) else grad)
        shapes.append(shape)
    finite = None
    if group["nonfinite"] == "skip" and grads:
        finite = _are_finite([local(grad) for grad in grads])
    views = []
    if group["algorithm"] == "muon":
        views = views_of(group, names, shapes)
        _check_scale(group, params, views)
    return Work(group, names, params, grads, finite, views)


def _check_scale(group: Group, params: list[Tensor], views: list[MatrixView]) -> None:
    """Raise if a user's ``shape_scale`` function gives a bad factor, before anything changes."""
    if callable(group["shape_scale"]):
        shapes = {
            (p.device, m, n)
            for p, view in zip(params, views, strict=True)
            if p.numel() > 0
            for _, m, n in view.shapes
        }
        for device, m, n in shapes:
            scale_of(group, device)(m, n)


def _are_finite(grads: list[Tensor]) -> list[Tensor]:
    """A flag per gradient, on its device: whether this rank's part is finite. The host does not wait."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, grad in enumerate(grads):
        alike.setdefault((grad.device, grad.dtype), []).append(index)
    flags = dict[int, Tensor]()
    for indices in alike.values():
        found = torch.isfinite(largest([grads[index] for index in indices])).unbind()
        flags |= zip(indices, found, strict=True)
    return [flags[index] for index in range(len(grads))]
