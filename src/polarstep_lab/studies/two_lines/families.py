"""The families of models of this study, each with its data, its size and the length of a run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from polarstep_lab.data.cifar10 import load_cifar10
from polarstep_lab.data.shards import digest_of, open_shard, short_digest
from polarstep_lab.models.convnet import ConvNet, ConvNetConfig
from polarstep_lab.models.gpt import GPTConfig, Wrap
from polarstep_lab.studies.two_lines import models

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
        model.eval()
        for _, (x, y) in zip(range(batches or self.count), self.held_out(), strict=False):
            found.append(model.loss(x, y, wrap).double() / y.numel())  # type: ignore[operator]
        model.train()
        return [float(loss) for loss in found]


@dataclass(frozen=True)
class Family:
    """A model, its data and the length of a run.

    ``model`` takes a seed and the folder of the data, ``data`` this folder and a device. A search begins
    at ``rate`` times the rate at which it usually does.
    """

    title: str
    steps: int
    data: Callable[[Path, str], Data]
    model: Callable[[int, Path], nn.Module]
    rate: float = 1.0


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


def characters(folder: Path, name: str, length: int = 64) -> Data:
    """The bytes of a text, in batches of 16 windows; 40,000 after nine tenths are held out."""
    raw = np.fromfile(folder / name, np.uint8)
    whole = torch.from_numpy(raw.astype("int32"))
    cut = len(whole) * 9 // 10
    return text(
        whole[:cut],
        whole[cut : cut + 40_000],
        16,
        length,
        {"data_digest": short_digest(raw.tobytes())},
    )


def images(folder: Path, batch: int = 64, held_out: int = 1000) -> Data:
    """CIFAR-10, normalized and flipped at random.

    Validation is on the last training images, and the test on the first test images.
    """
    found = load_cifar10(folder)

    def normalized(pixels: Tensor) -> Tensor:
        return (pixels.float() / 255 - 0.47) / 0.25

    kept = len(found.train_labels) - held_out
    held = normalized(torch.cat([found.train_images[kept:], found.test_images[:held_out]]))
    labels = torch.cat([found.train_labels[kept:], found.test_labels[:held_out]])

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(1000 + seed)
        order = torch.randperm(kept, generator=generator)
        for step in range(steps):
            start = step * batch % (kept - batch)
            which = order[start : start + batch]
            x = normalized(found.train_images[which])
            flipped = torch.rand(batch, generator=generator) < 0.5
            yield torch.where(flipped[:, None, None, None], x.flip(3), x), found.train_labels[which]

    size = 500
    count = 2 * held_out // size

    def all_held() -> Iterator[Batch]:
        yield from zip(torch.split(held, size), torch.split(labels, size), strict=True)

    return Data(batches, all_held, count, {"data_digest": found.train_digest})


def convnet(seed: int, folder: Path) -> nn.Module:
    """The paper's network for CIFAR-10, narrower."""
    network = ConvNet(ConvNetConfig((32, 64, 64)), torch.Generator().manual_seed(seed))
    x, _ = next(images(folder).train(0, 1))
    network.whiten(x)
    return models.Classifier(network)


def pretrained(folder: Path) -> nn.Module:
    """A small GPT-2 that was trained on one text, to be tuned on another; kept in the folder."""
    model = models.GPT2(0, 256, 128, 2, 4, 64)
    path = folder / "two-lines-pretrained.pt"
    if path.exists():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    steps = 800
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    for x, y in characters(folder, "mobydick.txt").train(0, steps):
        loss = model.loss(x, y, lambda function: function) / y.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
    torch.save(model.state_dict(), path)
    return model


def small(title: str, model: Callable[[int, Path], nn.Module], rate: float = 1.0) -> Family:
    """A language model on the characters of Shakespeare's plays, for a CPU."""
    return Family(
        title, 300, lambda folder, _: characters(folder, "tinyshakespeare.txt"), model, rate
    )


def seen(title: str, model: Callable[[int, Path], nn.Module]) -> Family:
    """A network on CIFAR-10, for a CPU."""
    return Family(title, 200, lambda folder, _: images(folder), model)


VOCABULARY, WIDTH, LAYERS, CONTEXT = 50304, 768, 5, 1024


def tokens(title: str, model: Callable[[int, Path], nn.Module]) -> Family:
    """A language model on 24.6 million tokens of Wikipedia."""
    return Family(title, 1500, wikipedia, model)


FAMILIES = {
    "gpt": tokens(
        "GPT, untied, embedding of size 1",
        lambda seed, _: models.gpt(seed, 1.0, GPTConfig(VOCABULARY, WIDTH, LAYERS, 6, CONTEXT)),
    ),
    "gpt-small-embedding": tokens(
        "GPT, untied, embedding of size 0.02",
        lambda seed, _: models.gpt(seed, 0.02, GPTConfig(VOCABULARY, WIDTH, LAYERS, 6, CONTEXT)),
    ),
    "gpt2": tokens(
        "GPT-2: tied, LayerNorm, biases, fused qkv",
        lambda seed, _: models.GPT2(seed, VOCABULARY, WIDTH, LAYERS, 12, CONTEXT),
    ),
    "llama": tokens(
        "Llama: RMSNorm, SwiGLU, grouped queries, untied",
        lambda seed, _: models.Llama(seed, VOCABULARY, WIDTH, LAYERS, 12, 4, 2048, CONTEXT),
    ),
    "moe": small(
        "GPT-2 with 4 experts, 2 of them for each token",
        lambda seed, _: models.GPT2(seed, 256, 128, 2, 4, 64, experts=4),
    ),
    "lstm": small("LSTM", lambda seed, _: models.LSTM(256, 128)),
    "fine-tuning": small(
        "GPT-2, tuned on another text", lambda seed, folder: pretrained(folder), 0.1
    ),
    "lora": small(
        "GPT-2, LoRA on another text",
        lambda seed, folder: models.LoRA.beside(pretrained(folder), 8),
    ),
    "vit": seen(
        "Vision transformer",
        lambda seed, _: models.Classifier(models.VisionTransformer(seed, 96, 3, 4, 8)),
    ),
    "resnet18": seen(
        "ResNet-18, an eighth as wide", lambda seed, _: models.Classifier(models.ResNet18(8))
    ),
    "cnn": seen("The paper's network for CIFAR-10, narrower", convnet),
}
