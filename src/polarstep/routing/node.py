"""A module and its place in the model, and what its type says about its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.rnn import RNNCellBase

from polarstep.routing.orientation import stored_transposed

__all__ = ["EMBEDDINGS", "NORMS", "RECURRENT", "Node"]

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
RECURRENT = (nn.RNNBase, RNNCellBase)
NORMS = (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)


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
