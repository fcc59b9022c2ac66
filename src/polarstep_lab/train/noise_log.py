"""``noise.jsonl``: the gradient noise of a run, measured at a few of its steps.

At each of these steps the weights are held still and gradients are drawn from the training data
(:mod:`polarstep_lab.checks.noise`), in an order independent of the run's, in two units:

``"batch"``     batches as the run trains on them: the G_k of the optimizer.
``"example"``   single images or sequences: the G_k^i of the paper's assumption. Batch norm makes
                examples depend on each other, so it is fixed at the statistics of the batches
                drawn before; ∇f is then the gradient of that network.

A row describes one matrix, all ``"hidden"`` matrices (which Muon updates) or ``"all"`` parameters.
Norms are of gradients of the mean loss, even where the loss of the run is a sum. A ``null`` for
``alpha`` or an end of its interval means infinity. Numbers are rounded to six digits, more than
their accuracy. The log does not change the run: it is the same bit for bit with and without.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from polarstep.rng import key_to_seed
from polarstep.routing.anatomy import dissect
from polarstep.routing.roles import find_role
from polarstep_lab.checks.noise import NoiseDraws, draw_noise, held_still, mean_gradient
from polarstep_lab.config import RunConfig
from polarstep_lab.storage import JsonLines, read_lines
from polarstep_lab.train.ranks import Ranks
from polarstep_lab.train.tasks import Task

__all__ = ["NoiseLog", "points_along"]


class NoiseLog:
    """Measures the noise at the chosen steps of a run and appends a row for each parameter and unit."""

    def __init__(
        self, path: Path, length: int, config: RunConfig, task: Task, ranks: Ranks
    ) -> None:
        """Continue the log after its first ``length`` bytes; rank 0 alone writes it."""
        self._log = JsonLines(path, length) if ranks.first else None
        self._config, self._task = config, task
        assert config.runtime.noise.points is not None
        done = ranks.on_rank_zero(lambda: {row["step"] for row in read_lines(path)})
        self._due = set(points_along(task.steps, config.runtime.noise.points)) - done
        self._hidden = _hidden(task.model)

    @classmethod
    def attach(
        cls, path: Path, length: int, config: RunConfig, task: Task, ranks: Ranks
    ) -> NoiseLog | None:
        """A log if ``config.runtime.noise`` asks for measurements, else None."""
        if config.runtime.noise.points is None:
            return None
        return cls(path, length, config, task, ranks)

    def measure(self, step: int) -> float:
        """Measure if ``step`` is one of the chosen steps; return the seconds that took."""
        if step not in self._due:
            return 0.0
        began = time.perf_counter()
        with held_still(self._task.model):
            rows = list(self._rows(step))
        gc.collect()  # a task and its captured graph form a cycle that holds GPU memory
        if self._log is not None:
            for row in rows:
                self._log.write(_rounded(row))
        self._due.remove(step)
        return time.perf_counter() - began

    @property
    def length(self) -> int:
        """The length of the log in bytes, after writing all of it to disk."""
        return 0 if self._log is None else self._log.sync()

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()

    def _rows(self, step: int) -> Iterator[dict[str, Any]]:
        counts, model = self._config.runtime.noise, self._task.model
        batch = self._task.noise_batches(self._seed(step, "batch"), step)
        model.train()
        mean = mean_gradient(
            model, batch.backward, range(counts.reference), batch.size, batch.scale
        )
        last = counts.reference + counts.batches
        yield from self._summaries(
            step,
            "batch",
            draw_noise(
                model, batch.backward, range(counts.reference, last), batch.size, mean, batch.scale
            ),
        )
        if not counts.examples:
            return
        if any(isinstance(module, _BatchNorm) for module in model.modules()):
            model.eval()
            batch = self._task.noise_batches(self._seed(step, "reference"), step, batch.size)
            mean = mean_gradient(
                model, batch.backward, range(counts.reference), batch.size, batch.scale
            )
        one = self._task.noise_batches(self._seed(step, "example"), step, 1)
        yield from self._summaries(
            step,
            "example",
            draw_noise(model, one.backward, range(counts.examples), 1, mean, one.scale),
        )

    def _summaries(self, step: int, unit: str, drawn: NoiseDraws) -> Iterator[dict[str, Any]]:
        shapes = {name: list(p.shape) for name, p in self._task.model.named_parameters()}
        common = {
            "step": step,
            "unit": unit,
            "examples": drawn.size,
            "draws": drawn.count,
            "reference": drawn.reference,
        }
        groups = {"all": drawn.names, "hidden": [n for n in drawn.names if n in self._hidden]}
        for group, names in groups.items():
            if names:
                yield common | {"parameter": group} | drawn.summary(names)
        for name in drawn.names:
            if len(shapes[name]) > 1:
                row = {"parameter": name, "shape": shapes[name]}
                yield common | row | drawn.summary([name])

    def _seed(self, step: int, unit: str) -> int:
        return key_to_seed(self._config.seed, "noise", step, unit)


def points_along(steps: int, count: int) -> list[int]:
    """``count`` steps from the first to the last, denser at the start, where most changes.

    >>> points_along(1000, 8)
    [0, 3, 23, 79, 187, 364, 630, 1000]
    """
    return sorted({round(steps * (i / (count - 1)) ** 3) for i in range(count)})


def _hidden(model: nn.Module) -> frozenset[str]:
    """The names of the matrices that Muon would update, whatever the method of the run."""
    anatomy = dissect(model)
    return frozenset(
        site.name for site in anatomy.sites if find_role(site, anatomy).role == "hidden"
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
