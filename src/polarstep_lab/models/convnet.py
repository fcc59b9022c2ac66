"""The compact whitening CNN of the Airbench 94% recipe for CIFAR-10.

Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024): a frozen 2×2 convolution that
whitens patches, three groups of two 3×3 convolutions with max pooling, batch norm without scale and
GELU, and a linear head whose output is divided by its width. With the published widths it has
1,971,352 trainable parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarstep import kernels

__all__ = ["ConvNet", "ConvNetConfig"]


@dataclass(frozen=True)
class ConvNetConfig:
    """The shape of the network.

    ``widths`` are the channels of the three groups. ``norm_momentum`` is the share of the running
    statistics that batch norm keeps at each step.
    """

    widths: tuple[int, int, int] = (64, 256, 256)
    classes: int = 10
    norm_momentum: float = 0.6
    whitening_eps: float = 5e-4

    def __post_init__(self) -> None:
        if len(self.widths) != 3 or min(self.widths) < 1:
            raise ValueError(
                f"model.widths={self.widths}: expected three positive widths, as (64, 256, 256)"
            )
        if not 0 <= self.norm_momentum < 1:
            raise ValueError(
                f"model.norm_momentum={self.norm_momentum}: expected 0 ≤ value < 1, as 0.6"
            )
        if self.whitening_eps <= 0:
            raise ValueError(
                f"model.whitening_eps={self.whitening_eps}: expected a positive number, as 5e-4"
            )


class _Conv(nn.Conv2d):
    """A convolution whose weight :meth:`ConvNet.initialize` draws."""

    def reset_parameters(self) -> None:
        """Do nothing: torch's initialization would advance the global generator."""


class _Linear(nn.Linear):
    """A linear map whose weight :meth:`ConvNet.initialize` draws."""

    def reset_parameters(self) -> None:
        """Do nothing."""


class Group(nn.Module):
    """Convolution, 2×2 pooling, norm, GELU, convolution, norm, GELU, with ``width`` channels."""

    def __init__(self, channels: int, width: int, norm_momentum: float) -> None:
        super().__init__()
        self.conv1 = _Conv(channels, width, 3, padding=1, bias=False)
        self.norm1 = _batch_norm(width, norm_momentum)
        self.conv2 = _Conv(width, width, 3, padding=1, bias=False)
        self.norm2 = _batch_norm(width, norm_momentum)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (batch, channels, 2h, 2w) to (batch, width, h, w)."""
        x = F.gelu(self.norm1(_halved(self.conv1(x))))
        return F.gelu(self.norm2(self.conv2(x)))


def _halved(x: Tensor) -> Tensor:
    """2×2 max pooling."""
    if not x.is_cuda or not kernels.available(x.device) or torch.compiler.is_compiling():
        return F.max_pool2d(x, 2)
    from polarstep_lab.models.pool_kernel import max_pool

    return max_pool(x)


def _batch_norm(width: int, kept: float) -> nn.BatchNorm2d:
    """Batch norm with a bias and no scale; torch's ``momentum`` is the share of the new statistics."""
    norm = nn.BatchNorm2d(width, eps=1e-12, momentum=1 - kept)
    norm.weight.requires_grad_(False)
    return norm


class ConvNet(nn.Module):
    """The network; call :meth:`whiten` with training images before training."""

    def __init__(self, config: ConvNetConfig, generator: torch.Generator | None = None) -> None:
        """Build the network and draw its weights."""
        super().__init__()
        self.config = config
        # Filters ±v for each eigenvector v of 2×2 patches with three channels.
        whitened = 2 * 3 * 2 * 2
        self.whitening = _Conv(3, whitened, 2, bias=True)
        self.whitening.weight.requires_grad_(False)
        channels = (whitened, *config.widths[:2])
        self.groups = nn.ModuleList(
            Group(before, after, config.norm_momentum)
            for before, after in zip(channels, config.widths, strict=True)
        )
        self.head = _Linear(config.widths[-1], config.classes, bias=False)
        if self.head.weight.device.type != "meta":
            self.initialize(generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights; the first filters of each convolution are set to the identity."""
        for module in self.modules():
            if isinstance(module, _Conv):
                bound = 1 / math.sqrt(module.weight[0].numel())
                module.weight.uniform_(-bound, bound, generator=generator)
                if module.bias is not None:
                    module.bias.uniform_(-bound, bound, generator=generator)
        for group in self.groups:
            assert isinstance(group, Group)
            for conv in (group.conv1, group.conv2):
                nn.init.dirac_(conv.weight[: conv.in_channels])
        self.head.weight.normal_(generator=generator)

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the first convolution so that its outputs on patches of ``images`` are uncorrelated.

        Its filters are ±v/√(λ + ε), for the eigenvectors v and eigenvalues λ of the covariance of
        2×2 patches.
        """
        weight = self.whitening.weight
        patches = F.unfold(images.float(), weight.shape[2:]).transpose(1, 2)
        flat = patches.reshape(-1, patches.shape[-1]).double()
        # 12×12: not worth loading the GPU's solver library.
        covariance = (flat.mT @ flat / len(flat)).cpu()
        values, vectors = torch.linalg.eigh(covariance)
        filters = vectors.mT / (values + self.config.whitening_eps).sqrt()[:, None]
        filters = filters.reshape(-1, *weight.shape[1:]).to(weight)
        weight.copy_(torch.cat([filters, -filters]))

    def matrix_shapes(self) -> list[tuple[int, int]]:
        """The shape of every trained filter bank as a matrix, out × in·kh·kw."""
        return [
            (p.shape[0], p.numel() // p.shape[0])
            for p in self.parameters()
            if p.ndim == 4 and p.requires_grad
        ]

    def forward(self, images: Tensor) -> Tensor:
        """Logits in float32 of shape (batch, classes) for normalized images (batch, 3, 32, 32)."""
        x = F.gelu(self.whitening(images))
        for group in self.groups:
            x = group(x)
        x = F.max_pool2d(x, 3).flatten(1)
        logits: Tensor = self.head(x).float()
        return logits / x.shape[1]
