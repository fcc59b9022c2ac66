"""The structure of a model, as far as routing its parameters needs it.

:func:`dissect` walks a model once. It sees through wrappers (``torch.compile``, DDP, activation
checkpointing), so names and findings do not depend on them. It gathers every place that uses a
parameter, so a tied parameter is one :class:`Site`. And it lists the embeddings and the output heads:
the layers whose outputs no other layer reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from polarstep.routing.names import (
    BIAS_LETTERS,
    COMPUTE_X_W,
    EMBEDDINGS,
    FEWEST_ENTRIES,
    HEAD_NAMES,
    HIDDEN_WIDTHS,
    LAYER_WIDTHS,
    LORA,
    MODULATION,
    NORMS,
    OTHER_TABLES,
    READS_HIDDEN,
    RECURRENT,
    WRAPPED,
    WRITES_HIDDEN,
)

__all__ = [
    "Anatomy",
    "Node",
    "Site",
    "Use",
    "dissect",
    "innermost",
    "stored_transposed",
    "unwrapped",
    "weight_beside",
]


# --- modules and parameters


@dataclass(eq=False)
class Node:
    """A module and its place in the model. Wrappers are no nodes, and ``name`` leaves theirs out."""

    name: str
    path: str  # as model.named_modules() has it, wrappers included
    module: nn.Module
    parent: Node | None
    children: list[Node] = field(default_factory=list)
    again: bool = False  # whether another node of the same module counts as its place
    adapts: bool = False  # whether it is part of an adapter, and no layer of the model

    @property
    def last_name(self) -> str:
        """The name within the module around it, as ``qkv`` of ``blocks.0.attn.qkv``."""
        return self.name.rpartition(".")[2]

    def walk(self) -> Iterator[Node]:
        """This node and all below, in the order of ``named_modules``."""
        yield self
        for child in self.children:
            yield from child.walk()

    def ancestors(self) -> Iterator[Node]:
        """The nodes above, innermost first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent

    def nearest(self, above: int) -> Iterator[Node]:
        """This node and as many as ``above`` around it, innermost first."""
        yield self
        yield from islice(self.ancestors(), above)

    @property
    def widths(self) -> tuple[int, int] | None:
        """Inputs and outputs, for a layer that is one linear map; ``None`` for any other module.

        A layer of unknown type counts if its only matrix, or stack of matrices, is called ``weight``.
        """
        module = self.module
        if isinstance(module, nn.Linear):
            return module.in_features, module.out_features
        if isinstance(module, _ConvNd):
            return module.in_channels, module.out_channels
        if isinstance(module, nn.Bilinear):
            return module.in1_features, module.out_features
        if isinstance(module, (*EMBEDDINGS, *RECURRENT, *NORMS)):
            return None
        matrices = [name for name, p in module._parameters.items() if p is not None and p.ndim > 1]
        weight = module._parameters["weight"] if matrices == ["weight"] else None
        if weight is None or weight.ndim not in (2, 3) or self.has_parameters_below:
            return None
        rows, cols = weight.shape[-2:]
        return (rows, cols) if stored_transposed(module, "weight", weight) else (cols, rows)

    @property
    def adapter_parts(self) -> tuple[str, ...]:
        """The names under which this layer holds the parts of its adapters, as PEFT's layers state."""
        said = getattr(self.module, "adapter_layer_names", ())
        # modules_to_save holds whole layers that are trained in place of others.
        return tuple(set(said) - {"modules_to_save"}) if isinstance(said, tuple) else ()

    @property
    def is_stack(self) -> bool:
        """Whether this layer of unknown type has a stack of matrices as its weight."""
        weight = self.module._parameters.get("weight")
        is_known = isinstance(self.module, (_ConvNd, nn.Bilinear, *NORMS))
        return weight is not None and weight.ndim == 3 and not is_known

    @property
    def has_parameters_below(self) -> bool:
        """Whether modules inside this one have parameters, as a loss function has none."""
        return any(True for child in self.children for _ in child.module.parameters())

    @property
    def inputs(self) -> tuple[int, ...]:
        """The widths this layer reads."""
        module = self.module
        if isinstance(module, nn.MultiheadAttention):
            return module.embed_dim, module.kdim, module.vdim
        if isinstance(module, nn.Bilinear):
            return module.in1_features, module.in2_features
        if isinstance(module, RECURRENT):
            return (module.input_size,)
        return self.widths[:1] if self.widths else ()

    @property
    def is_block(self) -> bool:
        """Whether this module is one of several alike that follow each other, as in a trunk.

        In a ``ModuleList`` every module with layers of its own is a block. In a ``Sequential`` a
        module is a block if it has a sibling of its class; if it is a ``Sequential`` itself, the
        sibling must have the same shapes.
        """
        if self.parent is None or not self.children or self.widths is not None:
            return False
        if isinstance(self.parent.module, nn.ModuleList):
            return True
        if not isinstance(self.parent.module, nn.Sequential):
            return False
        siblings = [node.module for node in self.parent.children if node is not self]
        kind = type(self.module)
        if kind is nn.Sequential:
            return any(type(m) is kind and _shapes(m) == _shapes(self.module) for m in siblings)
        return any(type(m) is kind for m in siblings)


