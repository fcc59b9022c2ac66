"""A GPT in the style of modded-nanogpt, in sizes from a laptop toy to the paper's matrices.

Rotary positions, queries and keys normalized, RMSNorm without weights, a squared-ReLU MLP, no
biases, an untied head with soft-capped logits. Every hidden parameter is a matrix, one per
projection, so that an optimizer for matrices sees the same shapes as the paper's.

**The paper's matrices.** Table 2 counts 40 matrices of 768×768 and 24 of 3072×768 for a model of 11
layers. The 40 arise because layer 6 of modded-nanogpt has no attention, which leaves 10 × 4
attention matrices. The 24 arise because its 11 MLPs of two matrices are stored in one tensor padded
to 12 layers, so that 24 matrices divide evenly among 8 GPUs. The forward pass never uses the padding,
but Muon orthogonalizes it at every step, and the paper counts it. Here ``attention_free=(6,)`` and
``spare_mlps=1`` give the same counts. No gradient reaches the spare matrices, so Muon skips them and
only the ledger counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polarstep_lab.models.head_loss import LARGEST_SOFTCAP, head_loss, loss_of_rows, softcapped

__all__ = ["GPT", "GPTConfig", "Wrap", "rotary_table"]


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    ``attention_free`` lists the layers without attention. ``softcap`` is c in c·tanh(logits/c).
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    context: int
    mlp_ratio: int = 4
    attention_free: tuple[int, ...] = ()
    spare_mlps: int = 0
    softcap: float = 15.0
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "context", "mlp_ratio"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"model.{name}={getattr(self, name)}: expected at least 1; leave it out for the "
                    "recipe's own"
                )
        if self.width % self.heads or self.width // self.heads % 2:
            raise ValueError(
                f"model.width={self.width} with model.heads={self.heads}: rotary positions need an "
                f"even width per head, but this one is {self.width / self.heads:g}; give a width that "
                f"is a multiple of {2 * self.heads}"
            )
        strange = [layer for layer in self.attention_free if not 0 <= layer < self.layers]
        if strange:
            raise ValueError(
                f"model.attention_free={self.attention_free}: expected layers between 0 and "
                f"{self.layers - 1}"
            )
        if not 0 < self.softcap <= LARGEST_SOFTCAP:
            raise ValueError(
                f"model.softcap={self.softcap}: expected above 0 and at most {LARGEST_SOFTCAP:g}"
            )


class _Linear(nn.Linear):
    """A linear map without bias, computed in the precision of its input.

    :meth:`GPT.initialize` draws its weight, since torch's initialization would advance the global
    random generator.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Do nothing; :meth:`GPT.initialize` draws the weight."""

    def forward(self, x: Tensor) -> Tensor:
        """``x`` times the weight's transpose."""
        return F.linear(x, self.weight.to(x.dtype))


class _Embedding(nn.Embedding):
    """An embedding whose weight :meth:`GPT.initialize` draws."""

    def reset_parameters(self) -> None:
        """Do nothing; torch would draw from the global generator."""


