"""Weights that hold several projections: q, k and v, or gate and up, in one matrix.

The name says that a weight may be fused; shapes decide whether it is cut, and where. The strongest
evidence is the layer that reads the result: the projection back from attention has as many inputs as q
has outputs, and what is left of the fused outputs is k and v, with fewer heads or not. A weight that is
fused by its name alone is not cut, and the routing table says so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from torch import Tensor, nn

from polarstep.checked_values import is_integer
from polarstep.routing.anatomy import Use
from polarstep.routing.node import Node

__all__ = ["WHOLE", "Cut", "find_cut", "has_heads_inside"]


@dataclass(frozen=True)
class Cut:
    """Sizes of the parts of a weight: Muon's ``split_sizes``, ``split_columns``, ``split_repeats``."""

    outputs: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    repeats: int = 1

    @property
    def options(self) -> dict[str, object]:
        """The options of a parameter group."""
        return {
            "split_sizes": self.outputs,
            "split_columns": self.columns,
            "split_repeats": self.repeats,
        }


WHOLE = Cut()

CONTAINERS = (nn.ModuleList, nn.ModuleDict)

ATTENTION = re.compile(
    r"qkv|kqv|query_key_value|queries_keys_values|c_attn|^att_proj$|^w_?pack$", re.IGNORECASE
)
KEY_VALUE = re.compile(r"^(to_)?kv(_proj)?$|^key_value$|^keys_values$", re.IGNORECASE)
QUERY_KEY = re.compile(r"^(to_)?qk$", re.IGNORECASE)
LATENT = re.compile(r"^kv_b_proj$|^wkv_b$")
GATED = re.compile(r"gate_(and_)?up|up_gate|^w12$|^wi$", re.IGNORECASE)
INPUT = re.compile(r"^in_proj$")
SELECTIVE = re.compile(r"^x_proj$")
FUSED = re.compile(
    "|".join(each.pattern for each in (ATTENTION, KEY_VALUE, QUERY_KEY, LATENT, GATED, INPUT)),
    re.IGNORECASE,
)
# Names of the layer that reads the result of a fused layer, as the projection back from attention.
READERS = re.compile(
    r"^(out|o|c|linear|down)?_?proj(_out)?$|^(to_)?out$|^dense(_4h_to_h)?$|^w_?o$|^down$|^w[23]$|^fc2$"
    r"|^attn_out$|^output$",
    re.IGNORECASE,
)
# Attention that stores q, k and v head by head (or by groups of heads).
BY_HEAD = re.compile(
    r"GPTNeoX|Bloom|Persimmon|Falcon|InternLM2|GPTBigCode|^Disentangled|Lightning|^LiteMLA"
)
# Tensor-parallel blocks in the weights of CodeGen, each with its own q, v and k.
CODEGEN_BLOCKS = 4
# The order of parts is not known for these; whoever knows it can give splits.
UNCERTAIN = re.compile(r"query_key_value|linear_qkv|qkvz|qkvg")

HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "heads", "num_q_heads")
GROUPS = ("num_kv_heads", "num_key_value_heads", "kv_heads", "n_kv_heads", "num_heads_kv")
HEAD_WIDTH = ("head_dim", "head_size", "dim_head", "d_head", "attention_head_size")
# torchtitan's name for the number of query heads that come before each key and value.
PER_GROUP = "heads_per_kv"
HALF = (
    "intermediate_size",
    "intermediate_dim",
    "expert_dim",
    "hidden_features",
    "ffn_dim",
    "d_inner",
)


def find_cut(use: Use, outputs: int, inputs: int) -> tuple[Cut, str] | None:
    """The parts of a fused weight and a description; ``None`` if its name does not say it is fused.

    The cut is :data:`WHOLE` if the name says that the weight is fused, and no shape says how.
    """
    bare = use.label not in ("weight", "original", "original1")
    if not bare:
        use = replace(use, owner=_named_fused(use.owner))
    name = use.label if bare else use.owner.last_name
    if LATENT.search(name):
        return _latent(use, name, outputs)
    if GATED.search(name):
        return _gated(use, name, outputs)
    if KEY_VALUE.search(name) or QUERY_KEY.search(name):
        return _pair(use, name, outputs)
    if ATTENTION.search(name) or (INPUT.search(name) and _is_attention_by_head(use)):
        return _attention(use, name, outputs, inputs)
    if INPUT.search(name):
        return _input(use, name, outputs)
    if SELECTIVE.search(name):
        return _selective(use, name, outputs)
    return None


def _named_fused(node: Node) -> Node:
    """The layer, or the module around it that is called fused and has no other layer.

    So ``qkv.conv`` is known by the name ``qkv``, where a convolution and its norm are one module.
    """
    around = node
    while not FUSED.search(around.last_name):
        above = around.parent
        if above is None or isinstance(above.module, CONTAINERS):
            return node
        layers = (below for below in above.walk() if below.widths is not None)
        if len(list(islice(layers, 2))) > 1:
            return node
        around = above
    return around


