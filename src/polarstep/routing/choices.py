"""Which rule each parameter of a model gets: its role, and the arguments of ``muon_for``.

:mod:`polarstep.routing.roles` finds the role of each parameter, and
:mod:`polarstep.routing.overrides` the caller's exceptions. :class:`Choices` turns both and the
arguments into few parameter groups: for the whole model when the optimizer is made, and
for parameters that are added to it later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polarstep.elementwise_rule import Elementwise
from polarstep.flattened import check_unflattened
from polarstep.groups import Group
from polarstep.matrix import Layout
from polarstep.options import check_lr
from polarstep.rates import beside, in_proportion, usual_factor
from polarstep.routing.adapters import find_adapter
from polarstep.routing.anatomy import Anatomy, Site, dissect
from polarstep.routing.overrides import (
    Matcher,
    Parts,
    Target,
    apply_layouts,
    apply_rules,
    apply_splits,
    is_muon,
)
from polarstep.routing.roles import ROLES, Form, Role, find_role, form_of
from polarstep.scaling import ShapeScale

__all__ = ["Choices", "Routed", "check_shaped"]

# Roles whose parameters differ in size: where the rate is measured, each is a group by itself.
OF_THEIR_OWN = ("embedding", "head")


@dataclass(frozen=True, eq=False)
class Routed:
    """A parameter to be put into a group; ``target`` as in the argument ``rules``."""

    site: Site
    role: Role
    form: Form
    target: Target
    why: str
    options: Group = field(default_factory=dict)  # Muon's, for this role
    cut: str | None = None  # the entry of the argument splits that is about this parameter


@dataclass(frozen=True, eq=False)
class Choices:
    """The arguments of :func:`polarstep.muon_for` that decide which rule a parameter gets."""

    lr: float | Tensor
    others: Elementwise
    by_role: Mapping[str, Elementwise | None]
    splits: Mapping[str, Parts]
    layouts: Mapping[str, Layout]
    rules: Sequence[tuple[Matcher, Target]]
    shape_scale: ShapeScale

    def routed(self, anatomy: Anatomy) -> list[Routed]:
        """Every parameter of a model; raises for an argument that matches none of them."""
        return self._routed(anatomy, anatomy.sites, later=False)

    def prepared(self, model: nn.Module, params: Iterable[Tensor]) -> list[Group]:
        """Groups for the ``params`` that are in ``model``, which may have changed meanwhile.

        A parameter that ``rules`` leave out gets the rule of its role: whoever adds it wants it trained.
        """
        asked = {id(p) for p in params}
        if not asked:
            return []
        check_shaped(model, "then add the parameters")
        check_unflattened(model)
        anatomy = dissect(model)
        sites = [site for site in anatomy.sites if id(site.parameter) in asked]
        return self.grouped(self._routed(anatomy, sites, later=True))

    def _routed(self, anatomy: Anatomy, sites: Sequence[Site], *, later: bool) -> list[Routed]:
        chosen = apply_rules(self.rules, sites, later=later)
        forms = apply_layouts(self.layouts, sites, later=later)
        cuts = apply_splits(self.splits, sites, forms, later=later)
        everything = []
        for site in sites:
            found, form = find_role(site, anatomy), forms.get(site) or form_of(site)
            is_muons = found.role in ("hidden", "adapter")
            target: Target = "muon" if is_muons else self.by_role[found.role] or self.others
            why = f"{found.role}: {found.why}"
            if site in forms and found.role == "hidden":
                why = f"hidden: {form.description}"
            by_rule = site in chosen and not (later and chosen[site][0] is None)
            if by_rule:
                target, rule = chosen[site]
                why = f"{found.role}, by {rule}"
            cut = None
            if site in cuts:
                cut = cuts[site][1]
                if is_muon(target):
                    form = cuts[site][0]
                    why = f"{why}, cut by {cut}" if by_rule else f"{found.role}: cut by {cut}"
            options: Group = {}
            if found.role == "adapter" and (adapter := find_adapter(site.uses[0])) is not None:
                factor = adapter.lr_factor(self.shape_scale)
                options = {"shape_scale": "none", "lr_factor": factor}
                if adapter.transposed and site not in forms and site not in cuts:
                    options["layout"] = "transposed"
            everything.append(Routed(site, found.role, form, target, why, options, cut))
        return everything

    def grouped(self, routed: Sequence[Routed]) -> list[Group]:
        """Groups of parameters that share role and options: Muon's first, roles in their usual order."""
        groups: dict[tuple[Any, ...], Group] = {}
        for r in routed:
            if r.target is None:
                continue
            alike: tuple[Any, ...] = ()
            if isinstance(r.target, Elementwise):
                has_size = r.role != "vector" and r.site.parameter.ndim > 1
                usual = usual_factor(self.shape_scale, has_size=has_size)
                options = beside(r.target, self.lr, usual)
                if options["lr_factor"] is None:
                    alike = (r.site.name,) if r.role in OF_THEIR_OWN else r.site.parameter.shape
            else:
                own = {} if r.target == "muon" else dict(r.target)
                options = {"algorithm": "muon", "layout": r.form.layout, **r.form.cut.options}
                options |= r.options | own
                if own.get("lr") is not None:
                    check_lr(own["lr"])
                    options = in_proportion(options, self.lr, f"a rule with lr={own['lr']}")
            key = (
                r.role,
                alike,
                *((name, _hashable(each)) for name, each in sorted(options.items())),
            )
            group = groups.setdefault(key, options | {"role": r.role, "params": [], "reasons": []})
            group["params"].append((r.site.name, r.site.parameter))
            group["reasons"].append(r.why)
        return sorted(
            groups.values(), key=lambda g: (g["algorithm"] != "muon", ROLES.index(g["role"]))
        )


def check_shaped(model: nn.Module, then: str) -> None:
    """Raise if a parameter of ``model`` has no shape yet; ``then`` says what to do after a batch."""
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ValueError(
                f"{name} has no shape yet, its module is lazy: run one batch through the model, {then}"
            )


def _hashable(value: Any) -> Any:
    if isinstance(value, dict | set):
        return repr(value)
    return tuple(value) if isinstance(value, list) else value
