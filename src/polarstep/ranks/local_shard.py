"""Parameters whose part on a rank consists of whole matrices: the step of one process runs on the part.

These are stacks of experts that are cut between experts, copies of a whole parameter, and every
parameter in a world of one rank. The local part, a plain tensor, is stepped for the ``DTensor``, and its
state is made of plain tensors. So every kind of step that one process has can run here, the fused step
included.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
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
    """This rank's part of a sharded parameter, and its state as ``DTensor`` and as plain tensors."""

    p: Any  # the parameter
    part: Tensor
    batch: bool  # whether the parameter is cut between its matrices
    real: dict[str, Any]  # the optimizer's state of the parameter, with sharded tensors
    known: dict[str, Any]  # this rank's parts of that state as plain tensors, for the step


class LocalState(State):
    """The optimizer's state, with plain tensors for this rank's parts of sharded parameters."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self._of: dict[int, LocalShard] = {}  # by the id of the parameter
        # The sharded parameters of this step, also where this rank's part is empty.
        self._stepped: list[Any] = []
        self._without_part: list[tuple[Work, int]] = []  # those of this step that are empty here
        # What both forms of the state held when they last agreed. While both still hold it, no tensor is
        # compared: that would take longer than the rest of the host's work.
        self._agreed: _Agreement | None = None

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
        a checkpoint has left in such parts is made whole, and each rank takes its share. This is done
        only if the state or the parameters differ from what the last step left.
        """
        params = [p for work in works for p in work.params if is_sharded(p)]
        if not (self._agrees() and _are_same(params, self._stepped)):
            self._agreed, self._stepped = None, params
            for p in params:
                of_parameter: dict[str, Any] = self._state.get(p, {})
                for key, value in of_parameter.items():
                    ours = p.placements, placed_by_matrix(p)  # of what is shaped as p, and all else
                    if is_sharded(value) and value.placements not in ours:
                        of_parameter[key] = whole(value)
            self._refresh()
        return [self._begun(work) for work in works]

    def _begun(self, work: Work) -> Work:
        """``work`` on local parts, without the parameters of which this rank has none."""
        if not any(map(is_sharded, work.params)):
            return work
        here = []
        for i, p in enumerate(work.params):
            if local(p).numel():
                here.append(i)
            elif is_sharded(p):
                self._without_part.append((work, i))
        for i in here:
            if work.group["momentum_dtype"] == torch.int8 and is_cut(work.params[i]):
                check_blocks(work.params[i], work.names[i])
        work = work.of(here)
        parts = [self._part(p) if is_sharded(p) else p for p in work.params]
        grads, shapes = [local(G) for G in work.grads], [part.shape for part in parts]
        views = views_of(work.group, work.names, shapes)
        return replace(work, params=parts, grads=grads, views=views)

    def _part(self, p: Any) -> Tensor:
        it = self._of.get(id(p))
        if it is None or it.part is not p._local_tensor:
            it = self._read(p)
        return it.part

    def _agrees(self) -> bool:
        """Whether the optimizer's state is as the last step left it."""
        return self._agreed is not None and self._agreed.real.is_there()

    def _refresh(self) -> None:
        """Read what other code has put into the optimizer's state since the last step."""
        if not self._agrees():
            for it in list(self._of.values()):
                if it.p in self._state:
                    self._read(it.p)
                else:
                    self._forget(it)

    def settle(self) -> None:
        """Write the tensors that the step has made into the optimizer's state, as sharded tensors."""
        for work, index in self._without_part:
            _settle_empty(work, index, self._state)
        self._without_part = []
        if self._agreed is not None and self._agreed.known.is_there():
            return
        stepped = {id(p) for p in self._stepped}
        for it in self._of.values():
            if id(it.p) not in stepped:
                continue  # another plan has updated it, in the optimizer's state itself
            for key in [key for key in it.real if key not in it.known]:
                del it.real[key]
            for key, value in it.known.items():
                known = it.real.get(key)
                # In a whole tensor only this rank's rows are new, so it must become a sharded tensor.
                in_parts = not it.batch or is_sharded(known)
                if not in_parts or not _is_same(_part_of(known, it.p, it.batch), value):
                    it.real[key] = _joined(value, it.p, key, it.batch)
        its = self._of.values()
        without_part = (self._state.get(p, {}) for p in self._stepped if id(p) not in self._of)
        real = _Content([self._state, *(it.real for it in its), *without_part])
        self._agreed = _Agreement(real, _Content([it.known for it in its]))

    def _forget(self, it: LocalShard) -> None:
        del self[it.part], self._of[id(it.p)]

    def _read(self, p: Any) -> LocalShard:
        """The shard of ``p``, updated from the optimizer's state; a new one if ``p`` has moved."""
        it, part, real = self._of.get(id(p)), local(p), self._state[p]
        if it is None or it.p is not p or it.part is not part or it.real is not real:
            if it is not None:
                self._forget(it)
            it = self._of[id(p)] = LocalShard(p, part, is_cut(p), real, {})
            self[part] = it.known
        for key in [key for key in it.known if key not in real]:
            del it.known[key]
        for key, value in real.items():
            mine = _part_of(value, p, it.batch)
            if key not in it.known or not _is_same(it.known[key], mine):
                it.known[key] = mine
        self._agreed = None  # until the step settles
        return it


@dataclass
class _Agreement:
    """What both forms of the state, sharded and plain, held when they last agreed."""

    real: _Content
    known: _Content


class _Content:
    """The values of some dicts at one time."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts, self._values = dicts, _values(dicts)

    def is_there(self) -> bool:
        """Whether the dicts still have the same values."""
        return _are_same(_values(self._dicts), self._values)


def _are_same(some: list[Any], others: list[Any]) -> bool:
    """Whether two lists have the same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _values(dicts: Sequence[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


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


def _is_same(a: Any, b: Any) -> bool:
    """Whether ``a`` and ``b`` are one object, or tensors of the same memory, shape and precision."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


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
