"""The CIFAR-10 benchmark: the whitening CNN, judged by test accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from polarstep.rng import generator
from polarstep_lab.config import ConfigError, ImageData, RunConfig
from polarstep_lab.data.augment import ImageBatches, Normalizer, reflect_pad
from polarstep_lab.data.cifar10 import Cifar10, load_cifar10
from polarstep_lab.models.convnet import ConvNet, ConvNetConfig
from polarstep_lab.train.data_parallel import Network, parallelize, unwrapped
from polarstep_lab.train.passes import CapturedBackward, compiled
from polarstep_lab.train.ranks import Ranks
from polarstep_lab.train.tasks import NoiseBatches, Validation, autocast

__all__ = ["ImageTask"]


@dataclass(frozen=True, eq=False)
class ImageTask:
    """The network and three sets of images: for training, held out for validation, for the test."""

    config: RunConfig
    device: torch.device
    model: ConvNet
    network: Network
    """The model as training calls it, shared out among the ranks."""
    train: ImageBatches
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    source: Cifar10
    """The data set that the images are from."""
    ranks: Ranks = field(default_factory=Ranks)

    @classmethod
    def build(
        cls, config: RunConfig, device: torch.device, ranks: Ranks | None = None
    ) -> ImageTask:
        """Load the data, draw the weights from the seed and whiten with training images."""
        data = config.data
        assert isinstance(data, ImageData)
        assert isinstance(config.model, ConvNetConfig)
        ranks = ranks or Ranks()
        ranks.check_divides("data.batch_size", data.batch_size)
        cifar = load_cifar10(data.root)
        kept, held_out = cifar.split(data.held_out, data.split_seed)
        if data.train_images is not None:
            if not 0 < data.train_images <= len(kept):
                raise ConfigError(
                    f"data.train_images={data.train_images}: expected 1 to {len(kept)}, or null"
                )
            kept = kept[: data.train_images]
        if data.batch_size > len(kept):
            raise ConfigError(
                f"data.batch_size={data.batch_size}: expected at most {len(kept)}, the number of "
                "training images"
            )
        images = cifar.train_images[kept].to(device)
        normalize = Normalizer.of(images)
        train = ImageBatches(
            images,
            cifar.train_labels[kept].to(device),
            normalize,
            data.batch_size,
            config.seed,
            data.flip,
            data.translation,
        )
        config.schedule.check_steps(_steps(data, train))
        val = cifar.train_images[held_out].to(device), cifar.train_labels[held_out].to(device)
        test = cifar.test_images.to(device), cifar.test_labels.to(device)
        model = ConvNet(config.model, generator(config.seed, "weights")).to(device)
        model.whiten(normalize(images[: data.whitening_images]))
        if device.type == "cuda":
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        network = parallelize(model, model.groups, "forward", device, ranks)
        return cls(config, device, model, network, train, val, test, cifar, ranks)

    @property
    def data(self) -> dict[str, str]:
        """The numbers of training, held-out and test images, and digests of the data set's content.

        The held-out images are training images of the data set: which of them, the config says.
        """
        count = f"{len(self.train.images):,} images"
        others = f"{len(self.val[1]):,} held out, {len(self.test[1]):,} for the test"
        return {
            "data": f"CIFAR-10: {count}, {others}",
            "data_digest": self.source.train_digest,
            "held_out": f"CIFAR-10: {others}",
            "held_out_digest": self.source.test_digest,
        }

    @property
    def metric(self) -> Literal["test_accuracy"]:
        """The name of what :meth:`final` returns."""
        return "test_accuracy"

    @property
    def _data(self) -> ImageData:
        assert isinstance(self.config.data, ImageData)
        return self.config.data

    @property
    def steps(self) -> int:
        """The number of whole batches in all epochs."""
        return _steps(self._data, self.train)

    def stage_lr(self, step: int) -> float:
        """Always 1: there is one stage."""
        return 1.0

    def consumed(self, step: int) -> dict[str, int]:
        """The number of images in the first ``step`` steps."""
        return {"images": step * self._data.batch_size}

    def backward(self, step: int) -> Tensor:
        """Set the gradients of the summed loss, for which Airbench's learning rates are made."""
        return self._gradients(*self.ranks.share(*self.train.selection(step)))

    def noise_batches(self, seed: int, step: int, size: int | None = None) -> NoiseBatches:
        """Batches of all training images, shuffled and augmented by ``seed``."""
        runtime = self.config.runtime
        if size is not None:
            runtime = replace(runtime, compile=False)
        size = size or self._data.batch_size
        train = replace(self.train, batch_size=size, seed=seed)
        # Every rank computes whole batches here: they are measured, and not trained on.
        task = replace(
            self,
            config=replace(self.config, runtime=runtime),
            train=train,
            network=unwrapped(self.model),
            ranks=Ranks(),
        )
        return NoiseBatches(task.backward, size, 1 / size)

    @cached_property
    def _gradients(self) -> Callable[..., Tensor]:
        """:meth:`_compute_gradients`, as one CUDA graph if ``runtime.cuda_graph`` says so.

        With several ranks there is no graph, because passes that send are not captured.
        """
        graph = self.device.type == "cuda" and self.config.runtime.cuda_graph
        if not graph or self.ranks.parallel is not None:
            return self._compute_gradients
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return CapturedBackward(self._compute_gradients, trained)

    def _compute_gradients(self, *selection: Tensor) -> Tensor:
        """Set the gradients for a selection of images, and return its part of the mean loss."""
        images, labels = self.train.assemble(*selection)
        forward = compiled(_apply) if self.config.runtime.compile else _apply
        with _fastest_convolutions():
            loss = F.cross_entropy(
                self._logits(self.network, images, forward),
                labels,
                label_smoothing=self._data.label_smoothing,
                reduction="sum",
            )
            self.network.backward(loss)
        return loss.detach() / (len(labels) * self.ranks.count)

    @torch.no_grad()
    def validate(self) -> Validation:
        """Mean cross-entropy, without label smoothing, and accuracy on the held-out images."""
        self.model.eval()
        logits = self._predict(self.val[0], views=False)
        self.model.train()
        labels = self.val[1]
        return Validation(
            F.cross_entropy(logits.double(), labels).item(), accuracy=_accuracy(logits, labels)
        )

    @torch.no_grad()
    def test_metric(self, last: Validation) -> float:
        """Accuracy on the test images, from six views of each with ``test_time_augmentation``."""
        self.model.eval()
        logits = self._predict(self.test[0], views=self.config.evaluation.test_time_augmentation)
        self.model.train()
        return _accuracy(logits, self.test[1])

    def _predict(self, images: Tensor, *, views: bool) -> Tensor:
        """Logits of all images on every rank; each rank computes an equal part of them."""
        logits = partial(self._logits, unwrapped(self.model))
        outputs = []
        for batch in torch.split(self._own(images), self.config.evaluation.batch):
            normal = self.train.normalize(batch)
            outputs.append(_six_views(logits, normal) if views else logits(normal))
        return self.ranks.joined(torch.cat(outputs))[: len(images)]

    def _own(self, images: Tensor) -> Tensor:
        """This rank's part of ``images``; the last image fills up parts that would be shorter."""
        size = -(-len(images) // self.ranks.count)
        first = size * self.ranks.rank
        if first + size <= len(images):
            return images[first : first + size]
        numbers = torch.arange(first, first + size, device=images.device)
        return images[numbers.clamp(max=len(images) - 1)]

    def _logits(
        self,
        network: Network,
        images: Tensor,
        forward: Callable[[ConvNet, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits of normalized images, computed by ``forward`` or by default by the plain model."""
        if self.device.type == "cuda":
            images = images.to(memory_format=torch.channels_last)
        with _fastest_convolutions(), autocast(self.config.runtime, self.device):
            return network(forward or _apply, images)


def _fastest_convolutions() -> AbstractContextManager[object]:
    """A context in which cuDNN tries its algorithms for each new shape and keeps the fastest."""
    context: AbstractContextManager[object] = torch.backends.cudnn.flags(
        enabled=True, benchmark=True
    )
    return context


def _apply(model: ConvNet, images: Tensor) -> Tensor:
    logits: Tensor = model(images)
    return logits


def _six_views(logits: Any, images: Tensor) -> Tensor:
    """Airbench's test-time augmentation.

    The logits are averaged over the image and its translations by one pixel up-left and down-right,
    each with its mirror image. The untranslated pair has half of the weight.
    """
    size = images.shape[-1]
    padded = reflect_pad(images, 1)

    def both(x: Tensor) -> Tensor:
        pair: Tensor = (logits(x) + logits(x.flip(-1))) / 2
        return pair

    corners = [both(padded[..., i : i + size, i : i + size]) for i in (0, 2)]
    return (both(images) + (corners[0] + corners[1]) / 2) / 2


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return (logits.argmax(1) == labels).double().mean().item()


def _steps(data: ImageData, train: ImageBatches) -> int:
    return math.ceil(data.epochs * train.per_epoch)
