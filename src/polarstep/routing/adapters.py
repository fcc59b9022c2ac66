"""LoRA's factors: which parameters they are, and the factor on their learning rate.

An adapter adds ΔW = s·BA to a weight W (m × n), with A (r × n), B (m × r) and s = α/r (α/√r for rsLoRA).
A Muon step on W moves W by at most η·scale(m, n) in spectral norm. A step on A and B moves ΔW by

    s·‖dB·A + B·dA‖ ≤ s·(‖dB‖·‖A‖ + ‖B‖·‖dA‖),        ‖dA‖ = ‖dB‖ = η·factor.

With ``factor = scale(m, n)/(2s)`` this is at most η·scale(m, n) while ‖A‖ and ‖B‖ are at most one: A
starts at a norm of about 0.6, B at zero. So η has the same meaning as for W itself. Both factors get the
same rate. AdamW needs a larger rate for B, since its steps grow with the sides of a matrix; the steps of
the polar factor do not.

The scale of B's own shape would be √(m/r), 22 for 4096×8: a step of B would move W by many times η.

Layers that compute ``x @ A @ B`` store both factors transposed, A as n × r and B as r × m. Which way
round they are is told by the side that both share, r. Where m = n both ways fit, and r is the shorter
side.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from polarstep.routing.anatomy import Use
from polarstep.routing.node import Node
from polarstep.scaling import ShapeScale, resolve_scale

__all__ = ["Adapter", "find_adapter", "is_magnitude", "is_other_part"]

FACTOR = re.compile(r"^lora_(embedding_)?([abAB])$")
MAGNITUDE = re.compile(r"(^|\.)lora_magnitude_vector(\.|$)")


@dataclass(frozen=True)
class Adapter:
    """One of the two factors of ΔW = s·BA."""

    letter: str  # "A" or "B"
    outputs: int  # m
    inputs: int  # n
    scaling: float  # s
    of: Node  # the layer that the adapter belongs to
    embeds: bool  # whether W is an embedding's table
    transposed: bool = False  # whether A is stored as n × r and B as r × m

    def lr_factor(self, shape_scale: ShapeScale) -> float:
        """The factor on η, the same for A and B."""
        shape = self.outputs, self.inputs
        return resolve_scale(shape_scale)(*shape, min(shape)) / (2 * self.scaling)

    @property
    def why(self) -> str:
        """The adapter in a few words."""
        layer = self.of.last_name or "the model"
        return f"LoRA {self.letter} of {layer} {self.outputs}×{self.inputs}, s = {self.scaling:g}"


def find_adapter(use: Use) -> Adapter | None:
    """The adapter that a parameter is a factor of, by its name and by the shapes of both factors."""
    parts = use.name.split(".")
    at = next((i for i, part in enumerate(parts) if FACTOR.match(part)), None)
    if at is None:
        return None
    label, holder = parts[at], ".".join(parts[:at])
    around = (use.owner, *use.owner.ancestors())
    node = next((node for node in around if node.name == holder), None)
    if node is None:
        return None
    letter = label[-1]
    other = label[:-1] + {"A": "B", "B": "A", "a": "b", "b": "a"}[letter]
    key = parts[at + 1] if at + 1 < len(parts) else None
    held = [_entry(getattr(node.module, name, None), key) for name in sorted((label, other))]
    pair = [each if isinstance(each, Tensor) else getattr(each, "weight", None) for each in held]
    A, B = pair
    if A is None or B is None or min(A.ndim, B.ndim) < 2:
        return None
    are_bare = all(isinstance(each, Tensor) for each in held)
    transposed = are_bare and _are_transposed(A, B)
    if transposed:
        A, B = A.mT, B.mT
    if A.shape[0] != B.shape[1]:
        return None
    scaling = _scaling(node.module, key, rank=A.shape[0])
    inputs, embeds = A[0].numel(), "embedding" in label
    return Adapter(letter.upper(), B.shape[0], inputs, scaling, node, embeds, transposed)


def is_other_part(use: Use) -> bool:
    """Whether a parameter belongs to an adapter of PEFT other than LoRA, as LoHa, OFT or VB-LoRA."""
    if "lora_" in {part[:5] for part in use.name.split(".")}:
        return False
    return use.owner.adapts or use.label in use.owner.adapter_parts


def is_magnitude(use: Use) -> bool:
    """Whether a parameter holds DoRA's magnitudes, one number for each output."""
    return MAGNITUDE.search(use.name) is not None


def _entry(held: Any, key: str | None) -> Any:
    """A factor: a parameter or a layer with a weight, which may be an entry of a dict of either."""
    if isinstance(held, nn.ModuleDict | nn.ParameterDict):
        return held[key] if key is not None and key in held else None
    return held


def _are_transposed(A: Tensor, B: Tensor) -> bool:
    """Whether parameters A and B are stored as n × r and r × m."""
    if A.ndim != 2 or B.ndim != 2 or A.shape[1] != B.shape[0]:
        return False
    return A.shape[0] != B.shape[1] or A.shape[1] < A.shape[0]


def _scaling(module: nn.Module, key: str | None, *, rank: int) -> float:
    """s, as the layer states it; 1 if the layer does not."""
    said = getattr(module, "scaling", None)
    if isinstance(said, dict):
        said = said.get(key)
    if isinstance(said, int | float) and hasattr(module, "ranknum"):
        said = said / rank  # AdaLoRA's layers state α, and divide by the rank in the forward pass
    if said is None:
        for name in ("lora_alpha", "alpha"):
            alpha = getattr(module, name, None)
            if isinstance(alpha, int | float):
                said = alpha / rank
                break
    return float(said) if isinstance(said, int | float) and said > 0 else 1.0
