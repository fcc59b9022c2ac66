"""Parameters whose part on a rank consists of whole matrices: the step of one process runs on the part.

These are stacks of experts that are cut between experts, copies of a whole parameter, and every
parameter in a world of one rank. The local part, a plain tensor, is stepped for the ``DTensor``, and its
state is made of plain tensors. So every kind of step that one process has can run here, the fused step
included.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polarstep.bucket import members_of
from polarstep.gradients import Work
from polarstep.groups import views_of
from polarstep.ranks import carries
from polarstep.ranks.layout import (
    Layout,
    is_sharded,
    local,
    placed_by_matrix,
    whole,
    wrapped,
)
from polarstep.state import (
    BLOCK,
    State,
    carried_dtype,
    check_blocks,
    entry,
    is_compensated,
    is_shaped_as_parameter,
    keep_momentum,
    kept_by_rule,
    momentum_of,
    rounding_error,
    scale_as_sharded,
    stored_dtype,
)

__all__ = ["LocalState", "is_cut"]


@dataclass
class LocalShard:
    """This rank's part of a sharded parameter, and of its state."""

    p: Any  # the parameter
    part: Tensor
    batch: bool  # whether the parameter is cut between its matrices
    known: dict[str, Any]  # its state in plain tensors, which the step reads and changes
    # The optimizer's state of the parameter, and its parts in plain tensors, when they last agreed.
    real: dict[str, Any]
    agreed: dict[str, Any]


class LocalState(State):
    """The optimizer's state, with plain tensors for this rank's parts of sharded parameters."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self._of: dict[int, LocalShard] = {}  # by the id of the parameter
        self._stepped: list[
            LocalShard
        ] = []  # those of this step, also where this rank's part is empty
        self._without_part: list[tuple[Work, int]] = []  # those of this step that are empty here

    def is_of(self, state: State) -> bool:
        """Whether this was made from ``state``; a loaded checkpoint comes in another dict."""
        return self._state is state

    def __missing__(self, p: Tensor) -> dict[str, Any]:
        return self._state[p]

    def get(self, p: Tensor, default: Any = None) -> Any:
        """The state of ``p``, like ``dict.get``; a plain parameter has the optimizer's own state."""
        return self[p] if p in self else self._state.get(p, default)

    def begin(self, works: list[Work]) -> list[Work]:
        """``works`` with this rank's parts of sharded parameters in their place.

        All ranks of their meshes must call together. Other plans cut each matrix's carry along its last
        dimension. Here a rank has the whole carries of its own matrices. So a carry that another plan or
        a checkpoint has left in such parts is made whole, and each rank takes its share.
        """
        self._stepped, self._without_part = [], []
        return [self._begun(work) for work in works]

    def _begun(self, work: Work) -> Work:
        """``work`` on local parts, without the parameters of which this rank has none."""
        if not any(map(is_sharded, work.params)):
            return work
        here, parts = list[int](), list[Tensor]()
        for i, p in enumerate(work.params):
            part = self._read(p) if is_sharded(p) else p
            if part.numel():
                here.append(i)
                parts.append(part)
            elif is_sharded(p):
                self._without_part.append((work, i))
        for i in here:
            if work.group["momentum_dtype"] == torch.int8 and is_cut(work.params[i]):
                check_blocks(work.params[i], work.names[i])
        work = work.of(here)
        grads, shapes = [local(G) for G in work.grads], [part.shape for part in parts]
        views = views_of(work.group, work.names, shapes)
        return replace(work, params=parts, grads=grads, views=views)

    def _read(self, p: Any) -> Tensor:
        """This rank's part of ``p``, with its state in plain tensors as the optimizer's state has it."""
        it, part, real = self._of.get(id(p)), local(p), self._state[p]
        if it is None or it.p is not p or it.part is not part:
            if it is not None:
                del self[it.part]
            it = self._of[id(p)] = LocalShard(p, part, is_cut(p), {}, {}, {})
            self[part] = it.known
        self._stepped.append(it)
        if _are_same(real, it.real):
            return part
        for key in it.known.keys() - real.keys():
            del it.known[key]
        for key, value in real.items():
            if value is not it.real.get(key):
                ours = p.placements, placed_by_matrix(p)  # of what is shaped as p, and of all else
                if is_sharded(value) and value.placements not in ours:
                    real[key] = whole(value)
                it.known[key] = _part_of(real[key], p, it.batch)
        it.agreed = dict(it.known)
        return part

    def settle(self) -> None:
        """Write the tensors that the step has made into the optimizer's state, as sharded tensors."""
        for work, index in self._without_part:
            _settle_empty(work, index, self._state)
        for it in self._stepped:
            real = self._state[it.p]
            if it.part.numel() and not (
                _are_same(real, it.real) and _are_same(it.known, it.agreed)
            ):
                for key in real.keys() - it.known.keys():
                    del real[key]
                for key, value in it.known.items():
                    # In a whole tensor only this rank's rows are new: it becomes a sharded tensor.
                    in_parts = not it.batch or is_sharded(real.get(key))
                    if value is not it.agreed.get(key) or not in_parts:
                        real[key] = _joined(value, it.p, key, it.batch)
                it.agreed = dict(it.known)
            it.real = dict(real)


def _are_same(some: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether two dicts have the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some.values(), others.values()))


def is_cut(p: Tensor) -> bool:
    """Whether a sharded parameter is cut between its matrices, and not copied."""
    layout = Layout.of(p)
    return layout is not None and layout.cut != ()


def _part_of(value: Any, p: Any, batch: bool) -> Any:
    """This rank's part of an entry in the state of ``p``; ``batch`` is :func:`is_cut` of ``p``."""
    if not isinstance(value, Tensor):
        return value
    if is_sharded(value):
        return local(value)
    if batch and value.dim() > 0:  # a whole tensor, as begin() makes it; a matrix in each row
        layout = Layout.of(p)
        assert layout is not None
        each = len(value) // p.shape[0]
        start, stop = layout.boxes[layout.me][0]
        return value[each * start : each * stop]
    return value


def _joined(value: Any, p: Any, key: str, batch: bool) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape == local(p).shape and is_shaped_as_parameter(key):
        return wrapped(value, p, p.placements, p.shape)
    if key == "momentum_scale" and p.shape[-1] % BLOCK == 0:
        return scale_as_sharded(value, p)
    if not batch:
        return value
    layout = Layout.of(p)
    assert layout is not None
    start, stop = layout.boxes[layout.me][0]
    total = value.shape[0] // max(1, stop - start) * p.shape[0]
    return wrapped(value, p, placed_by_matrix(p), (total, *value.shape[1:]))


def _settle_empty(work: Work, index: int, state: State) -> None:
    """Make empty entries for a parameter without a part here; a checkpoint asks all ranks."""
    p: Any = work.params[index]
    of_parameter, kept = state[p], stored_dtype(work.group, p)
    keep_momentum(momentum_of(p, of_parameter, kept), p, of_parameter, kept)
    kept_by_rule(p, of_parameter, work.group["momentum_rule"])
    if is_compensated(work.group, p):
        rounding_error(p, of_parameter)
    for bucket, member in members_of(work, index, state):
        for name, shape in carries.shapes_of(bucket, bucket.dtype).items():
            key, of_all = entry(name, member.block), (member.count, *shape)
            known = of_parameter.get(key)
            dtype = carried_dtype(bucket.polar, name, p.dtype)
            if not is_sharded(known) or (known.shape, known.dtype) != (of_all, dtype):
                part = torch.empty((0, *shape), dtype=dtype, device=p.device)
                of_parameter[key] = wrapped(part, p, placed_by_matrix(p), of_all)
