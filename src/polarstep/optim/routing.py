"""``muon_for``: one optimizer for a whole model, every parameter sent to the rule that suits it.

:mod:`polarstep.optim.roles` finds the role of each parameter. This module turns roles, the caller's
own rules and the hyperparameters into as few parameter groups as possible.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polarstep.matrix import MatrixView
from polarstep.optim.anatomy import Site, dissect
from polarstep.optim.elementwise import AdamW, Elementwise, group_of
from polarstep.optim.groups import Group
from polarstep.optim.muon import Muon
from polarstep.optim.roles import ROLES, Form, Role, find_role, form_of
from polarstep.optim.routes import Route, left_out
from polarstep.optim.scaling import LrScale
from polarstep.optim.transforms import Transform
from polarstep.polar import PolarMap

__all__ = ["Matcher", "Target", "muon_for"]

Matcher = str | type[nn.Module] | Callable[[str, Tensor], bool]
Target = Elementwise | Literal["muon"] | Mapping[str, Any] | None


@dataclass(frozen=True, eq=False)
class _Routed:
    """A parameter to be put into a group; ``target`` as in the argument ``rules``."""

    site: Site
    role: Role
    form: Form
    target: Target
    why: str


def muon_for(
    model: nn.Module,
    lr: float | Tensor = 0.02,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    polar: PolarMap | Literal["auto"] | None = None,
    weight_decay: float = 0.0,
    lr_scale: LrScale = "spectral",
    transform: Transform | None = None,
    others: Elementwise = AdamW(),  # noqa: B008 — frozen
    embeddings: Elementwise | None = None,
    heads: Elementwise | None = None,
    vectors: Elementwise | None = None,
    splits: Mapping[str, int | Sequence[int]] | None = None,
    rules: Sequence[tuple[Matcher, Target]] = (),
    nonfinite: str = "propagate",
    seed: int = 0,
    fused: bool = True,
) -> Muon:
    """Muon for the hidden matrices of ``model``, AdamW or SGD for everything else, in one optimizer.

    Embeddings and output heads are found by the type of the layer, by weight tying and by position;
    convolutions (also grouped), attention, recurrent gates and stacked experts are read as the
    matrices they are. ``print(optimizer.routes)`` shows how each parameter is updated and why.
    Every group has a ``"role"``, so that learning rates can be changed later by role.

    Args:
        model: any module; ``torch.compile``d and DDP-wrapped ones give the same groups and names.
        lr: Muon's learning rate. This and the next six arguments are :class:`polarstep.Muon`'s.
        momentum: Muon's β.
        nesterov: Nesterov or Polyak momentum in Muon.
        polar: Muon's polar map, or ``"auto"`` for :class:`polarstep.Auto`.
        weight_decay: Muon's weight decay; AdamW and SGD have their own in ``others``.
        lr_scale: how Muon's learning rate depends on the shape of a matrix.
        transform: a change of T before it is applied.
        others: the rule for all parameters that are not Muon's: ``AdamW(...)`` or ``SGD(...)``.
        embeddings: instead of ``others``, for embeddings and the heads tied to them.
        heads: instead of ``others``, for output heads.
        vectors: instead of ``others``, for biases, norms, gains and depthwise filters.
        splits: which weights are several matrices on top of each other, as a projection to q, k and
            v: ``{"*.qkv.weight": 3}`` for equal parts, or the rows of each. Keys are patterns of
            :mod:`fnmatch` on parameter names.
        rules: exceptions, each a pair (which, target); the first that matches wins, and they come
            before the built-in :data:`polarstep.optim.roles.RULES`. *Which* is a pattern of names; a
            class of modules, for all parameters inside such modules; or a function of (name,
            parameter). *Target* is ``AdamW(...)`` or ``SGD(...)``; ``"muon"``, or a dict of options
            for a Muon group of its own; or ``None``, to leave the parameter out of the optimizer.
            Rules with a Muon target skip parameters of fewer than two dimensions.
        nonfinite, fused: see :class:`polarstep.Muon`.
        seed: seed of the sketches.

    Raises:
        ValueError: if no parameter would go to Muon, if a pattern matches no parameter, or if a
            parameter is not initialized yet.

    >>> from polarstep import Exact
    >>> layers = [nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)]
    >>> optimizer = muon_for(nn.Sequential(*layers), 0.02, polar=Exact(), heads=AdamW(lr=1e-3))
    >>> print(optimizer.routes)
    parameter        as matrices  algorithm         polar map         why
    {0,2}.weight ×2  32×32        Muon, lr 0.02     Exact(rtol=None)  hidden: Linear
    4.weight         3×32         AdamW, lr 0.001   –                 head: the model's last layer
    {0,2}.bias ×2    32           AdamW, lr 0.0003  –                 vector: bias of Linear
    4.bias           3            AdamW, lr 0.0003  –                 vector: bias of Linear
    <BLANKLINE>
    Muon   2,048 parameters  in 2 tensors  92.6%
    AdamW    163 parameters  in 4 tensors   7.4%
    >>> for group in optimizer.param_groups:
    ...     if group["role"] == "head":
    ...         group["lr"] = 5e-4
    """
    _check_model(model)
    given = {"others": others, "embeddings": embeddings, "heads": heads, "vectors": vectors}
    _check_elementwise(given)
    by_role = {"embedding": embeddings, "head": heads, "vector": vectors}
    anatomy = dissect(model)
    if not anatomy.sites:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to optimize")
    trainable = [site for site in anatomy.sites if site.parameter.requires_grad]
    chosen = _apply_rules(rules, anatomy.sites)
    cuts = _apply_splits(splits or {}, anatomy.sites)
    routed = []
    for site in trainable:
        found, form = find_role(site, anatomy), form_of(site)
        target: Target = "muon" if found.role == "hidden" else by_role[found.role] or others
        why = f"{found.role}: {found.why}"
        if site in chosen:
            target, rule = chosen[site]
            why = f"{found.role}, by {rule}"
        if site in cuts and _is_muon(target):
            form, cut = cuts[site]
            why = f"{found.role}: cut by {cut}" if site not in chosen else f"{why}, cut by {cut}"
        routed.append(_Routed(site, found.role, form, target, why))
    _check_cuts(cuts, routed)
    if not any(_is_muon(r.target) for r in routed):
        raise ValueError(_nothing_for_muon(model, routed, len(anatomy.sites) - len(trainable)))
    optimizer = Muon(
        _groups(routed),
        lr,
        momentum,
        nesterov,
        polar,
        weight_decay,
        lr_scale,
        transform=transform,
        nonfinite=nonfinite,
        seed=seed,
        fused=fused,
    )
    optimizer._left_out = tuple(_left_out(anatomy.sites, routed))
    return optimizer


def _groups(routed: Sequence[_Routed]) -> list[Group]:
    """Groups of parameters that share role and options: Muon's first, roles in their usual order."""
    groups: dict[tuple[Any, ...], Group] = {}
    for r in routed:
        if r.target is None:
            continue
        if isinstance(r.target, Elementwise):
            options = group_of(r.target)
        else:
            own = {} if r.target == "muon" else dict(r.target)
            options = {"algorithm": "muon", "layout": r.form.layout, "split_sizes": r.form.split}
            options |= own
        key = (r.role, *((name, _hashable(value)) for name, value in sorted(options.items())))
        group = groups.setdefault(key, options | {"role": r.role, "params": [], "reasons": []})
        group["params"].append((r.site.name, r.site.parameter))
        group["reasons"].append(r.why)
    return sorted(groups.values(), key=lambda g: (g["algorithm"] != "muon", ROLES.index(g["role"])))


