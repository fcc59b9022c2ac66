"""Checkpoints: everything a run needs to go on as if it had never been interrupted.

Data, schedules and sketches are functions of the seed and the step, so a checkpoint holds the
weights, the optimizer's state, the step, the time spent, and how long the logs were.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from polarstep.storage import StorageError, write_atomically

__all__ = ["Progress", "load_checkpoint", "save_checkpoint"]

VERSION = 1


@dataclass(frozen=True)
class Progress:
    """How far a run has come: steps done, seconds spent, and the logs' lengths in bytes."""

    step: int = 0
    seconds: float = 0.0
    metrics_bytes: int = 0
    gamma_bytes: int = 0
    noise_bytes: int = 0


def save_checkpoint(
    path: Path, model: nn.Module, optimizer: Optimizer, progress: Progress, config: dict[str, Any]
) -> None:
    """Replace ``path`` by a checkpoint of the present state, atomically."""
    content = {
        "version": VERSION,
        "progress": progress.__dict__,
        "config": config,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    write_atomically(path, lambda file: torch.save(content, file))


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer,
    config: dict[str, Any],
    device: torch.device,
) -> Progress:
    """Put the state of ``path`` into ``model`` and ``optimizer``; refuse another run's."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise StorageError(
            f"{path} cannot be read ({error}); start the run anew with --force"
        ) from error
    if content["version"] != VERSION:
        raise StorageError(
            f"{path} has version {content['version']}, expected {VERSION}: resume it with the "
            "version of polarstep that wrote it, or start anew with --force"
        )
    if content["config"] != config:
        changed = ", ".join(sorted(_differences(content["config"], config)))
        raise StorageError(
            f"{path} belongs to a run with another config ({changed} differ): resume with the "
            "settings it was started with, or start anew in another directory"
        )
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    return Progress(**content["progress"])


def _differences(a: Any, b: Any, path: str = "") -> list[str]:
    """The leaves at which two trees of plain data differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            difference
            for key in a.keys() | b.keys()
            for difference in _differences(a.get(key), b.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if a == b else [path]
