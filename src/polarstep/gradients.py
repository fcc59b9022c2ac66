"""What a step begins with: the parameters that have a gradient, and whether gradients are finite.

Nothing is changed here. :func:`largest` finds the largest magnitude of each of many tensors, in few
launches. It is NaN or infinite exactly where some entry is. On a GPU one launch finds it for a whole
list of tensors. A CPU finds minimum and maximum twenty times as fast as a norm.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
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
from polarstep.numerics import largest_entry
from polarstep.ranks.layout import is_sharded, local, placed_like, wrapped

__all__ = ["Work", "check_gradients", "check_scale", "collect", "largest", "largest_of_each"]

INFINITY = float("inf")


@dataclass
class Work:
    """What one step does to one parameter group."""

    group: Group
    names: list[str]
    params: list[Tensor]
    grads: list[Tensor]
    finite: list[Tensor] | None  # a flag on the device per parameter, where nonfinite="skip"
    views: list[MatrixView]  # empty unless the group is Muon's
    captured: bool = False  # whether a CUDA graph of the user's own captures the step
    on_ranks: bool = True  # whether there are ranks at all, so that a parameter may be a DTensor

    def of(self, kept: list[int]) -> Work:
        """This work for the parameters at ``kept``."""
        return replace(
            self,
            names=[self.names[i] for i in kept],
            params=[self.params[i] for i in kept],
            grads=[self.grads[i] for i in kept],
            finite=None if self.finite is None else [self.finite[i] for i in kept],
            views=[self.views[i] for i in kept],
        )

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
    *,
    failed: bool = False,
    captured: bool = False,
    on_ranks: bool = True,
) -> Work:
    """The parameters of a group that have a gradient, checked.

    A parameter without a gradient is left alone altogether, weight decay included. ``elsewhere`` has the
    ids of parameters that have a gradient on another rank; if such a gradient is missing here, it counts
    as zero. ``failed``: this rank could not collect them. Then all of them count as zero, so that it can
    send what other ranks wait for, and ``nonfinite="skip"`` skips their parameters. ``captured``
    and ``on_ranks`` are those of :class:`Work`.
    """
    names, params, grads, shapes = list[str](), list[Tensor](), list[Tensor](), list[torch.Size]()
    for name, p in named_params(group):
        if (given := p.grad) is None and id(p) not in elsewhere:
            continue
        shape = p.shape
        if failed:
            grad = _zeros_without_memory(p)
        elif given is None:
            grad = torch.zeros_like(p)
        else:
            grad = given
        if grad.shape != shape or grad.layout != torch.strided:
            _check(name, p, grad)
        names.append(name)
        params.append(p)
        grads.append(placed_like(grad, p) if on_ranks and is_sharded(p) else grad)
        shapes.append(shape)
    finite = None
    if group["nonfinite"] == "skip" and grads:
        parts = [local(grad) for grad in grads] if on_ranks else grads
        finite = (
            [X.new_zeros((), dtype=torch.bool) for X in parts] if failed else _are_finite(parts)
        )
    views = []
    if group["algorithm"] == "muon":
        views = views_of(group, names, shapes)
        if not failed:
            _check_scale(group, params, views)
    return Work(group, names, params, grads, finite, views, captured, on_ranks)


def _zeros_without_memory(p: Tensor) -> Tensor:
    """A gradient of zeros, placed as ``p``, that takes the memory of one number."""
    part = local(p)
    zeros = part.new_zeros(()).expand(part.shape)
    return wrapped(zeros, p, p.placements, p.shape) if is_sharded(p) else zeros


def check_scale(group: Group) -> None:
    """Raise if a user's ``shape_scale`` function fails for a parameter that has a gradient."""
    if group["algorithm"] == "muon" and callable(group["shape_scale"]):
        named = [(name, p) for name, p in named_params(group) if p.grad is not None]
        names, params = [name for name, _ in named], [p for _, p in named]
        _check_scale(group, params, views_of(group, names, [p.shape for p in params]))


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


def _by_norms(device: torch.device) -> bool:
    """Whether norms are the fastest way to the largest magnitudes on ``device``."""
    return device.type == "cuda"


def largest(tensors: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each tensor, zero for an empty one, as one tensor (number of tensors,).

    The tensors must have one precision and be on one device.

    >>> largest([torch.tensor([1.0, -3.0]), torch.zeros(0), torch.ones(2, 2)])
    tensor([3., 0., 1.])
    """
    full = [X for X in tensors if X.numel() > 0]
    if len(full) < len(tensors):
        found = iter(largest(full) if full else ())
        zero = tensors[0].new_zeros(())
        return torch.stack([next(found) if X.numel() > 0 else zero for X in tensors])
    if _by_norms(full[0].device):
        return torch.stack(torch._foreach_norm(full, ord=INFINITY))
    most, least = (torch.stack([each(X) for X in full]) for each in (torch.amax, torch.amin))
    return torch.maximum(most, -least)


def largest_of_each(batches: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each matrix of ``batches`` (count, m, n), as one tensor.

    >>> largest_of_each([torch.eye(2)[None], torch.tensor([[[1.0, -2.0]], [[-4.0, 0.0]]])])
    tensor([1., 2., 4.])
    """
    alone = [batch for batch in batches if len(batch) == 1]
    found = largest(alone) if alone else batches[0].new_zeros(0)
    if len(alone) == len(batches):
        return found
    singles = iter(torch.split(found, 1))
    return torch.cat(
        [next(singles) if len(batch) == 1 else _of_matrices(batch) for batch in batches]
    )


def _of_matrices(batch: Tensor) -> Tensor:
    if batch.numel() == 0:
        return batch.new_zeros(len(batch))
    if _by_norms(batch.device):
        found: Tensor = torch.linalg.vector_norm(batch, INFINITY, dim=(-2, -1))
        return found
    return largest_entry(batch).flatten()
