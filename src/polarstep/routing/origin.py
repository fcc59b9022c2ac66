"""What an optimizer keeps of the call of :func:`polarstep.muon_for` that made it.

With it the routing table says why each parameter has its rule, layers that are unfrozen later get the
rules they would have had, and a step notices parameters that the model has replaced or added
(:mod:`polarstep.mistakes`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from polarstep.groups import Group, named_params
from polarstep.options import check_lr, known_options
from polarstep.others import AdamW, Elementwise, beside
from polarstep.rates import usual_factor
from polarstep.routing.choices import Choices, Routed
from polarstep.routing.routes import Route

__all__ = ["Origin", "split_by_rule"]

# Options that say together how a parameter is read as matrices.
READ_BY = frozenset({"layout", "split_sizes", "split_columns", "split_repeats"})


@dataclass(eq=False)
class Origin:
    """The model and the arguments of ``muon_for``; the defaults are those of ``polarstep.Muon``."""

    model: Callable[[], nn.Module | None] | None = None
    """A weak reference to the model, without wrappers around it, as DDP, which may be made anew."""
    choices: Choices | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    """Why each parameter has its rule, by its name."""
    left_out: tuple[Route, ...] = ()
    """Rows of the routing table for parameters in no group: frozen, or left out by a rule."""
    elsewhere: frozenset[int] = frozenset()
    """The ids of the parameters that a rule left out: another optimizer may update them."""
    vectors: Elementwise = AdamW()  # noqa: RUF009 — frozen
    """The rule for vectors that are added later and are not in the model."""

    def routed(self, params: Sequence[Tensor]) -> dict[int, Routed]:
        """The rules of ``muon_for`` for those of ``params`` that are in the model, by their ids."""
        model = None if self.model is None else self.model()
        if model is None or self.choices is None:
            return {}
        return {id(r.site.parameter): r for r in self.choices.routed_later(model, params)}

    def note(self, groups: Sequence[Group], found: Mapping[int, Routed]) -> None:
        """Note that ``groups`` with the parameters ``found`` were added."""
        for group in groups:
            for name, p in named_params(group):
                if id(p) in found:
                    self.reasons[name] = f"{found[id(p)].why}, added later"
        names = {r.site.name for r in found.values()}
        self.left_out = tuple(row for row in self.left_out if row.name not in names)

    def pickled(self) -> Origin:
        """What a pickle of the optimizer holds: neither the model, nor the rules for its parameters."""
        return Origin(reasons=self.reasons, left_out=self.left_out, vectors=self.vectors)

    def copied(self, memo: dict[int, Any]) -> Origin:
        """What a deep copy holds; ``memo`` has everything that was copied before.

        The copy knows a model only if ``memo`` has it, as in ``deepcopy((model, optimizer))``, or where
        the model holds its optimizer.
        """
        model = None if self.model is None else memo.get(id(self.model()))
        known = copy.deepcopy(self.pickled(), memo)
        if model is None:
            return known
        elsewhere = frozenset(id(memo[key]) for key in self.elsewhere if key in memo)
        choices = copy.deepcopy(self.choices, memo)
        return replace(known, model=weakref.ref(model), choices=choices, elsewhere=elsewhere)


def split_by_rule(
    group: Group, found: Mapping[int, Routed], origin: Origin, muon_defaults: Group
) -> list[Group]:
    """A group that is added to an optimizer, as groups of one rule each, with Muon's last.

    Lightning's ``BackboneFinetuning`` calls ``add_param_group({"params": layers, "lr": 0.002})`` with
    matrices and vectors in one group, and goes on to write to the last group.

    ``found`` has the rules of :func:`polarstep.muon_for` by the ids of parameters. Of all other
    parameters, vectors get the rule ``origin.vectors``, and matrices Muon. A group that names its rule
    is left as it is.

    The other options of ``group`` go to every rule that has them. An option that no rule has goes to all
    of the new groups: if it is misspelt, it is then refused, and a key of the user's own is kept. The
    learning rate is that of all of them (:mod:`polarstep.rates`).
    """
    if "algorithm" in group or "use_muon" in group:
        return [group]
    params: list[Tensor] = group["params"]
    given = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    for key in {"lr", "initial_lr"} & given.keys():
        check_lr(given[key])
    parts: list[Group] = []
    if origin.choices is not None:
        for part in origin.choices.grouped(list(found.values())):
            parts.append(part | {"params": [p for _, p in part["params"]]})
    rest = [p for p in params if id(p) not in found]
    if flat := [p for p in rest if isinstance(p, Tensor) and p.ndim < 2]:
        options = beside(
            origin.vectors, muon_defaults["lr"], usual_factor(muon_defaults["shape_scale"])
        )
        parts.append(options | {"params": flat})
    matrices = [p for p in rest if not isinstance(p, Tensor) or p.ndim >= 2]
    if matrices or not parts:
        parts.append({"algorithm": "muon", "params": matrices})
    known = {part["algorithm"]: known_options(part["algorithm"], muon_defaults) for part in parts}
    somewhere = set().union(*known.values())
    names = {id(p): name for p, name in zip(params, group.get("param_names") or (), strict=False)}
    for i, part in enumerate(parts):
        fitting = known[part["algorithm"]] | (given.keys() - somewhere)
        options = {key: value for key, value in given.items() if key in fitting}
        if part["algorithm"] == "muon" and READ_BY & options.keys():
            # The caller says how to read the matrices: drop our own way.
            part = {key: value for key, value in part.items() if key not in READ_BY}
        parts[i] = part | options
        if names:
            parts[i]["param_names"] = [names[id(p)] for p in part["params"]]
    return sorted(parts, key=lambda part: part["algorithm"] == "muon")