def _norm(x: Tensor) -> Tensor:
    # The default ε for bfloat16 inputs would be that of bfloat16, 0.8%.
    return F.rms_norm(x, (x.shape[-1],), eps=torch.finfo(torch.float32).eps)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and normalized queries and keys."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = _Linear(config.width, config.width)
        self.key = _Linear(config.width, config.width)
        self.value = _Linear(config.width, config.width)
        self.output = _Linear(config.width, config.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend over ``x`` of shape (batch, time, width)."""
        batch, time, width = x.shape
        shape = (batch, time, self.heads, width // self.heads)
        q, k, v = (projection(x).view(shape) for projection in (self.query, self.key, self.value))
        q, k = _rotate(_norm(q), cos, sin), _rotate(_norm(k), cos, sin)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = self.output(y.transpose(1, 2).reshape(batch, time, width))
        return mixed


class MLP(nn.Module):
    """Two matrices with a squared ReLU between them (So et al., "Primer", 2021)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = _Linear(config.width, config.mlp_ratio * config.width)
        self.down = _Linear(config.mlp_ratio * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map each position by itself."""
        y: Tensor = self.down(F.relu(self.up(x)).square())
        return y


class Block(nn.Module):
    """Attention, where the layer has it, then the MLP; both behind a norm and beside a residual."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention = None if layer in config.attention_free else Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer."""
        if self.attention is not None:
            x = x + self.attention(_norm(x), cos, sin)
        return x + self.mlp(_norm(x))


T = TypeVar("T", bound=Callable[..., object])


class Wrap(Protocol):
    """Turns a function into another that computes the same, such as its compiled form."""

    def __call__(self, function: T, /) -> T:
        """Wrap ``function``."""


def _unchanged(function: T, /) -> T:
    return function


class GPT(nn.Module):
    """The model; ``generator`` makes its initial weights a function of a seed."""

    def __init__(self, config: GPTConfig, generator: torch.Generator | None = None) -> None:
        """Build the model and draw its weights."""
        super().__init__()
        self.config = config
        self.embedding = _Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.spare_mlps = nn.ModuleList(MLP(config) for _ in range(config.spare_mlps))
        self.head = _Linear(config.width, config.vocab_size)
        cos, sin = rotary_table(config.context, config.width // config.heads, config.rotary_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if self.head.weight.device.type != "meta":
            self.initialize(generator)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draw all weights.

        Projections back into the residual stream start at zero, so that the model begins as the
        identity on its embedding, whatever its depth.
        """
        width = self.config.width
        self.embedding.weight.normal_(std=1.0, generator=generator)
        self.head.weight.normal_(std=0.02, generator=generator)
        for module in self.modules():
            if isinstance(module, Attention):
                for projection in (module.query, module.key, module.value):
                    projection.weight.normal_(std=width**-0.5, generator=generator)
                module.output.weight.zero_()
            elif isinstance(module, MLP):
                module.up.weight.normal_(std=width**-0.5, generator=generator)
                module.down.weight.zero_()

    def matrix_shapes(self) -> list[tuple[int, int]]:
        """The shapes of the matrices that Muon updates, as the paper counts them.

        They are (rows, columns), except that the MLP's second matrix is transposed, as
        modded-nanogpt stores it.
        """
        return [
            (p.shape[1], p.shape[0]) if name.endswith("down.weight") else (p.shape[0], p.shape[1])
            for name, p in self.named_parameters()
            if not name.startswith(("embedding.", "head."))
        ]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits in float32 of shape (batch, time, vocabulary) for ``tokens`` (batch, time)."""
        return softcapped(self.head(self.features(tokens)), self.config.softcap)

    def loss(self, tokens: Tensor, targets: Tensor, wrap: Wrap = _unchanged) -> Tensor:
        """Cross-entropy of ``targets`` (batch, time), summed over all positions.

        Equal to the loss of :meth:`forward`'s logits, without float32 logits in memory. ``wrap`` is
        applied to the two functions that take most of the time, a layer and the loss of a chunk of
        positions: one compiled function serves all layers, and all models of the same shapes.
        """
        return head_loss(
            self.features(tokens, wrap).flatten(0, 1),
            self.head.weight,
            targets.flatten(),
            self.config.softcap,
            rows=wrap(loss_of_rows),
        )

    def features(self, tokens: Tensor, wrap: Wrap = _unchanged) -> Tensor:
        """The input of the head: the normalized residual stream after the last layer.

        Under autocast the stream has autocast's precision from the embedding on. Autocast by itself
        would keep it in float32, and element-wise operations would move twice as many bytes.
        """
        time, device = tokens.shape[1], tokens.device.type
        if time > self.config.context:
            raise ValueError(
                f"{time} tokens are more than the context of {self.config.context}: set "
                "model.context to the longest sequence"
            )
        x = self.embedding(tokens)
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        cos, sin = (self.get_buffer(name)[:time, None].to(x.dtype) for name in ("cos", "sin"))
        layer = wrap(_layer)
        with torch.autocast(device, enabled=False):
            x = _norm(x)
            for block in self.blocks:
                x = layer(block, x, cos, sin)
            return _norm(x)


def _layer(block: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y: Tensor = block(x, cos, sin)
    return y


def rotary_table(context: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the angles t·base^(−2i/width), shape (context, width/2) each."""
    frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + width/2]) by the angles of their positions."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)
