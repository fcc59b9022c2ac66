"""The families of models of ``two_lines.py``, each with its data, its size and the length of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import two_lines_models as models
from polarstep_lab.data.shards import digest_of, open_shard
from polarstep_lab.models.gpt import GPTConfig, Wrap

__all__ = ["FAMILIES", "Data", "Family"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Data:
    """Batches of inputs and targets.

    ``train`` takes a seed and a number of steps. ``held_out`` is in the order of the text; its first
    half is for choosing, its second half for reporting.
    """

    train: Callable[[int, int], Iterator[Batch]]
    held_out: Callable[[], Iterator[Batch]]
    count: int
    digests: dict[str, str]

    @torch.no_grad()
    def losses(self, model: nn.Module, wrap: Wrap, batches: int | None = None) -> list[float]:
        """The mean loss of each of the first held-out batches."""
        found = []
        for _, (x, y) in zip(range(batches or self.count), self.held_out(), strict=False):
            found.append(model.loss(x, y, wrap).double() / y.numel())  # type: ignore[operator]
        return [float(loss) for loss in found]


@dataclass(frozen=True)
class Family:
    """A model, its data and the length of a run; perplexity is told of text alone."""

    title: str
    steps: int
    data: Callable[[Path, str], Data]
    model: Callable[[int], nn.Module]


def halves(losses: list[float]) -> dict[str, float]:
    """The mean over all held-out batches, and over each half."""
    half = len(losses) // 2
    parts = {"held_out": losses, "validation": losses[:half], "test": losses[half:]}
    return {name: statistics.fmean(part) for name, part in parts.items()}


def text(train: Tensor, val: Tensor, batch: int, length: int, digests: dict[str, str]) -> Data:
    """Text cut into windows; a seed decides their order, and each window is read at most once."""
    within = torch.arange(length + 1, device=train.device)

    def windows(tokens: Tensor, which: Tensor) -> Batch:
        x = tokens[which[:, None] * length + within].long()
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        found = (len(train) - 1) // length
        if found < steps * batch:
            raise SystemExit(
                f"{found} windows of text: expected {steps * batch}, for {steps} steps"
            )
        order = torch.randperm(found, generator=torch.Generator().manual_seed(1000 + seed))
        order = order.to(train.device)
        for step in range(steps):
            yield windows(train, order[step * batch : (step + 1) * batch])

    count = (len(val) - 1) // length // batch

    def held_out() -> Iterator[Batch]:
        for i in range(count):
            yield windows(val, torch.arange(i * batch, (i + 1) * batch, device=val.device))

    return Data(batches, held_out, count, digests)


def wikipedia(folder: Path, device: str) -> Data:
    """GPT-2 tokens of a slice of Wikipedia in sequences of 1024."""
    shards = [folder / "wiki_train_000001.bin", folder / "wiki_val_000000.bin"]
    train, val = (torch.from_numpy(open_shard(path).astype("int32")).to(device) for path in shards)
    names = ("data_digest", "held_out_digest")
    digests = {name: digest_of([path]) for name, path in zip(names, shards, strict=True)}
    return text(train, val, 16, 1024, digests)


VOCABULARY, WIDTH, LAYERS, CONTEXT = 50304, 768, 5, 1024


def tokens(title: str, model: Callable[[int], nn.Module]) -> Family:
    """A language model on 24.6 million tokens of Wikipedia."""
    return Family(title, 1500, wikipedia, model)


FAMILIES = {
    "gpt": tokens(
        "GPT, untied, embedding of size 1",
        lambda seed: models.gpt(seed, 1.0, GPTConfig(VOCABULARY, WIDTH, LAYERS, 6, CONTEXT)),
    ),
    "gpt-small-embedding": tokens(
        "GPT, untied, embedding of size 0.02",
        lambda seed: models.gpt(seed, 0.02, GPTConfig(VOCABULARY, WIDTH, LAYERS, 6, CONTEXT)),
    ),
    "gpt2": tokens(
        "GPT-2: tied, LayerNorm, biases, fused qkv",
        lambda seed: models.GPT2(seed, VOCABULARY, WIDTH, LAYERS, 12, CONTEXT),
    ),
    "llama": tokens(
        "Llama: RMSNorm, SwiGLU, grouped queries, untied",
        lambda seed: models.Llama(seed, VOCABULARY, WIDTH, LAYERS, 12, 4, 2048, CONTEXT),
    ),
}
