"""The models of this study that the laboratory does not have.

Each has ``loss(x, y, wrap)``, the loss of a batch summed over its targets. ``wrap`` compiles a function
on a GPU and returns it as it is elsewhere.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarstep_lab.models.gpt import GPT, GPTConfig, Wrap, rotary_table

__all__ = ["GPT2", "LSTM", "Classifier", "Llama", "LoRA", "ResNet18", "VisionTransformer", "gpt"]


def gpt(seed: int, size: float, config: GPTConfig) -> nn.Module:
    """The laboratory's GPT, untied, with embedding entries of the given size."""
    model = GPT(config, torch.Generator().manual_seed(seed))
    model.embedding.weight.data.mul_(size)
    return model


class GPT2(nn.Module):
    """GPT-2 as people train it.

    The embedding is tied to the head, positions are learned, normalization is LayerNorm, all linear
    maps have biases, q, k and v are one weight, and entries begin at 0.02. With ``experts`` every MLP
    is a mixture of so many.
    """

    def __init__(
        self,
        seed: int,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        context: int,
        experts: int = 0,
    ) -> None:
        """Build the model and draw its weights."""
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_GPT2Block(width, heads, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        _draw(self, seed, layers)

    def loss(self, x: Tensor, y: Tensor, wrap: Wrap) -> Tensor:
        """Cross-entropy, summed over all positions."""
        h = self.wte(x) + self.wpe.weight[: x.shape[1]]
        layer = wrap(_layer)
        for block in self.blocks:
            h = layer(block, h)
        return wrap(_cross_entropy)(self.norm(h).flatten(0, 1), self.head.weight, y.flatten())


class _GPT2Block(nn.Module):
    def __init__(self, width: int, heads: int, experts: int = 0, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = _Experts(width, width, experts) if experts else _MLP(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.project(mixed.transpose(1, 2).reshape(b, t, d))
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class _MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return y


class _Experts(nn.Module):
    """A mixture of experts in two stacks of matrices; the router chooses two for each position.

    All experts see all positions, which is simple, and fast enough for small models.
    """

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up_proj = nn.Parameter(torch.empty(experts, hidden, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        chosen = scores.topk(2, dim=-1).indices
        kept = torch.full_like(scores, -torch.inf).scatter(-1, chosen, scores.gather(-1, chosen))
        hidden = F.gelu(torch.einsum("btd,ehd->bteh", x, self.up_proj), approximate="tanh")
        hidden = hidden * kept.softmax(dim=-1)[..., None]
        return torch.einsum("bteh,edh->btd", hidden, self.down_proj)


class Llama(nn.Module):
    """A Llama: RMSNorm with gains, SwiGLU, grouped queries, rotary positions, an untied head.

    There are no biases, and entries begin at 0.02.
    """

    def __init__(
        self,
        seed: int,
        vocabulary: int,
        width: int,
        layers: int,
        heads: int,
        groups: int,
        hidden: int,
        context: int,
    ) -> None:
        """Build the model and draw its weights; ``groups`` is the number of keys and values."""
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            _LlamaBlock(width, heads, groups, hidden) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        cos, sin = rotary_table(context, width // heads, 10_000.0)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        _draw(self, seed, layers)

    def loss(self, x: Tensor, y: Tensor, wrap: Wrap) -> Tensor:
        """Cross-entropy, summed over all positions."""
        h = self.embed_tokens(x)
        cos, sin = (self.get_buffer(name)[: x.shape[1]] for name in ("cos", "sin"))
        layer = wrap(_layer)
        for block in self.layers:
            h = layer(block, h, cos, sin)
        return wrap(_cross_entropy)(self.norm(h).flatten(0, 1), self.lm_head.weight, y.flatten())


class _LlamaBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.width = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.width, bias=False)
        self.v_proj = nn.Linear(width, groups * self.width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.norm1(x)
        q, k, v = (
            projection(h).view(b, t, -1, self.width).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        y: Tensor = x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return y


class LSTM(nn.Module):
    """A language model of two LSTM layers, with torch's own initialization."""

    def __init__(self, vocabulary: int, width: int) -> None:
        """Build the model."""
        super().__init__()
        self.encoder = nn.Embedding(vocabulary, width)
        self.rnn = nn.LSTM(width, width, 2, batch_first=True)
        self.decoder = nn.Linear(width, vocabulary)

    def loss(self, x: Tensor, y: Tensor, wrap: Wrap) -> Tensor:
        """Cross-entropy, summed over all positions."""
        logits = self.decoder(self.rnn(self.encoder(x))[0])
        return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten(), reduction="sum")


class Classifier(nn.Module):
    """A network that classifies images."""

    def __init__(self, network: nn.Module) -> None:
        """Wrap a network whose outputs are logits."""
        super().__init__()
        self.network = network

    def loss(self, x: Tensor, y: Tensor, wrap: Wrap) -> Tensor:
        """Cross-entropy, summed over all images."""
        return F.cross_entropy(self.network(x).float(), y, reduction="sum")


class VisionTransformer(nn.Module):
    """A vision transformer with a class token and learned positions; entries begin at 0.02."""

    def __init__(self, seed: int, width: int, layers: int, heads: int, patch: int) -> None:
        """Build the network for images of 32×32 and draw its weights."""
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, (32 // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(_GPT2Block(width, heads, causal=False) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)
        _draw(self, seed, layers)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        h = self.patch_embed(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.cls_token.expand(len(h), -1, -1), h], dim=1) + self.pos_embed
        for block in self.blocks:
            h = block(h)
        y: Tensor = self.head(self.norm(h[:, 0]))
        return y


class ResNet18(nn.Module):
    """ResNet-18 for images of 32×32, with torch's own initialization.

    The published width is 64. A ``stride`` of 2 in the first convolution makes it cheap.
    """

    def __init__(self, width: int = 64, stride: int = 1) -> None:
        """Build the network."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        layers = (
            nn.Sequential(
                _BasicBlock(before, after, 1 + (before < after)), _BasicBlock(after, after)
            )
            for before, after in pairwise(widths)
        )
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = self.layers(F.relu(self.bn1(self.conv1(x))))
        y: Tensor = self.fc(x.mean(dim=(2, 3)))
        return y


class _BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Sequential()
        if stride > 1:
            shorter = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shorter, nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class LoRA(nn.Module):
    """A linear layer that is frozen, and two trained factors beside it, named as PEFT names them."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        """Put factors beside a layer; the second begins at zero."""
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = 2.0

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output and that of the factors."""
        y: Tensor = self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))
        return y

    @classmethod
    def beside(cls, model: nn.Module, rank: int) -> nn.Module:
        """Freeze a model and put factors beside the linear layers of its blocks."""
        model.requires_grad_(False)
        for block in list(model.get_submodule("blocks").modules()):
            for name, layer in block.named_children():
                if type(layer) is nn.Linear:
                    setattr(block, name, cls(layer, rank))
        return model


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


@torch.no_grad()
def _draw(model: nn.Module, seed: int, layers: int) -> None:
    """Entries of 0.02, smaller by √(2·layers) in projections back into the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    back = ("project.weight", "down.weight", "o_proj.weight", "down_proj.weight", "down_proj")
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            scale = math.sqrt(2 * layers) if name.endswith(back) else 1.0
            parameter.normal_(std=0.02 / scale, generator=generator)
        elif name.endswith("bias"):
            parameter.zero_()


def _layer(block: nn.Module, x: Tensor, *rest: Tensor) -> Tensor:
    y: Tensor = block(x, *rest)
    return y


def _cross_entropy(h: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((h @ head.T.to(h.dtype)).float(), targets, reduction="sum")