def _shapes(module: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in module.parameters()]


@dataclass(frozen=True, eq=False)
class Use:
    """A place that holds a parameter. ``owner`` is the layer it belongs to, ``label`` its name there.

    For a parametrized weight the owner is the layer and not torch's ``ParametrizationList``.
    """

    name: str
    path: str
    owner: Node
    label: str


@dataclass(frozen=True, eq=False)
class Site:
    """A parameter and all the places that hold it: more than one if it is tied."""

    parameter: Tensor
    uses: tuple[Use, ...]

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.uses[0].name

    @property
    def names(self) -> frozenset[str]:
        """Every name of the parameter, with and without the names of wrappers."""
        return frozenset(name for use in self.uses for name in (use.name, use.path))


@dataclass(frozen=True, eq=False)
class Anatomy:
    """A model's parameters and what its layers say about each other."""

    root: Node
    sites: tuple[Site, ...]
    vocabularies: dict[int, str]  # entries of an embedding of words → its name
    heads: dict[int, str]  # id of an output layer → how it was recognized


def dissect(model: nn.Module) -> Anatomy:
    """Walk ``model`` and find its parameters, embeddings and output layers."""
    root = _grow(model, "", "", None)
    _mark_aliases(root)
    uses: dict[int, list[Use]] = {}
    parameters: dict[int, Tensor] = {}
    for node in root.walk():
        for use, p in _uses(node):
            uses.setdefault(id(p), []).append(use)
            parameters[id(p)] = p
    sites = tuple(Site(p, tuple(uses[key])) for key, p in parameters.items())
    vocabularies: dict[int, str] = {}
    embedded = set()
    for node in root.walk():
        if isinstance(node.module, EMBEDDINGS):
            if not OTHER_TABLES.search(node.last_name):
                vocabularies.setdefault(node.module.num_embeddings, node.name)
            embedded.add(node.module.embedding_dim)
    return Anatomy(root, sites, vocabularies, _heads(root, vocabularies, embedded))


def _grow(module: nn.Module, name: str, path: str, parent: Node | None) -> Node:
    while (attribute := _wrapped(module)) is not None:
        module, path = module.get_submodule(attribute), _join(path, attribute)
    node = Node(name, path, module, parent)
    if parent is not None:
        key = node.last_name
        node.adapts = parent.adapts or bool(LORA.match(key)) or key in parent.adapter_parts
    for key, child in module._modules.items():
        hidden = key == "parametrizations" and parametrize.is_parametrized(module)
        if child is not None and not hidden:
            node.children.append(_grow(child, _join(name, key), _join(path, key), node))
    return node


def _mark_aliases(root: Node) -> None:
    """Choose one place for each module that the model holds several times; set ``again`` at the others.

    A script may hold part of a model under a second name, as ``self.backbone = self.layers[:-1]`` or
    ``self.head = self.net.fc``. The deepest place is chosen, and the first of equally deep ones: that is
    where the layer was built, and where the layers after it are known.
    """
    places: dict[int, list[Node]] = {}
    for node in root.walk():
        places.setdefault(id(node.module), []).append(node)
    for nodes in places.values():
        own = max(nodes, key=lambda node: len(list(node.ancestors())))
        for node in nodes:
            node.again = node is not own


def _wrapped(module: nn.Module) -> str | None:
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    return next((key for key in WRAPPED if module._modules.get(key) is not None), None)


def _uses(node: Node) -> Iterator[tuple[Use, Tensor]]:
    """The parameters of one layer, including the parameters of its parametrizations."""
    for label, p in node.module._parameters.items():
        if p is not None:
            yield Use(_join(node.name, label), _join(node.path, label), node, label), p
    if parametrize.is_parametrized(node.module):
        originals = node.module.get_submodule("parametrizations")
        for key, p in originals.named_parameters(remove_duplicate=False):
            key = f"parametrizations.{key}"
            label = key.split(".")[1]
            yield Use(_join(node.name, key), _join(node.path, key), node, label), p


def innermost(module: nn.Module) -> nn.Module:
    """The module inside all its wrappers, as of DDP and of ``torch.compile``."""
    while (key := _wrapped(module)) is not None:
        module = module.get_submodule(key)
    return module


