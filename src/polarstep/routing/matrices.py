"""How a weight is read as matrices: its orientation, and the projections fused in it.

:func:`form_of` says it for every weight. A weight whose name says that it holds several projections, as
q, k and v, is cut where shapes say so. The strongest evidence is the layer that reads the result: the
projection back from attention has as many inputs as q has outputs, and what is left of the fused outputs
is k and v, with fewer heads or not. A weight that is fused by its name alone is not cut, and the routing
table says so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from polarstep.checked_values import is_integer
from polarstep.matrix import Layout, MatrixView
from polarstep.routing.anatomy import Node, Site, Use, stored_transposed
from polarstep.routing.names import (
    ATTENTION,
    BY_HEAD,
    CODEGEN_BLOCKS,
    CONTAINERS,
    EMBEDDINGS,
    FUSED,
    GATED,
    GATED_WIDTHS,
    HEAD_WIDTH,
    IN_PROJ,
    KEY_VALUE,
    LATENT,
    MEGATRON_WIDTH,
    NORMS,
    NUM_HEADS,
    NUM_KV_HEADS,
    PER_GROUP,
    QUERY_KEY,
    READERS,
    RECURRENT,
    SELECTIVE,
    UNCERTAIN,
)

__all__ = [
    "WHOLE",
    "Cut",
    "Form",
    "form_of",
    "is_typed",
    "kind_of",
    "number_near",
]


@dataclass(frozen=True)
class Cut:
    """Sizes of the parts of a weight: Muon's ``split_sizes``, ``split_columns``, ``split_repeats``."""

    outputs: tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    repeats: int = 1
    letters: str = ""
    """Which projections the outputs are, a letter each: ``"qkv"``; empty if they are no attention's."""

    @property
    def options(self) -> dict[str, object]:
        """The options of a parameter group."""
        return {
            "split_sizes": self.outputs,
            "split_columns": self.columns,
            "split_repeats": self.repeats,
        }


WHOLE = Cut()


@dataclass(frozen=True)
class Form:
    """How a parameter is read as matrices, and a description of them."""

    layout: Layout = "auto"
    cut: Cut = WHOLE
    what: str = "matrix"
    how: str = ""
    """How the matrices lie in the parameter, which follows ``what`` in the description."""

    @property
    def description(self) -> str:
        """The matrices in a few words, for the routing table."""
        return self.what + self.how

    def view(self, p: Tensor, name: str = "the parameter") -> MatrixView:
        """The matrices of ``p``."""
        return MatrixView.of(
            p.shape,
            layout=self.layout,
            split_sizes=self.cut.outputs,
            split_columns=self.cut.columns,
            split_repeats=self.cut.repeats,
            name=name,
        )


def of_channels(site: Site) -> float:
    """√(positions of the kernel) for the filters of a convolution, and 1 for other parameters.

    ``"fan-ratio"`` is √(m/n) for n inputs. The filters of a convolution are read as a matrix with n =
    channels × positions, and what lies at neighbouring positions is much alike. With this factor the
    rate is √(m/channels). Filters that meet each position once, as those that cut an image into patches,
    are a linear layer of the patches.
    """
    module = site.uses[0].owner.module
    if not isinstance(module, _ConvNd) or site.uses[0].label != "weight":
        return 1.0
    overlap = any(k > step for k, step in zip(module.kernel_size, module.stride, strict=True))
    return math.sqrt(math.prod(module.kernel_size)) if overlap else 1.0


