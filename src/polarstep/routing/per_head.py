"""Projections of attention cut into heads, each with a polar factor of its own.

The projections to q, k and v are cut along their outputs, and the projection back, o, along its
inputs. Weights that :mod:`polarstep.routing.matrices` cuts into q, k and v are cut further. k and v may
have fewer heads than q. The number of heads is what the module of attention says, or its configuration.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import islice
from typing import NoReturn

from torch import nn
from torch.nn.modules.conv import _ConvNd

from polarstep.rates import ShapeScale, resolve_scale
from polarstep.routing.anatomy import Node, Site, Use
from polarstep.routing.matrices import Cut, Form, number_near
from polarstep.routing.names import (
    ATTENTION,
    ATTENTION_MODULES,
    HEAD_WIDTH,
    KEY_VALUE,
    LATENT,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_QUERY_HEADS,
    NUM_VALUE_HEADS,
    PROJECTIONS,
    QUERY_KEY,
)

__all__ = ["LETTERS", "cut_into_heads", "size_of_step"]

LETTERS = ("q", "k", "v", "o")


def cut_into_heads(site: Site, form: Form, asked: Collection[str]) -> Form | None:
    """``form`` with a part for each head; ``None`` if this is no projection that is ``asked`` for."""
    use, p = site.uses[0], site.parameter
    is_bare = p.ndim == 3 and not isinstance(use.owner.module, _ConvNd)
    if is_bare and form.layout != "conv":
        return None  # a stack of matrices, one for each head, as TransformerLens has it
    name, attention = next(_places(use), ("", None))
    letters = form.cut.letters or name
    if attention is None or not set(letters) & set(asked):
        return None
    if len(letters) > 1 and form.cut.outputs is None:
        _refuse_unknown_parts(site)
    heads = number_near(attention, NUM_QUERY_HEADS)
    if heads is None:
        _refuse_unknown_number(site, attention, letters)
    whole = Form(form.layout).view(p)
    outputs, inputs = whole.split[0], whole.columns[0]
    if letters == "o" or is_bare:  # XLNet's bare parameters have their heads in the last sides
        cut = Cut(columns=_equal(site, inputs, number_near(attention, NUM_VALUE_HEADS) or heads))
    elif letters == "q":
        cut = Cut(_queries(site, attention, outputs, heads))
    elif letters in ("k", "v"):
        cut = Cut(_equal(site, outputs, _shared_heads(attention, letters, outputs, heads)))
    else:
        cut = _refined(site, attention, form.cut, heads, asked)
    return replace(form, cut=cut, how=f"{form.how}, per head")


def size_of_step(site: Site, form: Form, shape_scale: ShapeScale) -> float:
    """‖ΔX‖_F/η of a step with T of full rank, for a weight that is read as ``form``.

    Cut into heads, a projection has the same ‖T‖_F, and other factors by shape: with ``"fan-ratio"``
    smaller ones for q, k and v, and larger ones for the projection back, whose heads are added up. The
    optimizer evens it out, so that a step is as long with ``per_head`` as without.
    """
    scale, total = resolve_scale(shape_scale), 0.0
    for count, m, n in form.view(site.parameter).shapes:
        sides = (n, m) if form.layout == "transposed" else (m, n)
        total += count * min(m, n) * scale(*sides, min(m, n)) ** 2
    return math.sqrt(total)


# --- which projection a weight is, and in which attention


def _places(use: Use) -> Iterator[tuple[str, Node]]:
    """The letters of a projection by its name, and the module of attention that it belongs to."""
    owner = use.owner
    if use.label != "weight" and use.label in owner.module._parameters:
        is_torch = isinstance(owner.module, nn.MultiheadAttention)
        letters = "qkv" if is_torch and use.label == "in_proj_weight" else _letters(use.label)
        if letters:
            yield letters, owner
        return
    for node in owner.nearest(2):
        around = node.parent
        if around is None:
            return
        letters = _letters(node.last_name)
        if letters == "o":
            for attention in (around, *_attention_beside(around)):
                if _has_queries(attention):
                    yield letters, attention
        elif letters and _has_queries(around):
            yield letters, around
        # The name of the layer may be that of a module with no other layer, as of to_out.0.
        if len(list(islice((below for below in around.walk() if below.widths), 2))) > 1:
            return


def _letters(name: str) -> str:
    if ATTENTION.search(name):
        return "qkv"
    if QUERY_KEY.search(name):
        return "qk"
    if KEY_VALUE.search(name) or LATENT.search(name):
        return "kv"
    return next((letter for letter, names in PROJECTIONS.items() if names.search(name)), "")


def _has_queries(node: Node) -> bool:
    """Whether a projection to q, or a fused one, lies directly in this module."""
    module = node.module
    matrices = [name for name, p in module._parameters.items() if p is not None and p.ndim > 1]
    names = [*matrices, *(child.last_name for child in node.children if not child.adapts)]
    return isinstance(module, nn.MultiheadAttention) or any("q" in _letters(n) for n in names)


def _attention_beside(output: Node) -> Iterator[Node]:
    """Modules of attention beside the module with the projection back, as in BERT and torchtitan."""
    places = [output] if _is_called_attention(output) else []
    above = output.parent
    if above is not None and _is_called_attention(above):
        places.append(above)
    for place in places:
        yield from place.children


def _is_called_attention(node: Node) -> bool:
    kind = type(node.module).__name__
    return bool(ATTENTION_MODULES.search(kind) or ATTENTION_MODULES.search(node.last_name))


# --- the parts


def _equal(site: Site, size: int, heads: int) -> tuple[int, ...] | None:
    """The sizes of as many parts as there are heads; ``None`` for a single head."""
    if size % heads:
        raise ValueError(
            f"per_head: {site.name} has a side of {size}, which {heads} heads do not divide: expected "
            f'the number of heads of this layer; give splits={{"{site.name}": …}} with its parts'
        )
    return (size // heads,) * heads if heads > 1 else None


def _queries(site: Site, attention: Node, outputs: int, heads: int) -> tuple[int, ...] | None:
    """The parts of q; twice as many where each head has a gate of its width, as in Qwen3-Next."""
    width = number_near(attention, HEAD_WIDTH)
    is_latent = number_near(attention, ("qk_rope_head_dim",)) is not None
    gated = not is_latent and width is not None and outputs == 2 * heads * width
    return _equal(site, outputs, 2 * heads if gated else heads)


def _shared_heads(attention: Node, letter: str, outputs: int, heads: int) -> int:
    """The number of heads of k or v."""
    if letter == "v" and (values := number_near(attention, NUM_VALUE_HEADS)):
        return values
    groups = number_near(attention, NUM_KV_HEADS)
    if groups and outputs % groups == 0:
        return groups
    queries = (node for node in attention.children if _letters(node.last_name) == "q")
    widths = (below.widths[1] // heads for node in queries for below in node.walk() if below.widths)
    width = number_near(attention, HEAD_WIDTH) or next(widths, None)
    return outputs // width if width and outputs % width == 0 else heads


def _refined(site: Site, attention: Node, cut: Cut, heads: int, asked: Collection[str]) -> Cut:
    """A weight that is cut into q, k and v, cut into their heads."""
    assert cut.outputs is not None
    sizes = dict(zip(cut.letters, cut.outputs, strict=True))
    if cut.repeats > 1:
        if not set(cut.letters) <= set(asked):
            raise ValueError(
                f"per_head={tuple(asked)}: {site.name} has its {', '.join(cut.letters)} head by head, "
                f"so that all or none are cut into heads: expected {', '.join(map(repr, cut.letters))} "
                f'among them; or leave it as it is, by splits={{"{site.name}": 1}}'
            )
        # With one head of each, as in GPT-NeoX, the parts are heads; else they are groups of heads.
        width = None if cut.repeats == heads else sizes["q"] * cut.repeats // heads
        each = [size // width if width and size % width == 0 else 1 for size in cut.outputs]
    else:
        queries = sizes.get("q", 0) // heads
        each = []
        for letter, size in sizes.items():
            count = heads
            if letter != "q":
                names = NUM_VALUE_HEADS if letter == "v" else ()
                groups = number_near(attention, (*names, *NUM_KV_HEADS))
                groups = groups or (queries and size // queries)
                count = groups if groups and size % groups == 0 else heads
            each.append(len(_equal(site, size, count) or (size,)) if letter in asked else 1)
    parts = [
        part
        for size, count in zip(cut.outputs, each, strict=True)
        for part in (size // count,) * count
    ]
    return Cut(tuple(parts * cut.repeats))


# --- errors


def _refuse_unknown_parts(site: Site) -> NoReturn:
    raise ValueError(
        f"per_head: {site.name} is fused by its name, and no shape says which rows are q, k and v: "
        f'expected weights that are cut; give splits={{"{site.name}": …}} with the rows of each head, '
        "or 1 to leave it whole"
    )


def _refuse_unknown_number(site: Site, attention: Node, letters: str) -> NoReturn:
    part = '{"columns": 12}' if letters == "o" else str(12 * len(letters))
    place = attention.name or "the model"
    raise ValueError(
        f"per_head: {site.name} is a projection of attention, and neither {place} nor a configuration "
        f"says how many heads it has: expected a number such as {', '.join(NUM_HEADS[:3])}; give "
        f'splits={{"{site.name}": {part}}} for 12 heads, or set '
        f"model.get_submodule({attention.path!r}).{NUM_HEADS[0]} before muon_for"
    )
