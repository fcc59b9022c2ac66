"""The interface between the training loop and a benchmark: gradients, validation, final figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from polarstep_lab.config import RuntimeConfig
from polarstep_lab.models.convnet import ConvNet
from polarstep_lab.models.gpt import GPT

__all__ = ["NoiseBatches", "Task", "Validation", "autocast"]


@dataclass(frozen=True)
class Validation:
    """The validation loss and, according to the benchmark, perplexity or accuracy."""

    loss: float
    perplexity: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class NoiseBatches:
    """Any number of batches independent of the run's, whose gradients are to be measured."""

    backward: Callable[[int], Tensor]
    """Add the gradients of batch number i to the model's."""
    size: int
    """Examples in a batch: images or sequences."""
    scale: float
    """The factor that turns these gradients into gradients of the mean loss per example."""


class Task(Protocol):
    """A benchmark on a device, ready to be trained.

    Its only state is the model; everything else is a function of the config and the step.
    """

    @property
    def metric(self) -> Literal["test_perplexity", "test_accuracy"]:
        """The name of what :meth:`final` returns."""

    @property
    def model(self) -> GPT | ConvNet:
        """The network, on its device."""

    @property
    def data(self) -> Mapping[str, str]:
        """What data the run reads, for the record of its environment.

        ``"data"`` describes the training data in a few words and ``"held_out"`` that of validation and
        test. ``"data_digest"`` and ``"held_out_digest"`` are made of the content of the files of both.
        """

    @property
    def steps(self) -> int:
        """How many steps the run has."""

    def backward(self, step: int) -> Tensor:
        """Add the gradients of step ``step`` to the model's.

        Returns the mean loss. With several ranks each returns its part, and the parts add up to it.
        """

    def noise_batches(self, seed: int, step: int, size: int | None = None) -> NoiseBatches:
        """Batches like the batch of ``step``, in an order drawn from ``seed``, for the same model.

        Batches of another ``size`` are computed without compiling, which would take too long for a
        few batches.
        """

    def stage_lr(self, step: int) -> float:
        """The learning-rate multiplier of the stage that ``step`` is in."""

    def consumed(self, step: int) -> dict[str, int]:
        """How many tokens or images the first ``step`` steps train on."""

    def validate(self) -> Validation:
        """Loss and metric on held-out data."""

    def test_metric(self, last: Validation) -> float:
        """The figure by which the run is judged, on test data by which no setting was chosen.

        The loop calls this once, after the last step. ``last`` is the last validation.
        """


def autocast(config: RuntimeConfig, device: torch.device) -> AbstractContextManager[object]:
    """The configured precision; ``"auto"`` is bfloat16 products on a GPU and float32 on a CPU."""
    precision = config.precision
    if precision == "auto":
        precision = "bfloat16" if device.type == "cuda" else "float32"
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)