def _pair(use: Use, name: str, outputs: int) -> tuple[Cut, str] | None:
    """Two projections in one weight, k and v or q and k."""
    parts = "q, k" if QUERY_KEY.search(name) else "k, v"
    heads, keys, values = _number(use, HEADS), _number(use, ("key_dim",)), _values(use)
    if heads and keys and values and heads * (keys + values) == outputs:
        return Cut((keys, values), repeats=heads), f"{parts} of {name}, head by head"
    reads = _reads(use)
    return (Cut((reads,) * 2), f"{parts} of {name}") if reads and 2 * reads == outputs else None


def _values(use: Use) -> int | None:
    """The width of one head's values, which may differ from the width of its keys, as in LeViT."""
    ratio, keys = _number(use, ("attention_ratio",)), _number(use, ("key_dim",))
    return _number(use, ("val_dim",)) or (ratio * keys if ratio and keys else None)


def _is_by_head(use: Use) -> bool:
    """Whether a module around the weight stores q, k and v head by head."""
    modules = [node.module for node in _above(use)]
    return any(
        BY_HEAD.search(type(module).__name__)
        or getattr(module, "head_first", None) is True
        or isinstance(getattr(module, PER_GROUP, None), int)
        for module in modules
    )


def _is_attention_by_head(use: Use) -> bool:
    """As :func:`_is_by_head`, where the name of the weight leaves open that it is attention's."""
    kinds = (type(node.module).__name__ for node in _above(use))
    return _is_by_head(use) and any("Attention" in kind for kind in kinds)


def _attention(use: Use, name: str, outputs: int, inputs: int) -> tuple[Cut, str]:
    kinds = [type(node.module).__name__ for node in _above(use)]
    reads, found = _reads(use), f"q, k, v of {name}"
    if any(kind.startswith("CodeGen") for kind in kinds):
        part = outputs // (3 * CODEGEN_BLOCKS)
        return Cut((part,) * 3, repeats=CODEGEN_BLOCKS), f"q, v, k of {name}"
    if _is_by_head(use):
        cut = _by_head(use, outputs)
        if cut is None:
            return _flagged(name)
        return cut, f"{found}, head by head" if cut.repeats > 1 else found
    heads, keys, values = _number(use, HEADS), _number(use, ("key_dim",)), _values(use)
    if heads and keys and values and heads * (2 * keys + values) == outputs:
        return Cut((keys, keys, values), repeats=heads), f"{found}, head by head"
    values = _number(use, ("value_dim",))
    if keys and values and 2 * keys + values == outputs:
        return Cut((keys, keys, values)), found
    if UNCERTAIN.search(name):
        return _flagged(name)
    if reads:
        left = (outputs - reads) // 2
        if outputs == 2 * reads and _has_own_queries(use):
            return Cut((reads,) * 2), f"k, v of {name}"
        if left > 0 and reads + 2 * left == outputs and reads % left == 0:
            return Cut((reads, left, left)), found
        if outputs == 1 + 2 * reads:  # a single query, as in MobileViT's separable attention
            return Cut((1, reads, reads)), found
    width = _number(use, HEAD_WIDTH)
    groups = _number(use, GROUPS) or heads
    if heads and groups and width and (heads + 2 * groups) * width == outputs:
        return Cut((heads * width, groups * width, groups * width)), found
    if outputs == 3 * inputs:
        return Cut((inputs,) * 3), found
    return _flagged(name)


def _by_head(use: Use, outputs: int) -> Cut | None:
    """q, k and v group by group, for groups of heads that share one k and one v."""
    heads, known = _number(use, HEADS), _number(use, HEAD_WIDTH)
    if (queries := _number(use, (PER_GROUP,))) and known:
        repeats, rest = divmod(outputs, (queries + 2) * known)
        return Cut((queries * known, known, known), repeats=repeats) if rest == 0 else None
    for groups in (_number(use, GROUPS), heads):
        if heads and groups and heads % groups == 0:
            each = heads // groups
            width, rest = divmod(outputs, groups * (each + 2))
            if rest == 0 and known in (width, None):
                return Cut((each * width, width, width), repeats=groups)
    return None


def _latent(use: Use, name: str, outputs: int) -> tuple[Cut, str] | None:
    """Keys without position and values of multi-head latent attention, head by head."""
    heads = _number(use, HEADS)
    keys, values = _number(use, ("qk_nope_head_dim",)), _number(use, ("v_head_dim",))
    if heads and keys and values and heads * (keys + values) == outputs:
        return Cut((keys, values), repeats=heads), f"k, v of {name}, head by head"
    return None