def _apply_rules(
    rules: Sequence[tuple[Matcher, Target]], sites: Sequence[Site]
) -> dict[Site, tuple[Target, str]]:
    """For each parameter that a rule matches: the target of the first such rule, and its title."""
    chosen: dict[Site, tuple[Target, str]] = {}
    for i, rule in enumerate(rules):
        if not isinstance(rule, tuple) or len(rule) != 2:
            raise TypeError(
                f"rules[{i}] is {rule!r}: expected a pair (which, target), "
                'as ("head.*", AdamW(lr=1e-3))'
            )
        which, target = rule
        title = f"rules[{i}] ({_matcher_name(which)})"
        _check_target(title, target)
        matched = [site for site in sites if _matches(which, site)]
        if _is_muon(target):
            flat, matched = matched, [site for site in matched if site.parameter.ndim >= 2]
            if flat and not matched:
                raise ValueError(
                    f"{title} sends {_some(flat)} to Muon, which updates matrices: expected "
                    "parameters of two dimensions and more; send these to an AdamW(...) or SGD(...)"
                )
        if not matched:
            raise ValueError(f"{title} matches no parameter; {_closest(which, sites)}")
        if all(site in chosen for site in matched):
            earlier = chosen[matched[0]][1]
            raise ValueError(
                f"{title} has no effect: {earlier} came first for {_some(matched)}; "
                "put the more special rule before the more general one"
            )
        for site in matched:
            chosen.setdefault(site, (target, title))
    return chosen


