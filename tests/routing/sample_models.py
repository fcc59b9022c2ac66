"""Models to route: small, and each of a kind that people build."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarstep import Muon

WIDTH, VOCABULARY = 16, 50


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.down(F.gelu(self.up(x)))


class SmallGPT(nn.Module):
    """``head``: "untied", "tied" (one parameter) or "functional" (no layer for it at all)."""

    def __init__(self, head: str, layers: int = 2, vocabulary: int = VOCABULARY, context: int = 8):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, WIDTH)
        self.wpe = nn.Embedding(context, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        if head != "functional":
            self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if head == "tied":
            self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        weight = self.head.weight if hasattr(self, "head") else self.wte.weight
        return F.linear(self.norm(x), weight)


class Bag(nn.Module):
    """A module that holds what it is given, in the order given."""

    def __init__(self, **members: nn.Module | nn.Parameter | Tensor) -> None:
        super().__init__()
        for name, member in members.items():
            setattr(self, name, nn.Parameter(member) if type(member) is Tensor else member)


def mlp(*widths: int) -> nn.Sequential:
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))[:-1]


def roles(optimizer: Muon) -> dict[str, str]:
    return {row.name: row.role or row.algorithm for row in optimizer.routes}


def with_role(optimizer: Muon, role: str) -> set[str]:
    return {name for name, found in roles(optimizer).items() if found == role}
