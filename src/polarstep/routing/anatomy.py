"""The structure of a model, as far as routing its parameters needs it.

:func:`dissect` walks a model once. It sees through wrappers (``torch.compile``, DDP, activation
checkpointing), so names and findings do not depend on them. It gathers every place that uses a
parameter, so a tied parameter is one :class:`Site`. And it lists the embeddings and the output heads
(:mod:`polarstep.routing.heads`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrize

from polarstep.routing.heads import find_heads
from polarstep.routing.node import EMBEDDINGS, Node

__all__ = ["Anatomy", "Site", "Use", "dissect", "innermost", "unwrapped"]

# Attributes under which a wrapper holds the module it wraps: torch.compile, activation
# checkpointing and FullyShardedDataParallel.
WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# The parts of LoRA, which add to a layer and are no layers of the model.
LORA = re.compile(r"^lora_")


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
    vocabularies: dict[int, str]  # entries of an embedding → its name
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
            vocabularies.setdefault(node.module.num_embeddings, node.name)
            embedded.add(node.module.embedding_dim)
    return Anatomy(root, sites, vocabularies, find_heads(root, vocabularies, embedded))


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
