"""Follow a model's parameters where ``fully_shard`` or ``to_empty`` puts new ones in their place.

``fully_shard(model)`` replaces every parameter by a ``DTensor``. An optimizer that was built before
would hold the old parameters, which never get a gradient again. Other replacements, as that of an
embedding by ``resize_token_embeddings``, are not followed, as the new parameter may have another shape.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from polarstep.distributed.layout import is_sharded
from polarstep.optim.groups import named_params

__all__ = ["Places"]


class Places:
    """Where in a model each parameter of an optimizer lies. The model is not kept alive."""

    def __init__(self, model: nn.Module) -> None:
        self._of: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._model = weakref.ref(model)
        self._paths: dict[int, tuple[list[str], str]] = {}  # path of the module, name in it
        for path, module in model.named_modules():
            for name, p in module._parameters.items():
                if p is not None:
                    self._of.setdefault(id(p), (weakref.ref(module), name))
                    self._paths.setdefault(id(p), (path.split(".") if path else [], name))

    def successor(self, p: Tensor) -> Tensor | None:
        """The parameter that has taken the place of ``p``; ``None`` if ``p`` is still there."""
        module, name = self._of.get(id(p), (lambda: None, ""))
        here = module()
        q = None if here is None else here._parameters.get(name)
        if q is None or q is p:
            return None
        return q if p.is_meta or (is_sharded(q) and not is_sharded(p)) else None

    def replaced(self, groups: list[dict[str, Any]]) -> list[str]:
        """The parameters without a gradient where the model now has another one, with a gradient.

        Where the other parameter is in one of ``groups``, the two have been tied, and all is well.
        """
        found = []
        for group in groups:
            for name, p in named_params(group):
                q = self._now_at(p) if p.grad is None else None
                if q is not None and q is not p and q.grad is not None:
                    found.append((name, q))
        held = {id(p) for group in groups for p in group["params"]} if found else set()
        return [name for name, q in found if id(q) not in held]

    def _now_at(self, p: Tensor) -> Tensor | None:
        """The parameter that the model has under the name that ``p`` had."""
        module = self._model()
        path, name = self._paths.get(id(p), ([], ""))
        for part in path:
            module = None if module is None else module._modules.get(part)
        return None if module is None else module._parameters.get(name)

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
