"""The role of a parameter in its model, and how it is read as matrices.

:data:`RULES` is a list of small functions, called in order; the first that returns a finding
decides. They look at the type of the layer, at weight tying and at the layer's place. The name
counts only for a bare ``nn.Parameter``, which has no type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from polarstep.matrix import Layout, MatrixView
from polarstep.optim.anatomy import EMBEDDINGS, NORMS, RECURRENT, Anatomy, Site

__all__ = ["ROLES", "RULES", "Finding", "Form", "Role", "find_role", "form_of"]

Role = Literal["hidden", "embedding", "head", "vector"]
ROLES: tuple[Role, ...] = ("hidden", "embedding", "head", "vector")


@dataclass(frozen=True)
class Finding:
    """A role and the evidence for it, in a few words."""

    role: Role
    why: str


@dataclass(frozen=True)
class Form:
    """How a parameter is read as matrices, and a description of them."""

    layout: Layout = "auto"
    split: tuple[int, ...] | None = None
    what: str = "matrix"


Rule = Callable[[Site, Anatomy], Finding | None]


def find_role(site: Site, anatomy: Anatomy) -> Finding:
    """The finding of the first of :data:`RULES` that applies."""
    return next(found for rule in RULES if (found := rule(site, anatomy)) is not None)


def form_of(site: Site) -> Form:
    """How the layer that owns the parameter uses it.

    The layout is ``"auto"`` wherever that is right, so that parameters of different layers can
    share a group.
    """
    p, use = site.parameter, site.uses[0]
    if p.ndim < 2:
        return Form()
    module, rows = use.owner.module, p.shape[0]
    split: tuple[int, ...] | None = None
    if isinstance(module, _ConvNd) and p.ndim > 2:
        kind = _kind(module)
        layout: Layout = "conv" if p.ndim == 3 else "auto"
        if isinstance(module, _ConvTransposeNd):
            # Stored as in × out·k, the transpose of the map; its polar factor is transposed alike.
            kind += ", inputs as rows"
        if module.groups > 1 and rows % module.groups == 0:
            split = (rows // module.groups,) * module.groups
            return Form(layout, split, f"{module.groups} groups of a {kind}")
        return Form(layout, None, f"filters of a {kind}")
    if isinstance(module, nn.MultiheadAttention) and use.label == "in_proj_weight":
        return Form("auto", (rows // 3,) * 3, "q, k, v of MultiheadAttention")
    if isinstance(module, RECURRENT) and not use.label.startswith("weight_hr"):
        gates = rows // module.hidden_size
        split = (module.hidden_size,) * gates if gates > 1 else None
        return Form("auto", split, f"{gates} gates of {_kind(module)}" if split else _kind(module))
    if isinstance(module, nn.Bilinear):
        return Form("auto", None, f"{rows} forms of a Bilinear")
    if isinstance(module, nn.Linear) and FUSED_NAME.search(use.name):
        return Form(what="Linear, fused by its name: cut it with splits={…}")
    if _is_typed(module):
        return Form(what=_kind(module))
    if p.ndim == 2:
        return Form(what=f"bare parameter of {_kind(module)}")
    if p.ndim in (4, 5):
        return Form(what=f"bare {p.ndim}-d parameter of {_kind(module)}, read as filters")
    return Form(what=f"{math.prod(p.shape[:-2])} matrices stacked in {_kind(module)}")


def embedding(site: Site, anatomy: Anatomy) -> Finding | None:
    """The weight of an Embedding or EmbeddingBag, also where a head is tied to it."""
    for use in site.uses:
        if isinstance(use.owner.module, EMBEDDINGS):
            ties = [other.name for other in site.uses if other.name != site.name]
            tied = f", tied to {' and '.join(ties)}" if ties else ""
            return Finding("embedding", _kind(use.owner.module) + tied)
    return None


def one_dimensional(site: Site, anatomy: Anatomy) -> Finding | None:
    """Biases, gains and scalars: fewer than two dimensions, or the parameter of a norm."""
    use = site.uses[0]
    if site.parameter.ndim < 2 or isinstance(use.owner.module, NORMS):
        return Finding("vector", f"{use.label} of {_kind(use.owner.module)}")
    return None


def named(site: Site, anatomy: Anatomy) -> Finding | None:
    """A bare parameter whose name, or whose class's name, says embedding or bias."""
    use = site.uses[0]
    if _is_typed(use.owner.module) or use.label not in use.owner.module._parameters:
        return None
    own, kind = _words(use.label), _words(_kind(use.owner.module))
    if isinstance(use.owner.module, nn.ParameterList | nn.ParameterDict):
        own += _words(use.owner.name.rpartition(".")[2])
    for where, words, table in (("name", own, HINTS), ("class's name", kind, CLASS_HINTS)):
        for role, hints in table.items():
            if hint := next((word for word in words if word in hints), None):
                return Finding(role, f"bare parameter, ‘{hint}’ in its {where}")
    return None


