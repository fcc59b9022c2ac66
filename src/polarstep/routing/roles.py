"""The role of a parameter in its model.

:data:`RULES` is a list of small functions, called in order; the first that returns a finding
decides. They look at the type of the layer, at weight tying and at the layer's place. The name
counts only for a bare ``nn.Parameter``, which has no type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from polarstep.rates import ShapeScale, resolve_scale
from polarstep.routing.anatomy import Anatomy, Node, Site, Use, weight_beside
from polarstep.routing.matrices import form_of, is_typed, kind_of
from polarstep.routing.names import (
    CLASS_HINTS,
    EMBEDDINGS,
    HEAD_WORDS,
    LORA_FACTOR,
    LORA_MAGNITUDE,
    NAME_HINTS,
    NORMS,
    NUM_EXPERTS,
    ROLES,
    ROUTER_WORDS,
    UNEMBED_WORDS,
    Role,
)

__all__ = ["ROLES", "RULES", "Adapter", "Finding", "Role", "find_adapter", "find_role"]


@dataclass(frozen=True)
class Finding:
    """A role and the evidence for it, in a few words."""

    role: Role
    why: str


Rule = Callable[[Site, Anatomy], Finding | None]


def find_role(site: Site, anatomy: Anatomy) -> Finding:
    """The finding of the first of :data:`RULES` that applies."""
    return next(found for rule in RULES if (found := rule(site, anatomy)) is not None)


def adapter(site: Site, anatomy: Anatomy) -> Finding | None:
    """The factors of LoRA, and DoRA's magnitudes."""
    use = site.uses[0]
    if is_magnitude(use):
        return Finding("vector", "DoRA's magnitudes")
    found = find_adapter(use) if site.parameter.ndim > 1 else None
    if found is None:
        return None
    if found.embeds:
        return Finding("embedding", found.why)
    layers = (found.of.module, getattr(found.of.module, "base_layer", None))
    if found.letter == "B" and any(id(layer) in anatomy.heads for layer in layers):
        return Finding("head", found.why)
    return Finding("adapter", found.why)


def embedding(site: Site, anatomy: Anatomy) -> Finding | None:
    """The weight of an Embedding or EmbeddingBag, also where a head is tied to it."""
    for use in site.uses:
        if isinstance(use.owner.module, EMBEDDINGS):
            ties = [other.name for other in site.uses if other.name != site.name]
            tied = f", tied to {' and '.join(ties)}" if ties else ""
            return Finding("embedding", kind_of(use.owner.module) + tied)
    return None


def one_dimensional(site: Site, anatomy: Anatomy) -> Finding | None:
    """Biases, gains and scalars: fewer than two dimensions, or the parameter of a norm."""
    use = site.uses[0]
    if site.parameter.ndim < 2 or isinstance(use.owner.module, NORMS):
        return Finding("vector", f"{use.label} of {kind_of(use.owner.module)}")
    return None


def named(site: Site, anatomy: Anatomy) -> Finding | None:
    """A bare parameter whose name, or whose class's name, says embedding or bias."""
    use = site.uses[0]
    if is_typed(use.owner.module) or use.label not in use.owner.module._parameters:
        return None
    own, kind = _words(use.label), _words(kind_of(use.owner.module))
    if isinstance(use.owner.module, nn.ParameterList | nn.ParameterDict):
        own += _words(use.owner.last_name)
    for where, words, table in (("name", own, NAME_HINTS), ("class's name", kind, CLASS_HINTS)):
        for role, hints in table.items():
            if hint := next((word for word in words if word in hints), None):
                return Finding(role, f"bare parameter, ‘{hint}’ in its {where}")
    weight = weight_beside(use.owner.module, use.label, site.parameter)
    if weight is not None:
        return Finding("vector", f"bare parameter, the bias of {weight} by its name and shape")
    if "query" in own and _is_table_of_queries(site):
        return Finding("embedding", "bare parameter, ‘query’ in its name, and no key beside it")
    if use.label == "D" and "A_log" in use.owner.module._parameters:
        return Finding("vector", "D of a state-space layer, a factor for each channel")
    return None


def flattened(site: Site, anatomy: Anatomy) -> Finding | None:
    """A bare parameter whose rows are whole filters, made flat, as in CondConv, which mixes the rows."""
    p, module = site.parameter, site.uses[0].owner.module
    inputs, outputs = (getattr(module, f"{side}_channels", None) for side in ("in", "out"))
    if p.ndim != 2 or is_typed(module):
        return None
    if not (isinstance(inputs, int) and isinstance(outputs, int)):
        return None
    kernel, groups = getattr(module, "kernel_size", 1), getattr(module, "groups", 1)
    area = math.prod(kernel) if isinstance(kernel, tuple | list) else kernel
    if p.shape[1] == inputs * outputs * area // groups:
        return Finding("vector", f"bare parameter, each of {len(p)} rows is a filter made flat")
    return None


