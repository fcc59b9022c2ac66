"""A run that is saved and loaded in its middle goes on bit for bit as the run that was not."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import torch
from tests.fuzz.cases import Choices, Outcome
from tests.fuzz.configurations import Configuration, Run, random_configuration, shrunk

__all__ = ["continues_otherwise", "tried"]

DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16)


def continues_otherwise(configuration: Configuration) -> list[tuple[str, str]]:
    """Where a copy of a run, by each way to copy, differs from the run itself at the end."""
    found = []
    for way in COPIES:
        given = _without_gaps(configuration) if way == "deepcopy" else configuration
        whole, middle = Run(given), max(1, configuration.steps // 2)
        for step in range(middle):
            whole.step(step)
        other = COPIES[way](whole, configuration)
        for step in range(middle, configuration.steps):
            whole.step(step)
            other.step(step)
        for what, left, right in _parts(whole, other):
            if not _are_the_same(left, right):
                found.append(
                    (f"{way} goes on alike", f"{what} differs after {configuration.steps} steps")
                )
                break
    return found


def _without_gaps(configuration: Configuration) -> Configuration:
    """The configuration with dense parameters: torch's deepcopy closes gaps in memory.

    A dense parameter is updated by another routine of torch, whose last digit may differ.
    """
    groups = [
        replace(
            group,
            parameters=tuple(
                replace(each, layout="contiguous") if each.layout == "strided" else each
                for each in group.parameters
            ),
        )
        for group in configuration.groups
    ]
    return replace(configuration, groups=tuple(groups))


def _by_state_dict(run: Run, configuration: Configuration) -> Run:
    return _loaded(copy.deepcopy(run.optimizer.state_dict()), run, configuration)


def _by_file(run: Run, configuration: Configuration) -> Run:
    file = io.BytesIO()
    torch.save(run.optimizer.state_dict(), file)
    file.seek(0)
    return _loaded(torch.load(file, weights_only=True), run, configuration)


def _loaded(state: dict[str, Any], run: Run, configuration: Configuration) -> Run:
    other = Run(configuration)
    with torch.no_grad():
        for p, q in zip(other.tensors, run.tensors, strict=True):
            p.copy_(q)
    other.optimizer.load_state_dict(state)
    return other


def _by_deepcopy(run: Run, configuration: Configuration) -> Run:
    return copy.deepcopy(run)


def _by_pickle(run: Run, configuration: Configuration) -> Run:
    return pickle.loads(pickle.dumps(run))


COPIES = {
    "state_dict": _by_state_dict,
    "torch.save with weights_only=True": _by_file,
    "deepcopy": _by_deepcopy,
    "pickle": _by_pickle,
}


def _parts(a: Run, b: Run):
    for i, (p, q) in enumerate(zip(a.tensors, b.tensors, strict=True)):
        yield f"parameter {i}", p.detach(), q.detach()
        ours, others = a.optimizer.state[p], b.optimizer.state[q]
        yield f"the names in the state of parameter {i}", sorted(ours), sorted(others)
        for name in ours:
            yield f"{name} of parameter {i}", ours[name], others.get(name)
    for i, (g, h) in enumerate(
        zip(a.optimizer.param_groups, b.optimizer.param_groups, strict=True)
    ):
        for key in g.keys() - {"params"}:
            yield f"{key} of group {i}", g[key], h.get(key)


def _are_the_same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return (
            same
            and torch.equal(a.isnan(), b.isnan())
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    return bool(a == b)


def tried(choose: Choices) -> Outcome:
    """One configuration, copied in every way."""
    configuration = random_configuration(choose, DTYPES)
    outcome = Outcome()
    outcome.tried["checkpoints"] += len(COPIES)
    outcome.violations += shrunk(configuration, continues_otherwise)
    return outcome
