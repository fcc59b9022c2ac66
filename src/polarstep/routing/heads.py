"""The output heads of a model: the layers whose outputs no other layer reads.

The model is not run. Widths say which layer may read which: d outputs may be read by a layer with d
inputs, or in equal parts by layers with fewer. :func:`find_heads` looks for three signs, the strongest
first:

* a row for each entry of an embedding, and no layer that reads so many inputs;
* a place at the end of the model;
* outputs that no layer reads, and a name that says head.
"""

from __future__ import annotations

import re
from collections import Counter

from torch import nn
from torch.nn.modules.conv import _ConvNd

from polarstep.routing.node import RECURRENT, Node

__all__ = ["find_heads"]

# Layers that make shifts and scales for a norm, as in diffusion transformers. They may be registered
# after the output layer, and what they compute does not leave the model.
MODULATION = re.compile(r"(^|\.)(ada_?ln|ada_?norm|film|modulation)", re.IGNORECASE)
# Names of output layers. They count only together with outputs that no layer, or no later one, reads.
HEAD = re.compile(
    r"(^|_)(heads?|classifier|predict(or|ion)?s?|logits?|scores?)(_|$)", re.IGNORECASE
)

# A table of fewer entries, as of two kinds of tokens, says nothing of a layer with as many outputs.
FEWEST = 8


def find_heads(root: Node, vocabularies: dict[int, str], embedded: set[int]) -> dict[int, str]:
    """How each output layer was recognized, by the id of its module.

    Args:
        root: the whole model.
        vocabularies: the number of entries of each embedding, and its name.
        embedded: the widths of the embeddings.
    """
    layers = [node for node in root.walk() if not (node.again or node.adapts)]
    read = _widths_read(layers)
    heads: dict[int, str] = {}
    for node in layers:
        if node.widths is not None:
            width = node.widths[1]
            if width >= FEWEST and width in vocabularies and not read[width] and _ends_block(node):
                table = vocabularies[width]
                heads[id(node.module)] = f"a row for each entry of {table}"
        elif isinstance(node.module, nn.AdaptiveLogSoftmaxWithLoss):
            for part in node.walk():
                heads[id(part.module)] = "part of an adaptive softmax"
    for i, node in enumerate(_tail(root, layers)):
        assert node.widths is not None
        width = node.widths[1]
        # A last layer whose outputs are as wide as an embedding that the trunk reads is no head:
        # the embedding is the head, by F.linear(x, embedding.weight) in the forward pass.
        tied = width in embedded and read[width] and width not in vocabularies
        if not tied or HEAD.search(node.last_name):
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
        by_position = child is children[-1] and not _has_twin_in_dict(child)
        if not by_position and (
            not ends or any(_is_read(end, layers) and not _is_twin(end, found) for end in ends)
        ):
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
    around = [node, *(above for above, _ in zip(node.ancestors(), range(2), strict=False))]
    called = [place for place in around if HEAD.search(place.last_name)]
    if not called or node.widths is None or any(above.is_block for above in node.ancestors()):
        return None
    ends = (p for p in called if isinstance(p.module, nn.ModuleList) or _last_layer(p) is node)
    return next(ends, None)


def _last_layer(node: Node) -> Node:
    """The layer that is registered last in ``node``."""
    *_, last = (below for below in node.walk() if below.inputs and not below.adapts)
    return last


def _has_twin_in_dict(node: Node) -> bool:
    """Whether ``node`` is one of several alike in a ``ModuleDict``: experts, or one head per task."""
    if node.parent is None or not isinstance(node.parent.module, nn.ModuleDict):
        return False
    alike = [
        child
        for child in node.parent.children
        if type(child.module) is type(node.module) and _first_inputs(child) == _first_inputs(node)
    ]
    return bool(node.children) and len(alike) > 1


def _first_inputs(node: Node) -> tuple[int, ...]:
    """What the first layer in ``node`` reads; an encoder and a decoder differ in it."""
    return next((tuple(below.inputs) for below in node.walk() if below.inputs), ())


def _ends_block(node: Node) -> bool:
    """Whether ``node`` is in no repeated block, or is the last layer of its block."""
    block = next((above for above in node.ancestors() if above.is_block), None)
    if block is None:
        return True
    layers = [each for each in block.walk() if each.widths and not each.adapts]
    return layers[-1] is node


def _has_layers(node: Node, of_its_own: bool = False) -> bool:
    """Whether there are layers with matrices at or below ``node``, embeddings aside.

    ``of_its_own``: count only layers whose main place in the model is here (see ``Node.again``).
    """
    return any(
        below.inputs
        for below in node.walk()
        if not below.adapts and not (of_its_own and below.again)
    )
