"""The models of ``two_lines.py`` that the laboratory does not have.

Each has ``loss(x, y, wrap)``, the loss of a batch summed over its targets. ``wrap`` compiles a function
on a GPU and returns it as it is elsewhere.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarstep_lab.models.gpt import GPT, GPTConfig, Wrap, rotary_table

__all__ = ["GPT2", "Llama", "gpt"]


def gpt(seed: int, size: float, config: GPTConfig) -> nn.Module:
    """The laboratory's GPT, untied, with embedding entries of the given size."""
    model = GPT(config, torch.Generator().manual_seed(seed))
    model.embedding.weight.data.mul_(size)
    return model


class GPT2(nn.Module):
    """GPT-2 as people train it.

    The embedding is tied to the head, positions are learned, normalization is LayerNorm, all linear
    maps have biases, q, k and v are one weight, and entries begin at 0.02.
    """

    def __init__(
        self, seed: int, vocabulary: int, width: int, layers: int, heads: int, context: int
    ) -> None:
        """Build the model and draw its weights."""
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_GPT2Block(width, heads) for _ in range(layers))
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
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        parts = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(b, t, d))
        hidden = F.gelu(self.up(self.norm2(x)), approximate="tanh")
        y: Tensor = x + self.down(hidden)
        return y


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


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


@torch.no_grad()
def _draw(model: nn.Module, seed: int, layers: int) -> None:
    """Entries of 0.02, smaller by √(2·layers) in projections back into the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    back = ("project.weight", "down.weight", "o_proj.weight", "down_proj.weight")
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