def unwrapped(name: str) -> str:
    """A parameter's name without the prefixes of wrappers, as DDP's ``module.``."""
    parts = [part for part in name.split(".") if part not in WRAPPED]
    return ".".join(parts[1:] if parts[0] == "module" and len(parts) > 1 else parts)


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


# --- which side of a weight has the outputs


def stored_transposed(module: nn.Module, label: str, p: Tensor) -> str | None:
    """Why the matrices of ``p``, called ``label`` in ``module``, are stored inputs × outputs.

    ``None`` if they are stored outputs × inputs, as in ``nn.Linear`` and almost everywhere. GPT-2's
    ``Conv1D`` and the experts of gpt-oss and Llama 4 compute ``x @ W`` and store W as inputs × outputs.
    The module says so by its attributes, by the length of the bias, or, where both sides are equal, by
    its class.
    """
    if p.ndim not in (2, 3) or isinstance(module, nn.Linear | nn.Bilinear | nn.MultiheadAttention):
        return None
    kind = type(module).__name__
    rows, cols = p.shape[-2:]
    said = getattr(module, "is_transposed", None)
    if isinstance(said, bool) and p.ndim == 3:
        return "is_transposed" if said else None
    if rows == cols:
        return "inputs × outputs" if COMPUTE_X_W.search(kind) else None
    if p.ndim == 2 and label == "weight":
        for inputs, outputs in LAYER_WIDTHS:
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
        hidden = next((size for name in HIDDEN_WIDTHS if (size := _size(module, name))), None)
        # The first matrices of an expert read the hidden state.
        reads = bool(READS_HIDDEN.search(label.replace("down", "")))
        # Other names, as Zamba's x_proj_weight inside a state-space layer, say nothing of the side.
        if hidden in (rows, cols) and (reads or WRITES_HIDDEN.search(label)):
            return f"{rows} inputs as rows" if (hidden == rows) == reads else None
    return "inputs × outputs" if COMPUTE_X_W.search(kind) else None


def _bias(module: nn.Module, label: str) -> Tensor | None:
    """The bias beside a weight: ``bias`` of ``weight``, ``up_bias`` of ``up``, ``b1`` of ``w1``."""
    names = [label.replace("weight", "bias"), f"{label}_bias"]
    names += [short + label[1:] for letter, short in BIAS_LETTERS if label[:1] == letter]
    found = (module._parameters.get(name) for name in names if name != label)
    return next((bias for bias in found if bias is not None), None)


def weight_beside(module: nn.Module, label: str, p: Tensor) -> str | None:
    """The name of the weight whose bias ``p`` is, called ``label`` in ``module``: ``w1`` for ``b1``.

    The weight has a side as long as the bias, beside the sides of a stack that both may have.
    """
    for letter, short in BIAS_LETTERS:
        weight = module._parameters.get(letter + label[1:]) if label[:1] == short else None
        if weight is None or weight.ndim != p.ndim + 1:
            continue
        if weight.shape[:-2] == p.shape[:-1] and p.shape[-1] in weight.shape[-2:]:
            return letter + label[1:]
    return None


def _size(module: nn.Module, name: str) -> int | None:
    value: Any = getattr(module, name, None)
    return value if isinstance(value, int) else None


# --- output heads


def _heads(root: Node, vocabularies: dict[int, str], embedded: set[int]) -> dict[int, str]:
    """How each output layer was recognized, by the id of its module.

    The model is not run. Widths say which layer may read which: d outputs may be read by a layer with d
    inputs, or in equal parts by layers with fewer. There are three signs, the strongest first:

    * a row for each entry of an embedding, and no layer that reads so many inputs;
    * a place at the end of the model;
    * outputs that no layer reads, and a name that says head.

    Args:
        root: the whole model.
        vocabularies: the number of entries of each embedding of words, and its name.
        embedded: the widths of the embeddings.
    """
    layers = [node for node in root.walk() if not (node.again or node.adapts)]
    read = _widths_read(layers)
    heads: dict[int, str] = {}
    for node in layers:
        if node.widths is not None:
            width = node.widths[1]
            if width >= FEWEST_ENTRIES and width in vocabularies and not read[width]:
                heads[id(node.module)] = f"a row for each entry of {vocabularies[width]}"
        elif isinstance(node.module, nn.AdaptiveLogSoftmaxWithLoss):
            for part in node.walk():
                heads[id(part.module)] = "part of an adaptive softmax"
    for i, node in enumerate(_tail(root, layers)):
        assert node.widths is not None
        width = node.widths[1]
        # A last layer whose outputs are as wide as an embedding that the trunk reads is no head:
        # the embedding is the head, by F.linear(x, embedding.weight) in the forward pass.
        tied = width in embedded and read[width] and width not in vocabularies
        if not tied or HEAD_NAMES.search(node.last_name):
            how = "the model's last layer" if i == 0 else f"no layer reads its {width} outputs"
            heads.setdefault(id(node.module), how)
    for node in layers:
        if id(node.module) not in heads and _called_head(node) and (side := _unread(node, read)):
            heads[id(node.module)] = f"no layer reads its {side} outputs, and its name says head"
    return heads


