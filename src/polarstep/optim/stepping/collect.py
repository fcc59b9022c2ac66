"""The first phase of a step: which parameters have gradients, and the bucket of each matrix.

A bucket is all matrices of one :class:`Signature`: shape, precision, device, polar map, and the step if
the map draws other random numbers at other steps. They go through the polar map as one batch, whichever
groups and parameters they are in. This phase changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.cuda_graphs import in_a_graph
from polarstep.distributed.layout import is_sharded, local, placed_like
from polarstep.maps import Carry, PolarMap
from polarstep.matrix import MatrixView
from polarstep.optim.groups import (
    LR_SCALE,
    Group,
    is_by_norm,
    is_transposed,
    named_params,
    scale_of,
    views_of,
)
from polarstep.optim.stepping.carried import recalled
from polarstep.optim.stepping.magnitude import largest
from polarstep.optim.transforms import followed

__all__ = [
    "Member",
    "Signature",
    "State",
    "Work",
    "all_recalled",
    "check_gradients",
    "collect",
    "in_parts",
    "members_of",
    "momentum_dtype",
]

# The type of torch's Optimizer.state: a dict for each parameter.
State = dict[Tensor, dict[str, Any]]

Item = TypeVar("Item")


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


@dataclass(frozen=True)
class Signature:
    """What the matrices of a bucket have in common."""

    polar: PolarMap  # the map that runs on this shape
    seed: int
    step: int | None  # None if the map's random numbers do not depend on it
    m: int
    n: int
    dtype: torch.dtype
    device: torch.device
    nesterov: bool
    skips_nonfinite: bool
    resumed: bool  # whether the map continues from the last step's carry
    by_norm: bool  # whether steps are scaled by ‖T‖_F

    def drawn_at(self, step: int | None) -> tuple[tuple[int, ...] | None, tuple[int | str, ...]]:
        """What the random numbers of ``step`` depend on, and the key of their generator.

        ``None`` is for any step, where :attr:`step` is ``None``.

        The former is ``None`` if the step needs no random numbers. The key is a function of seed, shape
        and step, so that a resumed run draws the same numbers. In a CUDA graph of the user's own a
        step draws as the first step does, since every replay of the graph must draw new numbers.
        """
        step = 0 if step is None else step
        numbers = self.polar.numbers_at(step, resumed=self.resumed and not in_a_graph())
        rest = (step,) if numbers is None else numbers
        return numbers, (self.seed, f"{self.m}x{self.n}", *rest)


@dataclass(frozen=True)
class Member:
    """A block of a parameter: equally shaped matrices, which go to the same bucket."""

    work: Work
    index: int  # index of the parameter in its work
    block: int  # index of the block in the parameter's matrix view

    @property
    def param(self) -> Tensor:
        """The parameter."""
        return self.work.params[self.index]

    @property
    def name(self) -> str:
        """Its name."""
        return self.work.names[self.index]

    @property
    def group(self) -> Group:
        """Its group."""
        return self.work.group

    @property
    def view(self) -> MatrixView:
        """How the parameter is read as matrices."""
        return self.work.views[self.index]

    @property
    def count(self) -> int:
        """The number of matrices."""
        return self.view.shapes[self.block][0]


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
    """Raise if a user's ``lr_scale`` function gives a bad factor, before the step changes anything."""
    if callable(group[LR_SCALE]):
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


def momentum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of C and M, and of an element-wise rule's buffers, for a parameter in ``dtype``.

    It is the parameter's own, or float32 for float16. C may be 1/(1 − β) times as large as the
    gradients: at β = 0.95 gradients of 5,000 would pass 65504, the largest number of float16. AdamW's v
    adds (1 − β₂)G², which is zero in float16 for gradients below 7e-4 at β₂ = 0.95. bfloat16 has the
    range of float32.
    """
    return torch.float32 if dtype == torch.float16 else dtype


def members_of(work: Work, index: int, state: State) -> Iterator[tuple[Signature, Member]]:
    """The blocks of one parameter, each with the signature of its bucket."""
    p, group, view = work.params[index], work.group, work.views[index]
    if view.rows * view.cols > kernels.MOST_ENTRIES and kernels.available(p.device):
        raise ValueError(
            f"{work.names[index]} has {view.rows}×{view.cols} entries: expected less than 2³¹ on a GPU, "
            "whose kernels count entries in 32 bits; update it by AdamW, or store it as a stack of "
            "smaller matrices"
        )
    for block, (count, m, n) in enumerate(view.shapes):
        polar = group["polar"].on(m, n, p.device)
        if group["transform"] is not None:
            polar = followed(polar, group["transform"], transposed=is_transposed(group))
        signature = Signature(
            polar=polar,
            seed=group["seed"],
            # A group that was added later has taken fewer steps than the others.
            step=group["step"] if polar.numbers_at(0, resumed=False) else None,
            m=m,
            n=n,
            dtype=p.dtype,
            device=p.device,
            nesterov=group["nesterov"],
            skips_nonfinite=work.finite is not None,
            resumed=recalled(state.get(p, {}), block, polar, count, m, n) is not None,
            by_norm=is_by_norm(group),
        )
        yield signature, Member(work, index, block)


def all_recalled(signature: Signature, members: Iterable[Member], state: State) -> list[Carry]:
    """The last step's carry of each member of a bucket that continues from it."""
    its = signature
    found = (
        recalled(state[member.param], member.block, its.polar, member.count, its.m, its.n)
        for member in members
    )
    return [carry for carry in found if carry is not None]


def in_parts(
    items: Iterable[Item], count: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Lists of ``items`` with at most ``most`` matrices in all; a larger item has a list to itself.

    >>> list(in_parts([1, 1, 1, 5, 2], lambda matrices: matrices, most=2))
    [[1, 1], [1], [5], [2]]
    """
    part, size = list[Item](), 0
    for item in items:
        if part and size + count(item) > most:
            yield part
            part, size = [], 0
        part.append(item)
        size += count(item)
    yield part