def other_adapter(site: Site, anatomy: Anatomy) -> Finding | None:
    """The parts of an adapter that is not LoRA: angles, logits, kernels, factors of other products.

    Many of them are not matrices of a linear map, and what a step would do to the layer is not known.
    """
    use = site.uses[0]
    if not is_other_part(use):
        return None
    names = use.name.split(".")
    part = next((name for name in names if name in _parts_around(use)), use.label)
    return Finding("vector", f"{part} of an adapter that is not LoRA")


def _parts_around(use: Use) -> set[str]:
    around = (use.owner, *use.owner.ancestors())
    return {name for node in around for name in node.adapter_parts}


def output_head(site: Site, anatomy: Anatomy) -> Finding | None:
    """The weight of an output layer: with a row per entry of an Embedding, or by its place."""
    for use in site.uses:
        how = anatomy.heads.get(id(use.owner.module))
        if how is not None and not _is_scale(site):
            return Finding("head", how)
    return _bare_head(site, anatomy)


def _bare_head(site: Site, anatomy: Anatomy) -> Finding | None:
    """A bare matrix that is called unembed, or head with a side for the entries of an Embedding."""
    use, p = site.uses[0], site.parameter
    module = use.owner.module
    if p.ndim != 2 or is_typed(module) or use.label not in module._parameters:
        return None
    if any(node.is_block for node in (use.owner, *use.owner.ancestors())):
        return None
    words = [*_words(use.label), *_words(_own_kind(module)), *_words(use.owner.last_name)]
    hint = next((word for word in words if word in UNEMBED_WORDS), None)
    if hint is not None:
        return Finding("head", f"bare parameter, ‘{hint}’ in its name")
    read = {width for node in anatomy.root.walk() for width in node.inputs}
    known = (anatomy.vocabularies.get(side) for side in p.shape if side not in read)
    table = next((name for name in known if name is not None), None)
    hint = next((word for word in words if word in HEAD_WORDS), None)
    if table is None or hint is None:
        return None
    return Finding("head", f"bare parameter, ‘{hint}’ in its name, and a side as long as {table}")


def router(site: Site, anatomy: Anatomy) -> Finding | None:
    """The layer that chooses experts: a row for each expert, and a name that says router or gate.

    The polar factor would give every expert's row the same size of step, however rarely the expert is
    chosen.
    """
    use = site.uses[0]
    if site.parameter.ndim != 2:
        return None
    around = [use.owner, *([use.owner.parent] if use.owner.parent is not None else [])]
    words = [word for node in around for word in _words(node.last_name)]
    words += [word for node in around for word in _words(_own_kind(node.module))]
    words += _words(use.label) if use.label in use.owner.module._parameters else []
    hints = [word for word in words if word in ROUTER_WORDS]
    if not hints or _is_in_gated_mlp(use):
        return None
    rows, cols = site.parameter.shape
    if rows in _experts_near(use):
        return Finding("router", f"a row for each of {rows} experts, ‘{hints[0]}’ in its name")
    said = next((hint for hint in hints if hint.startswith("rout")), None)
    if said is not None and rows < cols:
        return Finding("router", f"‘{said}’ in its name")
    return None


def depthwise(site: Site, anatomy: Anatomy) -> Finding | None:
    """Depthwise filters: one small filter a channel, with no matrix that mixes channels."""
    module = site.uses[0].owner.module
    if isinstance(module, _ConvNd) and 1 < module.groups == module.in_channels:
        return Finding("vector", f"depthwise filters of a {kind_of(module)}")
    return None


def vector(site: Site, anatomy: Anatomy) -> Finding | None:
    """Anything whose matrices have a single row or column, such as (1, 1, d) or (d, 1)."""
    form = form_of(site)
    view = form.view(site.parameter)
    if all(min(m, n) <= 1 for _, m, n in view.shapes):
        return Finding("vector", f"{view} is a vector ({form.description})")
    return None


def broadcast(site: Site, anatomy: Anatomy) -> Finding | None:
    """A bare parameter of three or more dimensions, the first of size 1: added to a batch."""
    p, use = site.parameter, site.uses[0]
    if p.ndim > 2 and p.shape[0] == 1 and not is_typed(use.owner.module):
        return Finding("vector", "bare parameter, leading dimension 1: added to a batch, no map")
    return None


