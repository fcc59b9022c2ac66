"""Parameters whose part on a rank consists of whole matrices: the step of one process runs on the part.

That is a stack of experts that is cut between experts, a copy of a whole parameter, and every parameter
of a world of one rank. The part of a ``DTensor`` stands in for it, a plain tensor, with a state of
plain tensors. So everything that a single process has runs here too, the fused step on a GPU included.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polarstep.distributed.layout import Layout, is_sharded, local, wrapped
from polarstep.optim.collect import State, Work
from polarstep.optim.groups import view_of

__all__ = ["LocalState", "is_cut", "localized"]


class LocalState(State):
    """The optimizer's state, with plain tensors for the parts that stand in for sharded parameters."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self._state = state
        self._real: dict[Tensor, Tensor] = {}  # the sharded parameter behind each part
        # The part of each sharded parameter, and whether it is cut between its matrices. to_local()
        # makes a new tensor at every call, but the plans and graphs of a step are bound to one.
        self._parts: dict[Tensor, tuple[Tensor, bool]] = {}

    def is_of(self, state: State) -> bool:
        """Whether ``state`` is the optimizer's state behind this; loading a checkpoint replaces it."""
        return self._state is state

    def __missing__(self, p: Tensor) -> dict[str, Any]:
        return self._state[p]

    def get(self, p: Tensor, default: Any = None) -> Any:
        """As for a dict; a plain parameter's state is the optimizer's own."""
        return self[p] if p in self else self._state.get(p, default)

    def stand_in(self, p: Any) -> Tensor:
        """The part of ``p``, with what the optimizer's state has for it."""
        part, batch = self._part_of(p)
        known = self[part]
        fresh = self._state[p]
        for key in [key for key in known if key not in fresh]:
            del known[key]
        for key, value in fresh.items():
            mine = _part_of(value, p, batch)
            if key not in known or not _is_same(known[key], mine):
                known[key] = mine
        return part

    def _part_of(self, p: Any) -> tuple[Tensor, bool]:
        """The part of ``p`` that stands for it, the same tensor as long as its memory is the same."""
        mine = local(p)
        if p in self._parts:
            part, batch = self._parts[p]
            if _is_same(part, mine) and part.stride() == mine.stride():
                return part, batch
            del self[part], self._real[part]
        self._parts[p] = mine, is_cut(p)
        self[mine], self._real[mine] = {}, p
        return self._parts[p]

    def write_back(self, part: Tensor) -> None:
        """Put new tensors of a part into the optimizer's state, as parts of sharded tensors."""
        p: Any = self._real[part]
        _, batch = self._parts[p]
        known, real = self[part], self._state[p]
        for key in [key for key in real if key not in known]:
            del real[key]
        for key, value in known.items():
            if key not in real or not _is_same(_part_of(real[key], p, batch), value):
                real[key] = _joined(value, p, key, batch)


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
            p = state.stand_in(p)
        params.append(p)
        grads.append(local(work.grads[i]))
        if work.views:
            views.append(view_of(work.group, p, work.names[i]))
    finite = None if work.finite is None else [work.finite[i] for i in kept]
    return Work(work.group, [work.names[i] for i in kept], params, grads, finite, views)