def _apply_splits(
    splits: Mapping[str, int | Sequence[int]], sites: Sequence[Site]
) -> dict[Site, tuple[Form, str]]:
    """The rows of the matrices in each weight that a pattern in ``splits`` matches."""
    cuts: dict[Site, tuple[Form, str]] = {}
    for pattern, parts in splits.items():
        title = f"splits[{pattern!r}]"
        matched = [site for site in sites if _matches(pattern, site) and site.parameter.ndim >= 2]
        if not matched:
            raise ValueError(
                f"{title} matches no parameter of two dimensions and more; {_closest(pattern, sites)}"
            )
        for site in matched:
            form = form_of(site)
            view = MatrixView.of(site.parameter.shape, layout=form.layout)
            if isinstance(parts, int):
                if parts < 1 or view.rows % parts:
                    raise ValueError(
                        f"{title}={parts}: {site.name} has {view.rows} rows, which {parts} does not "
                        "divide; give the rows of each part, as (768, 256, 256)"
                    )
                split = (view.rows // parts,) * parts
            else:
                if not isinstance(parts, Sequence):
                    raise TypeError(
                        f"{title}={parts!r}: expected the number of equal parts, or the rows of "
                        "each, as (768, 256, 256)"
                    )
                split = tuple(parts)
                MatrixView.of(
                    site.parameter.shape, layout=form.layout, split_sizes=split, name=site.name
                )
            cuts.setdefault(site, (Form(form.layout, split, form.what), title))
    return cuts


def _check_cuts(cuts: Mapping[Site, tuple[Form, str]], routed: Sequence[_Routed]) -> None:
    """Raise if a pattern in ``splits`` matches only parameters that Muon does not update."""
    used = {cuts[r.site][1] for r in routed if r.site in cuts and _is_muon(r.target)}
    for r in routed:
        if r.site in cuts and cuts[r.site][1] not in used:
            goes = "is left out" if r.target is None else f"goes to {type(r.target).__name__}"
            raise ValueError(
                f"{cuts[r.site][1]} has no effect: {r.site.name} {goes} ({r.why}), and only Muon "
                f'reads matrices; send it there with rules=[("{r.site.name}", "muon")], or leave it '
                "out of splits"
            )


def _matches(which: Matcher, site: Site) -> bool:
    if isinstance(which, str):
        return any(fnmatchcase(name, which) for name in site.names)
    if isinstance(which, type):
        places = [node for use in site.uses for node in (use.owner, *use.owner.ancestors())]
        return any(isinstance(node.module, which) for node in places)
    if callable(which):
        return bool(which(site.name, site.parameter))
    raise TypeError(
        f"a rule for {which!r}: expected a pattern of parameter names, a class of modules, or a "
        "function of (name, parameter)"
    )


def _is_muon(target: Target) -> bool:
    return target == "muon" or isinstance(target, Mapping)


def _left_out(sites: Sequence[Site], routed: Sequence[_Routed]) -> list[Route]:
    """Table rows for parameters in no group: frozen, or left out by a rule."""
    excepted = {r.site: r for r in routed if r.target is None}
    rows = []
    for site in sites:
        if not site.parameter.requires_grad:
            rows.append(left_out(site.name, site.parameter, "frozen: requires_grad=False"))
        elif site in excepted:
            rows.append(left_out(site.name, site.parameter, excepted[site].why))
    return rows


def _nothing_for_muon(model: nn.Module, routed: Sequence[_Routed], frozen: int) -> str:
    """The error message if no parameter goes to Muon: why, role by role, and what to do."""
    lines = [f"no parameter of {type(model).__name__} would be updated by Muon:"]
    examples: dict[str, str] = {}
    for r in routed:
        examples.setdefault(r.why, r.site.name)
    for why, count in Counter(r.why for r in routed).items():
        more = f" and {count - 1} more" if count > 1 else ""
        lines.append(f"  {examples[why]}{more}: {why}")
    if frozen and not routed:
        lines.append(f"  all {frozen} parameters: frozen, requires_grad=False")
        lines.append("Unfreeze what is to be trained, by requires_grad_(True), then call muon_for.")
        return "\n".join(lines)
    if frozen:
        lines.append(f"  {frozen} more: frozen, requires_grad=False")
    matrix = next((r.site.name for r in routed if r.site.parameter.ndim >= 2), None)
    if matrix is None:
        lines.append("Muon updates matrices, and none is trainable here; use torch.optim.AdamW.")
    else:
        lines.append(
            f'If one is a hidden matrix after all, say so: rules=[("{matrix}", "muon")]; '
            "if not, this model is one for torch.optim.AdamW."
        )
    return "\n".join(lines)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a torch.nn.Module; "
            "parameters by themselves go to polarstep.Muon(params)"
        )
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ValueError(
                f"{name} has no shape yet, its module is lazy: run one batch through the model, "
                "then call muon_for"
            )