def _gated(use: Use, name: str, outputs: int) -> tuple[Cut, str] | None:
    half, odd = divmod(outputs, 2)
    reads = _reads(use)
    if reads == outputs:  # T5's first wi, without a gate
        return None
    agrees = not odd and half in (reads, _number(use, HALF))
    if not agrees:
        return _flagged(name)
    if getattr(use.owner.module, "is_concatenated", True) is False:
        return Cut((1, 1), repeats=half), f"gate, up of {name}, interleaved"
    return Cut((half, half)), f"gate, up of {name}"


def _input(use: Use, name: str, outputs: int) -> tuple[Cut, str] | None:
    """The input projection of a state-space layer, a gated convolution or a parallel block."""
    parts = next((sizes for node in _above(use) if (sizes := _stated_parts(node.module))), ())
    if len(parts) > 1 and sum(parts) == outputs:
        return Cut(parts), f"{len(parts)} parts of {name}"
    reads = _reads(use)
    if reads and outputs in (2 * reads, 3 * reads):
        return Cut((reads,) * (outputs // reads)), f"{outputs // reads} parts of {name}"
    if reads and outputs > reads:
        groups, states = _number(use, ("n_groups",)), _number(use, ("ssm_state_size", "d_state"))
        heads = _number(use, HEADS)
        if groups and states and heads:
            sizes = (reads, reads, groups * states, groups * states, heads)
            if sum(sizes) == outputs:
                return Cut(sizes), f"z, x, B, C, Δ of {name}"
    return None


def _selective(use: Use, name: str, outputs: int) -> tuple[Cut, str] | None:
    """Δ, B and C of a state-space layer as Mamba's, whose Δ another layer of the same module reads."""
    beside = use.owner.parent
    states = None if beside is None else beside.module._parameters.get("A_log")
    if beside is None or states is None or states.ndim != 2:
        return None
    rank = next((c.widths[0] for c in beside.children if c.last_name == "dt_proj" and c.widths), 0)
    sizes = (rank, states.shape[1], states.shape[1])
    return (Cut(sizes), f"Δ, B, C of {name}") if rank and sum(sizes) == outputs else None


def _stated_parts(module: nn.Module) -> tuple[int, ...]:
    """The sizes of the parts of ``in_proj``, where a module states them, as timm's parallel block."""
    said = getattr(module, "in_split", None)
    if isinstance(said, list | tuple) and all(type(size) is int and size > 0 for size in said):
        return tuple(said)
    return ()


def _has_own_queries(use: Use) -> bool:
    """Whether q is a layer of its own, as in cross-attention, where q comes from elsewhere."""
    beside = use.owner.parent.children if use.owner.parent is not None else []
    return any(node.last_name in ("q_attn", "q_proj", "to_q") for node in beside)


def _flagged(name: str) -> tuple[Cut, str]:
    return WHOLE, f"‘{name}’ is fused by its name, and not cut: give splits={{…}}"


def has_heads_inside(use: Use, p: Tensor) -> bool:
    """Whether a bare parameter is (width, heads, width of a head), as XLNet's q, k, v and o.

    It is one matrix, with the heads side by side, and no stack of ``width`` matrices.
    """
    if use.label == "weight" or p.ndim != 3:
        return False
    heads, width = _number(use, HEADS), _number(use, HEAD_WIDTH)
    return (heads, width) == tuple(p.shape[1:]) and p.shape[0] >= p.shape[2]


def _above(use: Use) -> Iterator[Node]:
    """The layer and the two modules around it, innermost first."""
    yield use.owner
    for node, _ in zip(use.owner.ancestors(), range(2), strict=False):
        yield node


def _number(use: Use, names: tuple[str, ...]) -> int | None:
    """The number that a module around the weight, or its configuration, has under one of ``names``."""
    for node in _above(use):
        for holder in (node.module, getattr(node.module, "config", None)):
            for name in names:
                value = getattr(holder, name, None)
                if is_integer(value):
                    return value
    return None


def _reads(use: Use) -> int | None:
    """The inputs of the layer that reads the parts: a neighbour with a name like ``out_proj``."""
    module = use.owner.module
    gated = module._parameters.get(use.label)
    for label, p in module._parameters.items():
        if gated is None or p is None or p.ndim < 2 or label == use.label:
            continue
        if READERS.search(label):
            # The neighbour is stored the same way round, and its outputs are this weight's inputs.
            sides = set(p.shape[-2:])
            common = sides & set(gated.shape[-2:])
            rest = sides - common
            return rest.pop() if len(rest) == 1 else (p.shape[-1] if len(sides) == 1 else None)
    if use.owner.parent is None:
        return None
    for node in use.owner.parent.children:
        if node is not use.owner and READERS.search(node.last_name):
            widths = next((below.widths for below in node.walk() if below.widths), None)
            if widths is not None:
                return widths[0]
    return None
