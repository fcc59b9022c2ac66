"""Watch a running optimizer without changing its steps.

A :class:`Monitor` samples every N-th step of a :class:`polarstep.Muon` and records, per matrix: γ and
ν of the polar step, how much of the momentum the sketch captured, stable and effective rank, and per
parameter the relative length of its update and the tail index of its gradient noise. Between samples
it costs one comparison a step. It only reads what the optimizer passes to hooks and draws no random
numbers, so the trajectory is the same bit for bit with and without a monitor.

    monitor = Monitor(optimizer, every=100, jsonl="gamma.jsonl", tensorboard=SummaryWriter())

The tail index is Hill's estimate from the entries of G_k − G_{k−1}, with G_k the gradient of step
k. Between neighbouring steps the true gradient hardly changes, and the difference of two noises has
the same tail as each. But entries are not independent, and the paper's assumption is about norms of
the noise of single examples. The index indicates a heavy tail; it proves nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from polarstep.bucket import Observed
from polarstep.certificate.cheap import cheap_certificate
from polarstep.certificate.exact import measure, update_ratio
from polarstep.checked_values import check_integer
from polarstep.groups import labelled_params
from polarstep.optimizer import Muon
from polarstep.ranks.layout import is_sharded, whole
from polarstep.theory.tail_index import SMALLEST, hill

__all__ = ["Monitor", "MonitorRow", "ScalarWriter"]

MonitorRow = dict[str, Any]

TAIL_ENTRIES = 100_000
"""Most entries of a gradient difference that a tail index is read from."""


class ScalarWriter(Protocol):
    """The part of ``torch.utils.tensorboard.SummaryWriter`` that a monitor uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Record one number."""


class Monitor:
    """Samples an optimizer every ``every`` steps; the module's docstring says what is measured.

    It gathers parameters that are sharded over ranks, so every rank needs a monitor. Give a file or a
    writer to the monitor of one rank only.

    ``rows`` is a list of all rows so far, about 1 kB each. With ``jsonl`` they are in the file as well.
    A long run may then free them now and then by ``monitor.rows.clear()``.

    Args:
        optimizer: any :class:`polarstep.Muon`, such as :func:`polarstep.muon_for` gives.
        every: sample the steps 0, N, 2N, …
        jsonl: a file to append rows to, one JSON object a line. Its folder is made if need be.
        tensorboard: a ``SummaryWriter``, or anything with its ``add_scalar``.
        exact: γ and ν from singular values, with ranks and captured energy. ``False`` takes the
            cheap certificate's bounds and leaves the spectral columns out, for large models.
        select: which parameters to watch, by name; by default all.
        tail: whether to estimate tail indices, which takes a copy of the gradients before each
            sampled step.
    """

    def __init__(
        self,
        optimizer: Muon,
        every: int = 100,
        *,
        jsonl: str | Path | None = None,
        tensorboard: ScalarWriter | None = None,
        exact: bool = True,
        select: Callable[[str], bool] | None = None,
        tail: bool = True,
    ) -> None:
        if not isinstance(optimizer, Muon):
            remedy = "polarstep.muon_for(model) makes one"
            if isinstance(getattr(optimizer, "optimizer", None), Muon):
                remedy = "it wraps a polarstep.Muon: give optimizer.optimizer"
            raise TypeError(
                f"optimizer is a {type(optimizer).__name__}: expected a polarstep.Muon, which has polar "
                f"steps to measure; {remedy}"
            )
        check_integer("every", every, 1, "100 samples one step in a hundred")
        if select is not None and not callable(select):
            raise TypeError(
                f"select={select!r}: expected a function of a parameter's name, as "
                'lambda name: name.startswith("blocks.0.")'
            )
        if tensorboard is not None and not hasattr(tensorboard, "add_scalar"):
            raise TypeError(
                f"tensorboard={tensorboard!r}: expected a writer with add_scalar, as "
                "torch.utils.tensorboard.SummaryWriter(folder)"
            )
        self.optimizer, self.every = optimizer, every
        self.rows: list[MonitorRow] = []
        self._exact, self._select, self._tail = exact, select, tail
        self._tensorboard = tensorboard
        self._file = None
        if jsonl is not None:
            path = Path(jsonl)
            path.parent.mkdir(parents=True, exist_ok=True)
            # Rows are appended to the complete lines; a run that was killed may have left half a line.
            complete = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
            path.touch()
            os.truncate(path, complete)
            self._file = path.open("a", encoding="utf-8")
        self._step = _steps_of(optimizer)
        self._labels: dict[int, str] = {}  # the names of the chosen parameters, by their ids
        self._before: dict[Tensor, Tensor] = {}
        self._previous: dict[Tensor, Tensor] = {}
        self._pending: list[MonitorRow] = []
        self._polar: RemovableHandle | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._prepare),
            optimizer.register_step_post_hook(self._record),
            optimizer.register_load_state_dict_post_hook(self._go_on),
        ]

    def close(self) -> None:
        """Take the hooks off, free copies of weights and gradients, and close the file; rows stay."""
        for handle in self._handles:
            handle.remove()
        self._stop_looking()
        self._before, self._previous = {}, {}
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.no_grad()
    def _prepare(self, optimizer: object, args: object, kwargs: object) -> None:
        self._stop_looking()  # a step that raised an error has not called _record
        if self._step % self.every:
            return
        self._labels = {id(p): name for name, p in self._watched()}
        self._before = {p: p.detach().clone() for _, p in self._watched()}
        # Registered for sampled steps only: with a hook the optimizer cannot replay its graph.
        shared = any(is_sharded(p) for _, p in self._watched())
        self._polar = self.optimizer.register_polar_hook(self._look, everywhere=shared)

    def _stop_looking(self) -> None:
        """Take the polar hook off, and forget what it has measured."""
        if self._polar is not None:
            self._polar.remove()
        self._polar, self._pending = None, []

    @torch.no_grad()
    def _look(self, bucket: Observed) -> None:
        # A plain tensor that stands in for a sharded parameter has no label, but the same name.
        names = [
            self._labels.get(id(p), name)
            for p, name in zip(bucket.params, bucket.names, strict=True)
        ]
        chosen = [i for i, name in enumerate(names) if self._chooses(name)]
        if not chosen:
            return
        columns: dict[str, Tensor]
        if self._exact:
            found = measure(bucket.M[chosen], bucket.T[chosen])
            columns = vars(found)
        else:
            known = bucket.map, bucket.factors, bucket.captured
            bound = cheap_certificate(bucket.M, bucket.T, *known)
            columns = {"gamma": bound.gamma[chosen], "nu": bound.nu[chosen]}
        listed = {name: values.tolist() for name, values in columns.items()}
        count: dict[str, int] = {}
        for place, i in enumerate(chosen):
            name = names[i]
            block = count[name] = count.get(name, -1) + 1
            values = {column: listed[column][place] for column in listed}
            self._pending.append({"parameter": name, "block": block, **values})

    @torch.no_grad()
    def _record(self, optimizer: object, args: object, kwargs: object) -> None:
        step, self._step = self._step, self._step + 1
        if step % self.every == 0:
            self._finish(step)
            self._stop_looking()
            self._before = {}
        self._previous = {}
        if self._tail and self._step % self.every == 0:
            self._previous = {
                p: _gradient(p).clone() for _, p in self._watched() if self._has_gradient(p)
            }

    def _go_on(self, optimizer: object) -> None:
        """Count on from the step of a checkpoint that was loaded; no gradient came before it."""
        self._step, self._previous = _steps_of(self.optimizer), {}

    def _finish(self, step: int) -> None:
        """Join the polar hook's measurements with those of each parameter, and write the rows."""
        seen: dict[str, list[MonitorRow]] = {}
        for row in self._pending:
            seen.setdefault(row["parameter"], []).append(row)
        for name, p in self._watched():
            if not self._has_gradient(p):
                continue
            common: MonitorRow = {"step": step, "parameter": name, "shape": list(p.shape)}
            own = self._tail_of(p)
            before = self._before[p]
            ratio = update_ratio(whole(p.detach() - before), whole(before))
            own = {"update_ratio": float(ratio), **own}
            matrices = seen.get(name, [{"block": 0}])
            for row in matrices:
                self._write(common | row | own)

    def _tail_of(self, p: Tensor) -> dict[str, float]:
        if p not in self._previous:
            return {}
        difference = whole(_gradient(p) - self._previous[p]).flatten()
        difference = difference[:: max(1, difference.numel() // TAIL_ENTRIES)]
        if int(torch.count_nonzero(difference)) <= SMALLEST:
            return {}
        if not bool(torch.isfinite(difference).all()):
            return {}
        try:
            found = hill(difference)
        except ValueError:  # the largest entries are one number, as the gradients of an L1 loss are
            return {}
        return {"tail_index": found.alpha, "tail_low": found.low, "tail_high": found.high}

    def _write(self, row: MonitorRow) -> None:
        self.rows.append(row)
        if self._file is not None:
            finite = {key: None if _is_unbounded(value) else value for key, value in row.items()}
            self._file.write(json.dumps(finite, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        if self._tensorboard is not None:
            name = row["parameter"] if row["block"] == 0 else f"{row['parameter']}[{row['block']}]"
            for column, value in row.items():
                if isinstance(value, float):
                    self._tensorboard.add_scalar(f"{column}/{name}", value, row["step"])

    def _has_gradient(self, p: Tensor) -> bool:
        """Whether some rank has a gradient of ``p``: all ranks gather it then, or none."""
        return self.optimizer._over_ranks.has_gradient(p)

    def _watched(self) -> Iterator[tuple[str, Tensor]]:
        """The chosen parameters; those without names are called as in the routing table."""
        for params in labelled_params(self.optimizer.param_groups):
            for name, p in params:
                if self._chooses(name):
                    yield name, p

    def _chooses(self, name: str) -> bool:
        return self._select is None or self._select(name)


def _is_unbounded(value: object) -> bool:
    """Whether ``value`` is a NaN or an infinity, which JSON does not have."""
    return isinstance(value, float) and not math.isfinite(value)


def _gradient(p: Tensor) -> Tensor:
    """The gradient of ``p``; zeros where other ranks alone have one, as in a step."""
    return torch.zeros_like(p) if p.grad is None else p.grad.detach()


def _steps_of(optimizer: Muon) -> int:
    """How many steps ``optimizer`` has made, those before a checkpoint included."""
    return max((group.get("step", 0) for group in optimizer.param_groups), default=0)
