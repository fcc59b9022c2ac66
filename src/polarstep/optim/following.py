"""Follow a model's parameters where ``fully_shard`` or ``to_empty`` puts new ones in their place.

``fully_shard(model)`` replaces every parameter by a ``DTensor``. An optimizer that was built before
would hold the old parameters, which never get a gradient again.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from polarstep.distributed.layout import is_sharded

__all__ = ["Places"]


class Places:
    """Where in a model each parameter of an optimizer lies. The model is not kept alive."""

    def __init__(self, model: nn.Module) -> None:
        self._of: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    self._of.setdefault(id(p), (weakref.ref(module), name))

    def successor(self, p: Tensor) -> Tensor | None:
        """The parameter that has taken the place of ``p``; ``None`` if ``p`` is still there."""
        module, name = self._of.get(id(p), (lambda: None, ""))
        here = module()
        q = None if here is None else here._parameters.get(name)
        if q is None or q is p:
            return None
        return q if p.is_meta or (is_sharded(q) and not is_sharded(p)) else None

    def follow(self, groups: list[dict[str, Any]], state: dict[Tensor, Any]) -> None:
        """Put successors into ``groups``, wherever a parameter has no gradient or no state yet."""
        for group in groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None and state.get(p):
                    continue
                q = self.successor(p)
                if q is None:
                    continue
                if state.get(p):
                    names = group.get("param_names") or [f"parameter {i}"] * len(group["params"])
                    raise RuntimeError(
                        f"{names[i]} was sharded after the optimizer had updated it: expected "
                        "fully_shard(model) before the first step; shard the model, build the "
                        "optimizer, and load its state with torch.distributed.checkpoint"
                    )
                if p.grad is not None and q.grad is None:
                    q.grad = torch.zeros_like(q)
                self._of[id(q)] = self._of.pop(id(p))
                group["params"][i] = q