def output_head(site: Site, anatomy: Anatomy) -> Finding | None:
    """The weight of an output layer: with a row per entry of an Embedding, or by its place."""
    for use in site.uses:
        how = anatomy.heads.get(id(use.owner.module))
        if how is not None and not _is_scale(site):
            return Finding("head", how)
    return None


def depthwise(site: Site, anatomy: Anatomy) -> Finding | None:
    """Depthwise filters: one small filter a channel, with no matrix that mixes channels."""
    module = site.uses[0].owner.module
    if isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels:
        return Finding("vector", f"depthwise filters of a {_kind(module)}")
    return None


def vector(site: Site, anatomy: Anatomy) -> Finding | None:
    """Anything whose matrices have a single row or column, such as (1, 1, d) or (d, 1)."""
    form = form_of(site)
    view = MatrixView.of(site.parameter.shape, layout=form.layout, split_sizes=form.split)
    if all(min(m, n) <= 1 for _, m, n in view.shapes):
        return Finding("vector", f"{view} is a vector ({form.what})")
    return None


def broadcast(site: Site, anatomy: Anatomy) -> Finding | None:
    """A bare parameter of three or more dimensions, the first of size 1: added to a batch."""
    p, use = site.parameter, site.uses[0]
    if p.ndim > 2 and p.shape[0] == 1 and not _is_typed(use.owner.module):
        return Finding("vector", "bare parameter, leading dimension 1: added to a batch, no map")
    return None


def hidden(site: Site, anatomy: Anatomy) -> Finding | None:
    """Every other parameter: one or more matrices between the two ends of the model."""
    return Finding("hidden", form_of(site).what)


RULES: tuple[Rule, ...] = (
    embedding,
    one_dimensional,
    named,
    output_head,
    depthwise,
    vector,
    broadcast,
    hidden,
)

# Words in the names of bare parameters. Names are weak evidence, and the reason given says so.
TABLE_WORDS = ("embed", "embedding", "embeddings", "pos", "position", "positional")
HINTS: dict[Role, frozenset[str]] = {
    "embedding": frozenset(
        (*TABLE_WORDS, "emb", "wte", "wpe", "token", "tokens", "latents", "prompt")
    ),
    "vector": frozenset(("bias", "biases", "scale", "gain", "gamma", "beta", "log", "norm")),
}
CLASS_HINTS: dict[Role, frozenset[str]] = {
    "embedding": frozenset(TABLE_WORDS),
    "vector": frozenset(("norm",)),
}
FUSED_NAME = re.compile(r"qkv|kqv|c_attn|gate_up", re.IGNORECASE)


def _words(name: str) -> list[str]:
    """``"PosEmbed_2d"`` → pos, embed, d."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def _is_typed(module: nn.Module) -> bool:
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


def _is_scale(site: Site) -> bool:
    """Whether this is the gain of a weight norm, (outputs, 1, …), rather than the weight itself."""
    use, p = site.uses[0], site.parameter
    is_plain = use.label in use.owner.module._parameters and use.label == "weight"
    return not is_plain and p.numel() == p.shape[0]


def _kind(module: nn.Module) -> str:
    """The name of a layer's class, or of the torch layer that the class derives from."""
    if _is_typed(module):
        for cls in type(module).__mro__:
            if cls.__module__.startswith("torch.nn.modules") and "Quantizable" not in cls.__name__:
                return cls.__name__
    return type(module).__name__
