"""Which side of a weight has the outputs: rows, as in ``nn.Linear``, or columns.

GPT-2's ``Conv1D`` and the experts of gpt-oss and Llama 4 compute ``x @ W`` and store W as inputs ×
outputs. The module says so by its attributes, by the length of the bias, or, where both sides are
equal, by its class.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

__all__ = ["stored_transposed", "weight_beside"]

# Attributes in which a layer with one weight states its inputs and its outputs.
WIDTHS = (
    ("in_features", "out_features"),
    ("nx", "nf"),
    ("input_size", "output_size"),
    ("in_dim", "out_dim"),
)
# Attributes in which a module with stacked experts states the width that its first matrices read.
HIDDEN = ("hidden_size", "hidden_dim", "d_model", "in_features")
# Classes that compute x @ W. The last resort, for matrices that are square.
CLASSES = re.compile(r"^Conv1D$|^Llama4TextExperts$|^GptOssExperts$")
READS_HIDDEN = re.compile(r"gate|up|w1|w3|in", re.IGNORECASE)
# Names of an expert's last matrices, which write to the hidden state.
WRITES_HIDDEN = re.compile(r"down|w2|out|^o_|^wo$", re.IGNORECASE)
# The first letters of bare weights, as w1 or W_up, and of the biases beside them.
SHORT = (("w", "b"), ("W", "b"), ("W", "B"))


def stored_transposed(module: nn.Module, label: str, p: Tensor) -> str | None:
    """Why the matrices of ``p``, called ``label`` in ``module``, are stored inputs × outputs.

    ``None`` if they are stored outputs × inputs, as almost all are.
    """
    if p.ndim not in (2, 3) or isinstance(module, nn.Linear | nn.Bilinear | nn.MultiheadAttention):
        return None
    kind = type(module).__name__
    rows, cols = p.shape[-2:]
    said = getattr(module, "is_transposed", None)
    if isinstance(said, bool) and p.ndim == 3:
        return "is_transposed" if said else None
    if rows == cols:
        return "inputs × outputs" if CLASSES.search(kind) else None
    if p.ndim == 2 and label == "weight":
        for inputs, outputs in WIDTHS:
            sizes = (getattr(module, inputs, None), getattr(module, outputs, None))
            if None in sizes and not (inputs == "nx" and sizes[1] is not None):
                continue
            if sizes[1] == cols and sizes[0] in (rows, None):
                return f"{outputs} = {cols} columns"
            if sizes[1] == rows and sizes[0] in (cols, None):
                return None
    bias = _bias(module, label)
    if bias is not None and bias.ndim == p.ndim - 1:
        if bias.shape[-1] == cols:
            return f"{cols} columns, as its bias"
        if bias.shape[-1] == rows:
            return None
    if p.ndim == 3:
        hidden = next((size for name in HIDDEN if (size := _size(module, name))), None)
        hidden = hidden or _hidden_beside(module, label)
        reads = _reads_hidden(label)
        # Other names, as Zamba's x_proj_weight inside a state-space layer, say nothing of the side.
        if hidden in (rows, cols) and (reads or WRITES_HIDDEN.search(label)):
            return f"{rows} inputs as rows" if (hidden == rows) == reads else None
    return "inputs × outputs" if CLASSES.search(kind) else None


def _reads_hidden(label: str) -> bool:
    """Whether stacked matrices called ``label`` are an expert's first, which read the hidden state."""
    return bool(READS_HIDDEN.search(label.replace("down", "")))


def _hidden_beside(module: nn.Module, label: str) -> int | None:
    """The width of the hidden state, by other stacked matrices in ``module`` that have a bias."""
    for other, p in module._parameters.items():
        bias = None if other == label or p is None or p.ndim != 3 else _bias(module, other)
        if p is None or bias is None or bias.ndim != 2 or p.shape[1] == p.shape[2]:
            continue
        sides = {p.shape[1]: p.shape[2], p.shape[2]: p.shape[1]}
        outputs = bias.shape[1]
        if outputs in sides:
            return sides[outputs] if _reads_hidden(other) else outputs
    return None


def _bias(module: nn.Module, label: str) -> Tensor | None:
    """The bias beside a weight: ``bias`` of ``weight``, ``up_bias`` of ``up``, ``b1`` of ``w1``."""
    names = [label.replace("weight", "bias"), f"{label}_bias"]
    names += [short + label[1:] for letter, short in SHORT if label[:1] == letter]
    found = (module._parameters.get(name) for name in names if name != label)
    return next((bias for bias in found if bias is not None), None)


def weight_beside(module: nn.Module, label: str, p: Tensor) -> str | None:
    """The name of the weight whose bias ``p`` is, called ``label`` in ``module``: ``w1`` for ``b1``.

    The weight has a side as long as the bias, beside the sides of a stack that both may have.
    """
    for letter, short in SHORT:
        weight = module._parameters.get(letter + label[1:]) if label[:1] == short else None
        if weight is None or weight.ndim != p.ndim + 1:
            continue
        if weight.shape[:-2] == p.shape[:-1] and p.shape[-1] in weight.shape[-2:]:
            return letter + label[1:]
    return None


def _size(module: nn.Module, name: str) -> int | None:
    value: Any = getattr(module, name, None)
    return value if isinstance(value, int) else None
