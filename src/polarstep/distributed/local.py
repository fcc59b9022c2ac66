"""Parameters whose part on a rank consists of whole matrices: the step of one process runs on the part.

That is a stack of experts that is cut between experts, a copy of a whole parameter, and every parameter
of a world of one rank. The part of a ``DTensor`` stands in for it, a plain tensor, with a state of
plain tensors. So everything that a single process has runs here too, the fused step on a GPU included.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from polarstep.distributed.layout import Layout, is_sharded, local, wrapped
from polarstep.optim.collect import State, Work
from polarstep.optim.groups import view_of
from polarstep.optim.low_precision import BLOCK, check_blocks, scale_as_sharded, stored_dtype

__all__ = ["LocalState", "is_cut", "localized"]


@dataclass
class _StandIn:
    """The part of a sharded parameter on this rank, and the two forms of its state."""

    p: Any  # the parameter
    part: Tensor
    batch: bool  # whether the parameter is cut between its matrices
    real: dict[str, Any]  # the optimizer's state of the parameter
    known: dict[str, Any]  # the same in plain tensors, which a step works with


class LocalState(State):
    """The optimizer's state, with plain tensors for the parts that stand in for sharded parameters."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self._of: dict[int, _StandIn] = {}  # by the id of the parameter
        # What both forms held when they last agreed. To look at each tensor of each parameter at every
        # step would take longer than the rest of the host's work.
        self._agreed: _Agreement | None = None

    def is_of(self, state: State) -> bool:
        """Whether ``state`` is the optimizer's state behind this; loading a checkpoint replaces it."""
        return self._state is state

    def __missing__(self, p: Tensor) -> dict[str, Any]:
        return self._state[p]

    def get(self, p: Tensor, default: Any = None) -> Any:
        """As for a dict; a plain parameter's state is the optimizer's own."""
        return self[p] if p in self else self._state.get(p, default)

    def stand_ins(self, params: Iterable[Any]) -> dict[int, tuple[Tensor, Tensor]]:
        """The parts of all ``params`` that have a gradient, and of the gradients, by ids of parameters.

        An attribute of a ``DTensor`` takes four times as long to read as that of a plain tensor, so
        every attribute is read once, and the step then works with the parts.
        """
        self.refresh()
        found, of = {}, self._of.get
        for p in params:
            grad = p.grad
            if grad is not None:
                it = of(id(p))
                if it is None or it.part is not p._local_tensor:
                    it = self._read(p)
                found[id(p)] = it.part, getattr(grad, "_local_tensor", grad)
        return found

    def stand_in(self, p: Any) -> Tensor:
        """The part of ``p``, with what the optimizer's state had for it at :meth:`refresh`."""
        it = self._of.get(id(p))
        if it is None or it.part is not p._local_tensor:
            it = self._read(p)
        return it.part

    def refresh(self) -> None:
        """Take over what was put into the optimizer's state since the last step."""
        if self._agreed is None or not self._agreed.real.is_there():
            for it in list(self._of.values()):
                if it.p in self._state:
                    self._read(it.p)
                else:
                    self._forget(it)

    def settle(self) -> None:
        """Put new tensors of the parts into the optimizer's state, as parts of sharded tensors."""
        if self._agreed is not None and self._agreed.known.is_there():
            return
        for it in self._of.values():
            for key in [key for key in it.real if key not in it.known]:
                del it.real[key]
            for key, value in it.known.items():
                known = it.real.get(key)
                if known is None or not _is_same(_part_of(known, it.p, it.batch), value):
                    it.real[key] = _joined(value, it.p, key, it.batch)
        its = self._of.values()
        real = _Content([self._state, *(it.real for it in its)])
        self._agreed = _Agreement(real, _Content([it.known for it in its]))

    def _forget(self, it: _StandIn) -> None:
        del self[it.part], self._of[id(it.p)]

    def _read(self, p: Any) -> _StandIn:
        """The stand-in for ``p`` with what the optimizer's state has; a new one if ``p`` has moved."""
        it, part, real = self._of.get(id(p)), local(p), self._state[p]
        if it is None or it.p is not p or it.part is not part or it.real is not real:
            if it is not None:
                self._forget(it)
            it = self._of[id(p)] = _StandIn(p, part, is_cut(p), real, {})
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
    """What the optimizer's state held, and what its form in plain tensors held, when they agreed."""

    real: _Content
    known: _Content


class _Content:
    """The values of some dicts at one time."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts, self._values = dicts, _values(dicts)

    def is_there(self) -> bool:
        """Whether the dicts still have the same values."""
        now = _values(self._dicts)
        return len(now) == len(self._values) and all(map(operator.is_, now, self._values))


def _values(dicts: Sequence[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def is_cut(p: Tensor) -> bool:
    """Whether a sharded parameter is cut between its matrices, and not copied."""
    layout = Layout.of(p)
    return layout is not None and layout.cut != ()


def _part_of(value: Any, p: Any, batch: bool) -> Any:
    """This rank's part of a tensor in the state of ``p``, which may be cut between its matrices."""
    if not isinstance(value, Tensor):
        return value
    if is_sharded(value):
        return local(value)
    if batch and value.dim() > 0:  # a whole tensor of an older checkpoint, a matrix in each row
        layout = Layout.of(p)
        assert layout is not None
        each = len(value) // p.shape[0]
        start, stop = layout.boxes[layout.me][0]
        return value[each * start : each * stop]
    return value


def _joined(value: Any, p: Any, key: str, batch: bool) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape == local(p).shape and key == "momentum_buffer":
        return wrapped(value, p, p.placements, p.shape)
    if key == "momentum_scale" and p.shape[-1] % BLOCK == 0:
        return scale_as_sharded(value, p)
    if not batch:
        return value
    layout = Layout.of(p)
    assert layout is not None
    start, stop = layout.boxes[layout.me][0]
    total = value.shape[0] // max(1, stop - start) * p.shape[0]
    return wrapped(value, p, p.placements, (total, *value.shape[1:]))


def _is_same(a: Any, b: Any) -> bool:
    """Whether two tensors are the same memory."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


def localized(work: Work, state: LocalState, kept: list[int]) -> Work:
    """The parameters ``kept`` of ``work``, with the part of a sharded parameter in its place."""
    params, grads, views = [], [], []
    for i in kept:
        p = work.params[i]
        if is_sharded(p):
            if stored_dtype(work.group, p) == torch.int8 and is_cut(p):
                check_blocks(p, work.names[i])
            p = state.stand_in(p)
        params.append(p)
        grads.append(local(work.grads[i]))
        if work.views:
            views.append(view_of(work.group, p, work.names[i]))
    finite = None if work.finite is None else [work.finite[i] for i in kept]
    return Work(work.group, [work.names[i] for i in kept], params, grads, finite, views)
