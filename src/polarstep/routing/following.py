"""Follow a model's parameters where ``fully_shard`` or ``to_empty`` puts new ones in their place.

``fully_shard(model)`` replaces every parameter by a ``DTensor``. An optimizer that was built before
would hold the old parameters, which never get a gradient again. Other replacements, as of an embedding
by ``resize_token_embeddings``, are not followed, as the new parameter may have another shape.

A parameter that has been replaced gets no gradient, so most steps look only at parameters without a
gradient. Looking at a thousand experts that no token reached would take longer than the rest of the
step. So a step looks only at parameters that have lost their gradient since the last step, and every
:data:`EVERY`-th step looks at all that have none.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from polarstep.groups import NAMELESS, named_params
from polarstep.ranks.layout import is_sharded
from polarstep.routing.anatomy import innermost

__all__ = ["Places"]

EVERY = 64


class Places:
    """Where in a model each parameter of an optimizer lies. The model is not kept alive.

    Wrappers around the model are left out: after a change of the model DDP has to be made anew, and
    the wrapper that the optimizer was made with is gone.
    """

    def __init__(self, model: nn.Module) -> None:
        model = innermost(model)
        self._of: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._model = weakref.ref(model)
        self._paths: dict[int, tuple[list[str], str]] = {}  # path of the module, name in it
        # The parameters of the model at the start, frozen ones included, and their names. Parameters are
        # known by their ids: torch.utils.swap_tensors refuses a tensor that has a weak reference. If a
        # new parameter gets the id of a deleted parameter, no more than a warning is missed.
        self._known: set[int] = set()
        self._names: set[str] = set()
        for path, module in model.named_modules():
            for name, p in module._parameters.items():
                if p is not None:
                    self._known.add(id(p))
                    self._names.add(f"{path}.{name}")
                    self._of.setdefault(id(p), (weakref.ref(module), name))
                    self._paths.setdefault(id(p), (path.split(".") if path else [], name))
        self._start()

    def _start(self) -> None:
        self._steps = 0
        self._started: set[int] = set()  # ids of parameters that had a state when last looked at
        self._idle: set[int] = set()  # parameters without a gradient or a state at the last step
        self._to_look_at: set[int] = set()  # ids of the parameters to look at in this step
        self._is_due = False  # whether this step looks for new parameters

    @property
    def model(self) -> nn.Module | None:
        """The model; ``None`` if it is gone."""
        return self._model()

    def copied(self, memo: dict[int, Any]) -> Places | None:
        """The places in a copy of the model; ``None`` if ``memo``, of ``copy.deepcopy``, has no copy.

        The copy itself is not read: a model that holds its optimizer, as agents do, is still empty when
        ``copy.deepcopy(model)`` comes to the optimizer.
        """
        model = self._model()
        if model is None or id(model) not in memo:
            return None
        twin = copy.copy(self)
        twin._model = weakref.ref(memo[id(model)])
        twin._known = {id(memo[p]) for p in self._known if p in memo}
        twin._names = set(self._names)
        twin._paths = {id(memo[p]): path for p, path in self._paths.items() if p in memo}
        twin._of = {
            id(memo[p]): (weakref.ref(memo[id(module)]), name)
            for p, (here, name) in self._of.items()
            if p in memo and (module := here()) is not None and id(module) in memo
        }
        twin._start()
        return twin

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
        self._choose(groups)
        if not self._to_look_at:
            return
        for group in groups:
            for i, p in enumerate(group["params"]):
                if id(p) not in self._to_look_at:
                    continue
                if state.get(p):
                    self._started.add(id(p))
                q = self.successor(p)
                if q is None or (p.grad is not None and state.get(p)):
                    continue
                if state.get(p):
                    names = group.get("param_names") or [f"{NAMELESS}{i}"] * len(group["params"])
                    raise RuntimeError(
                        f"{names[i]} was sharded after the optimizer had updated it: expected "
                        "fully_shard(model) before the first step; shard the model, build the "
                        "optimizer, and load its state with torch.distributed.checkpoint"
                    )
                if p.grad is not None and q.grad is None:
                    q.grad = torch.zeros_like(q)
                self._of[id(q)] = self._of.pop(id(p))
                group["params"][i] = q

    def replaced(self, groups: list[dict[str, Any]]) -> list[str]:
        """The parameters that the model has replaced by others with a gradient.

        Where the new parameter is in one of ``groups``, the two have been tied, and all is well. Most
        steps consider the parameters without a gradient that :meth:`follow` looked at in this step.
        After ``zero_grad(set_to_none=False)`` a parameter that was replaced has a gradient of zeros, so
        every :data:`EVERY`-th step considers all parameters.
        """
        considers_all = self._is_due
        if not self._to_look_at and not considers_all:
            return []
        found = []
        for group in groups:
            for name, p in named_params(group):
                rests = id(p) in self._to_look_at and p.grad is None
                if not rests and not considers_all:
                    continue
                q = self._now_at(p)
                self._is_due |= q is None  # the parameter is gone; another name may have its values
                if q is not None and q is not p and q.grad is not None:
                    found.append((name, q))
        held = {id(p) for group in groups for p in group["params"]} if found else set()
        return [name for name, q in found if id(q) not in held]

    def new(self, groups: list[dict[str, Any]]) -> list[str]:
        """The parameters with a gradient that were added to the model later, and that no group holds.

        This takes a walk through the whole model. It is done at every :data:`EVERY`-th step, and when
        :meth:`replaced` finds that a parameter is gone from the model.
        """
        model = self._model()
        if not self._is_due or model is None:
            return []
        held = {id(p) for group in groups for p in group["params"]}
        return [
            f"{path}.{name}".removeprefix(".")
            for path, module in model.named_modules()
            for name, p in module._parameters.items()
            if p is not None and p.grad is not None and id(p) not in held
            if f"{path}.{name}" not in self._names and id(p) not in self._known
        ]

    def _choose(self, groups: list[dict[str, Any]]) -> None:
        """Choose which parameters to look at in this step."""
        # Two ways to be idle: without a gradient (id), or with a gradient and no state yet (−id). A
        # parameter that goes from one to the other is looked at again.
        idle = {
            id(p) if without else -id(p)
            for group in groups
            for p in group["params"]
            if (without := p.grad is None) or id(p) not in self._started
        }
        all_idle = len(idle) == sum(len(group["params"]) for group in groups)
        chosen = idle if all_idle or self._steps % EVERY == 0 else idle - self._idle
        self._to_look_at = {abs(each) for each in chosen}
        self._is_due = self._steps % EVERY == 0
        self._idle, self._steps = idle, self._steps + 1

    def _now_at(self, p: Tensor) -> Tensor | None:
        """The parameter that the model has under the name that ``p`` had."""
        module = self._model()
        path, name = self._paths.get(id(p), ([], ""))
        for part in path:
            module = None if module is None else module._modules.get(part)
        return None if module is None else module._parameters.get(name)