def _widths_read(layers: list[Node]) -> Counter[int]:
    """How many of ``layers`` read each width; without stacks, whose input side may be unknown."""
    return Counter(width for node in layers if not node.is_stack for width in node.inputs)


def _tail(node: Node, layers: list[Node]) -> list[Node]:
    """The layers whose outputs leave ``node``, the last layer first.

    They include the last layer. Other heads (policy and value, one head per task) are registered just
    before it, and no layer reads their outputs. A trunk of repeated blocks has no head inside.
    """
    if node.widths is not None:
        return [node]
    if isinstance(node.module, (nn.MultiheadAttention, *RECURRENT)):
        return []
    children = [
        child
        for child in node.children
        if _has_layers(child) and not MODULATION.search(child.last_name)
    ]
    if isinstance(node.module, nn.Sequential):
        return _tail(children[-1], layers) if children and not children[-1].is_block else []
    children = [child for child in children if _has_layers(child, of_its_own=True)]
    found: list[Node] = []
    for child in reversed(children):
        ends = [] if child.is_block else _tail(child, layers)
        inside = not ends or any(_is_read(end, layers) and not _is_twin(end, found) for end in ends)
        if inside and child is not children[-1]:
            break
        found += ends
    return found


def _is_read(node: Node, layers: list[Node]) -> bool:
    """Whether another layer may take the outputs of ``node`` as inputs.

    Layers registered before a module that is called head do not read what it ends with: they read states
    and actions that it predicts, or hidden states that happen to be as wide as a vocabulary.
    """
    assert node.widths is not None
    others = _widths_read(layers) - Counter(node.inputs)
    flattened = isinstance(node.module, _ConvNd) and any(
        other % node.widths[1] == 0 for other in others
    )
    if not (flattened or _may_read(node, others)):
        return False
    head = _called_head(node)
    if head is None:
        return True
    after = layers[layers.index(node) + 1 :]
    beside = [each for each in head.walk() if each is not node]
    return node.widths[1] in _widths_read(after + beside)


def _is_twin(node: Node, last: list[Node]) -> bool:
    """Whether a layer is one of several for one space, as ``visual_projection`` and ``text_projection``.

    ``last`` are output layers beside it. As wide as layers before it, it may seem to be read by them.
    """
    return any(
        node.parent is other.parent
        and node.widths is not None
        and other.widths is not None
        and node.widths[1] == other.widths[1]
        and "_" in node.last_name
        and node.last_name.rpartition("_")[2] == other.last_name.rpartition("_")[2]
        for other in last
    )


def _may_read(node: Node, read: Counter[int]) -> bool:
    """Whether layers that read the widths ``read`` may read ``node``, whole or cut into equal parts."""
    assert node.widths is not None
    width = node.widths[1]
    return width in read or any(other >= 16 and width % other == 0 for other in read)


def _unread(node: Node, read: Counter[int]) -> int | None:
    """The width of outputs that no other layer of the model reads, wherever it is registered."""
    if node.widths is None:
        return None
    if node.is_stack:  # output layers for several codebooks; either side may have the outputs
        return next((side for side in node.widths if side not in read), None)
    unread = not _may_read(node, read - Counter(node.inputs))
    return node.widths[1] if unread else None


def _called_head(node: Node) -> Node | None:
    """This layer, or a module that ends with it, if called head; none inside a repeated block."""
    called = [place for place in node.nearest(2) if HEAD_NAMES.search(place.last_name)]
    if not called or node.widths is None or any(above.is_block for above in node.ancestors()):
        return None
    ends = (p for p in called if isinstance(p.module, nn.ModuleList) or _last_layer(p) is node)
    return next(ends, None)


def _last_layer(node: Node) -> Node:
    """The layer that is registered last in ``node``."""
    *_, last = (below for below in node.walk() if below.inputs and not below.adapts)
    return last


def _has_layers(node: Node, of_its_own: bool = False) -> bool:
    """Whether there are layers with matrices at or below ``node``, embeddings aside.

    ``of_its_own``: count only layers whose main place in the model is here (see ``Node.again``).
    """
    return any(
        below.inputs
        for below in node.walk()
        if not below.adapts and not (of_its_own and below.again)
    )