def form_of(site: Site) -> Form:
    """How the layer that owns the parameter uses it.

    The layout is ``"auto"`` wherever that is right, so that parameters of different layers can
    share a group.
    """
    p, use = site.parameter, site.uses[0]
    if p.ndim < 2:
        return Form()
    module, rows = use.owner.module, p.shape[0]
    if isinstance(module, _ConvNd) and p.ndim > 2:
        kind, how = kind_of(module), ""
        layout: Layout = "conv" if p.ndim == 3 else "auto"
        if isinstance(module, _ConvTransposeNd):
            # Stored as in × out·k, the transpose of the map; its polar factor is transposed alike.
            how = ", inputs as rows"
        if module.groups > 1 and rows % module.groups == 0:
            cut = Cut((rows // module.groups,) * module.groups)
            return Form(layout, cut, f"{module.groups} groups of a {kind}", how)
        what, fused = f"filters of a {kind}", None
        if not isinstance(module, _ConvTransposeNd):
            fused = find_cut(use, rows, module.in_channels)
        if fused is None:
            return Form(layout, WHOLE, what, how)
        cut, parts = fused
        return Form(layout, cut, what, f": {parts}")
    if isinstance(module, nn.MultiheadAttention) and use.label == "in_proj_weight":
        cut = Cut((rows // 3,) * 3, letters="qkv")
        return Form(cut=cut, what="q, k, v of MultiheadAttention")
    if isinstance(module, RECURRENT) and not use.label.startswith("weight_hr"):
        gates = rows // module.hidden_size
        if gates > 1:
            return Form(
                cut=Cut((module.hidden_size,) * gates), what=f"{gates} gates of {kind_of(module)}"
            )
        return Form(what=kind_of(module))
    if isinstance(module, nn.Bilinear):
        return Form(what=f"{rows} forms of a Bilinear")
    if p.ndim == 3 and has_heads_inside(use, p):
        heads = f", {p.shape[1]} heads side by side"
        return Form("conv", WHOLE, f"bare parameter of {kind_of(module)}", heads)
    if p.ndim in (2, 3):
        return _linear_form(site)
    if is_typed(module):
        return Form(what=kind_of(module))
    if p.ndim in (4, 5):
        what = f"bare {p.ndim}-d parameter of {kind_of(module)}"
        return Form("auto", WHOLE, what, ", read as filters")
    return Form(what=f"{math.prod(p.shape[:-2])} matrices stacked in {kind_of(module)}")


def _linear_form(site: Site) -> Form:
    """The form of one linear map or of a stack of them: which side has the outputs, which parts."""
    p, use = site.parameter, site.uses[0]
    module = use.owner.module
    transposed = stored_transposed(module, use.label, p)
    layout: Layout = "transposed" if transposed else "auto"
    outputs, inputs = p.shape[:-3:-1] if transposed else p.shape[-2:]
    if is_typed(module):
        what = kind_of(module)
    elif p.ndim == 2:
        what = kind_of(module) if transposed else f"bare parameter of {kind_of(module)}"
    else:
        what = f"{len(p)} matrices stacked in {kind_of(module)}"
    if transposed:
        what += f" ({transposed})"
    found = find_cut(use, outputs, inputs)
    if found is None:
        return Form(layout, WHOLE, what)
    cut, parts = found
    return Form(layout, cut, what, f": {parts}")


def is_typed(module: nn.Module) -> bool:
    """Whether the type of the layer says how it uses its parameters."""
    known = (
        nn.Linear,
        nn.Bilinear,
        nn.MultiheadAttention,
        _ConvNd,
        *EMBEDDINGS,
        *RECURRENT,
        *NORMS,
    )
    return isinstance(module, known)


def kind_of(module: nn.Module) -> str:
    """The name of a layer's class, or of the torch layer that the class derives from."""
    if is_typed(module):
        for cls in type(module).__mro__:
            if cls.__module__.startswith("torch.nn.modules") and "Quantizable" not in cls.__name__:
                return cls.__name__
    return type(module).__name__


# --- projections that are fused in one weight


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
    if ATTENTION.search(name) or (IN_PROJ.search(name) and _is_attention_by_head(use)):
        return _attention(use, name, outputs, inputs)
    if IN_PROJ.search(name):
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
    letters = "qk" if QUERY_KEY.search(name) else "kv"
    parts = ", ".join(letters)
    heads, keys, values = number_near(use.owner, NUM_HEADS), _keys(use), _values(use)
    if heads and keys and values and heads * (keys + values) == outputs:
        return Cut((keys, values), None, heads, letters), f"{parts} of {name}, head by head"
    reads = _reads(use)
    if reads and 2 * reads == outputs:
        return Cut((reads,) * 2, letters=letters), f"{parts} of {name}"
    return None


def _keys(use: Use) -> int | None:
    """The width of one head's keys, where a module states it."""
    return number_near(use.owner, ("key_dim",))


def _values(use: Use) -> int | None:
    """The width of one head's values, which may differ from the width of its keys, as in LeViT."""
    ratio, keys = number_near(use.owner, ("attention_ratio",)), _keys(use)
    return number_near(use.owner, ("val_dim",)) or (ratio * keys if ratio and keys else None)


def _is_by_head(use: Use) -> bool:
    """Whether a module around the weight stores q, k and v head by head."""
    modules = [node.module for node in use.owner.nearest(2)]
    return any(
        BY_HEAD.search(type(module).__name__)
        or getattr(module, "head_first", None) is True
        or any(isinstance(getattr(module, name, None), int) for name in (PER_GROUP, MEGATRON_WIDTH))
        for module in modules
    )


def _is_attention_by_head(use: Use) -> bool:
    """As :func:`_is_by_head`, where the name of the weight leaves open that it is attention's."""
    kinds = (type(node.module).__name__ for node in use.owner.nearest(2))
    return _is_by_head(use) and any("Attention" in kind for kind in kinds)


def _attention(use: Use, name: str, outputs: int, inputs: int) -> tuple[Cut, str]:
    kinds = [type(node.module).__name__ for node in use.owner.nearest(2)]
    reads, found = _reads(use), f"q, k, v of {name}"
    if any(kind.startswith("CodeGen") for kind in kinds):
        part = outputs // (3 * CODEGEN_BLOCKS)
        return Cut((part,) * 3, None, CODEGEN_BLOCKS, "qvk"), f"q, v, k of {name}"
    if _is_by_head(use):
        cut = _by_head(use, outputs)
        if cut is None:
            return _flagged(name)
        return cut, f"{found}, head by head" if cut.repeats > 1 else found
    heads, keys, values = number_near(use.owner, NUM_HEADS), _keys(use), _values(use)
    if heads and keys and values and heads * (2 * keys + values) == outputs:
        return Cut((keys, keys, values), None, heads, "qkv"), f"{found}, head by head"
    values = number_near(use.owner, ("value_dim",))
    if keys and values and 2 * keys + values == outputs:
        return Cut((keys, keys, values), letters="qkv"), found
    if UNCERTAIN.search(name):
        return _flagged(name)
    if reads:
        left = (outputs - reads) // 2
        if outputs == 2 * reads and _has_own_queries(use):
            return Cut((reads,) * 2, letters="kv"), f"k, v of {name}"
        if left > 0 and reads + 2 * left == outputs and reads % left == 0:
            return Cut((reads, left, left), letters="qkv"), found
        if outputs == 1 + 2 * reads:  # a single query, as in MobileViT's separable attention
            return Cut((1, reads, reads), letters="qkv"), found
    width = number_near(use.owner, HEAD_WIDTH)
    groups = number_near(use.owner, NUM_KV_HEADS) or heads
    if heads and groups and width and (heads + 2 * groups) * width == outputs:
        return Cut((heads * width, groups * width, groups * width), letters="qkv"), found
    if outputs == 3 * inputs:
        return Cut((inputs,) * 3, letters="qkv"), found
    return _flagged(name)


def _by_head(use: Use, outputs: int) -> Cut | None:
    """q, k and v group by group, for groups of heads that share one k and one v."""
    layer = use.owner
    heads, groups = number_near(layer, NUM_HEADS), number_near(layer, NUM_KV_HEADS)
    width, queries = number_near(layer, HEAD_WIDTH), number_near(layer, (PER_GROUP,))
    if heads and (of_megatron := number_near(layer, (MEGATRON_WIDTH,))):
        width, queries = of_megatron, heads // (groups or heads)
    if queries and width:
        repeats, rest = divmod(outputs, (queries + 2) * width)
        return Cut((queries * width, width, width), None, repeats, "qkv") if rest == 0 else None
    for count in (groups, heads):
        if heads and count and heads % count == 0:
            each = heads // count
            found, rest = divmod(outputs, count * (each + 2))
            if rest == 0 and width in (found, None):
                return Cut((each * found, found, found), None, count, "qkv")
    return None


def _latent(use: Use, name: str, outputs: int) -> tuple[Cut, str] | None:
    """Keys without position and values of multi-head latent attention, head by head."""
    heads = number_near(use.owner, NUM_HEADS)
    keys, values = (
        number_near(use.owner, ("qk_nope_head_dim",)),
        number_near(use.owner, ("v_head_dim",)),
    )
    if heads and keys and values and heads * (keys + values) == outputs:
        return Cut((keys, values), None, heads, "kv"), f"k, v of {name}, head by head"
    return None


def _gated(use: Use, name: str, outputs: int) -> tuple[Cut, str] | None:
    half, odd = divmod(outputs, 2)
    reads = _reads(use)
    if reads == outputs:  # T5's first wi, without a gate
        return None
    agrees = not odd and half in (reads, number_near(use.owner, GATED_WIDTHS))
    if not agrees:
        return _flagged(name)
    if getattr(use.owner.module, "is_concatenated", True) is False:
        return Cut((1, 1), repeats=half), f"gate, up of {name}, interleaved"
    return Cut((half, half)), f"gate, up of {name}"


def _input(use: Use, name: str, outputs: int) -> tuple[Cut, str] | None:
    """The input projection of a state-space layer, a gated convolution or a parallel block."""
    parts = next(
        (sizes for node in use.owner.nearest(2) if (sizes := _stated_parts(node.module))), ()
    )
    if len(parts) > 1 and sum(parts) == outputs:
        return Cut(parts), f"{len(parts)} parts of {name}"
    reads = _reads(use)
    if reads and outputs in (2 * reads, 3 * reads):
        return Cut((reads,) * (outputs // reads)), f"{outputs // reads} parts of {name}"
    if reads and outputs > reads:
        groups = number_near(use.owner, ("n_groups",))
        states = number_near(use.owner, ("ssm_state_size", "d_state"))
        heads = number_near(use.owner, NUM_HEADS)
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
    heads, width = number_near(use.owner, NUM_HEADS), number_near(use.owner, HEAD_WIDTH)
    return (heads, width) == tuple(p.shape[1:]) and p.shape[0] >= p.shape[2]


def number_near(layer: Node, names: tuple[str, ...]) -> int | None:
    """The number that a module around a layer, or its configuration, has under one of ``names``."""
    for node in layer.nearest(2):
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