def _check_elementwise(given: Mapping[str, Elementwise | None]) -> None:
    for name, rule in given.items():
        if not isinstance(rule, Elementwise) and (rule is not None or name == "others"):
            raise TypeError(
                f"{name}={rule!r}: expected polarstep.AdamW(...) or polarstep.SGD(...); "
                'to send these parameters to Muon, give rules=[("name.*", "muon")]'
            )


def _check_target(title: str, target: Target) -> None:
    if isinstance(target, Mapping):
        reserved = sorted({"params", "param_names", "algorithm", "role", "reasons"} & set(target))
        if reserved:
            raise ValueError(
                f"{title} has {reserved[0]!r} among its options: expected options of Muon only; "
                "for another algorithm give AdamW(...) or SGD(...)"
            )
    elif not (target is None or target == "muon" or isinstance(target, Elementwise)):
        raise TypeError(
            f'{title} has the target {target!r}: expected AdamW(...), SGD(...), "muon", a dict of '
            "Muon's options, or None to leave the parameters out"
        )


def _closest(which: Matcher, sites: Sequence[Site]) -> str:
    """The remedy to show for a matcher that matches no parameter."""
    names = [site.name for site in sites]
    near = (
        difflib.get_close_matches(which, names, n=3, cutoff=0.5) if isinstance(which, str) else []
    )
    listed = near or names[:3]
    return f"{'the nearest names are' if near else 'there are names such as'} {', '.join(listed)}"


def _matcher_name(which: Matcher) -> str:
    return repr(which) if isinstance(which, str) else getattr(which, "__name__", repr(which))


def _some(sites: Sequence[Site]) -> str:
    rest = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
    return f"{sites[0].name}{rest}"


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