def hidden(site: Site, anatomy: Anatomy) -> Finding | None:
    """Every other parameter: one or more matrices between the two ends of the model."""
    return Finding("hidden", form_of(site).description)


RULES: tuple[Rule, ...] = (
    adapter,
    embedding,
    one_dimensional,
    named,
    other_adapter,
    router,
    output_head,
    depthwise,
    flattened,
    vector,
    broadcast,
    hidden,
)


def _is_table_of_queries(site: Site) -> bool:
    """Whether a bare parameter called query holds one query in each row; it may be a map to queries.

    Such a map has keys or values beside it. Queries are as wide as the inputs of a layer around them.
    """
    p, module = site.parameter, site.uses[0].owner.module
    if p.ndim != 2 or p.shape[0] == p.shape[1]:
        return False
    beside = {word for name in (*module._parameters, *module._modules) for word in _words(name)}
    if beside & {"key", "keys", "value", "values", "k", "v", "kv"}:
        return False
    return any(p.shape[1] in node.inputs for node in site.uses[0].owner.walk())


def _is_in_gated_mlp(use: Use) -> bool:
    """Whether a gate belongs to an MLP, which has layers called up or down beside the gate."""
    beside = use.owner.parent.children if use.owner.parent is not None else []
    return any({"up", "down"} & set(_words(node.last_name)) for node in beside)


def _experts_near(use: Use) -> set[int]:
    """The numbers of experts in the modules around a layer: as attributes say, and as they are held."""
    found: set[int] = set()
    above = list(use.owner.nearest(3))
    # The configuration is the whole model's: its number counts where experts are in sight.
    beside = (child.last_name for node in above for child in node.children)
    has_experts = any("expert" in name.lower() for name in beside)
    for node in above:
        config = getattr(node.module, "config", None) if has_experts else None
        for holder in (node.module, config):
            said = (getattr(holder, name, None) for name in NUM_EXPERTS)
            found.update(number for number in said if isinstance(number, int))
    for node in above[:3]:
        for child in node.children:
            if isinstance(child.module, nn.ModuleList | nn.ModuleDict):
                found.add(len(child.children))
            stacked = (p for p in child.module._parameters.values() if p is not None)
            found.update(len(p) for p in stacked if p.ndim == 3)
    return found - {0, 1}


def _words(name: str) -> list[str]:
    """``"PosEmbed_2d"`` → pos, embed, d."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def _is_scale(site: Site) -> bool:
    """Whether this is the gain of a weight norm, (outputs, 1, …), rather than the weight itself."""
    use, p = site.uses[0], site.parameter
    is_plain = use.label in use.owner.module._parameters and use.label == "weight"
    return not is_plain and p.numel() == p.shape[0]


def _own_kind(module: nn.Module) -> str:
    """The name of a layer's class, unless it is a class of torch's own."""
    kind = type(module)
    return "" if kind.__module__.startswith("torch.") else kind.__name__


# --- LoRA


@dataclass(frozen=True)
class Adapter:
    """One of the two factors of ΔW = s·BA.

    An adapter adds ΔW to a weight W (m × n), with A (r × n), B (m × r) and s = α/r (α/√r for rsLoRA). A
    Muon step on W moves W by at most η·scale(m, n) in spectral norm. A step on A and B moves ΔW by

        s·‖dB·A + B·dA‖ ≤ s·(‖dB‖·‖A‖ + ‖B‖·‖dA‖),        ‖dA‖ = ‖dB‖ = η·factor.

    With ``factor = scale(m, n)/(2s)`` this is at most η·scale(m, n) while ‖A‖ and ‖B‖ are at most one: A
    starts at a norm of about 0.6, B at zero. So η has the same meaning as for W itself. Both factors get
    the same rate. AdamW needs a larger rate for B, since its steps grow with the sides of a matrix; the
    steps of the polar factor do not. The scale of B's own shape would be √(m/r), 22 for 4096×8: a step
    of B would move W by many times η.

    Layers that compute ``x @ A @ B`` store both factors transposed, A as n × r and B as r × m. The side
    that both share, r, tells which way round they are. Where m = n both ways fit, and r is the shorter
    side.
    """

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
    at = next((i for i, part in enumerate(parts) if LORA_FACTOR.match(part)), None)
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
    return LORA_MAGNITUDE.search(use.name) is not None


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
