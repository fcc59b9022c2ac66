"""Which rule each parameter of a model gets: its role, and the arguments of ``muon_for``.

:class:`Choices` turns both into few parameter groups: for the whole model when the optimizer is made,
and for parameters that are added to it later.

The caller's exceptions are the arguments ``rules``, ``layouts`` and ``splits``. Each entry says which
parameters it is about, by patterns of :mod:`fnmatch` on their names. An entry that matches no parameter
is an error, but not where parameters are added ``later``: it may then be about the rest of the model.
"""

from __future__ import annotations

import copy
import difflib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polarstep.checked_values import is_integer
from polarstep.groups import Group, check_unflattened, named_params
from polarstep.matrix import Layout
from polarstep.options import check_lr, known_options
from polarstep.others import AdamW, Elementwise, beside, no_rule
from polarstep.rates import ShapeScale, in_proportion, usual_factor
from polarstep.routing.anatomy import Anatomy, Site, dissect
from polarstep.routing.matrices import Cut, Form, form_of, of_channels
from polarstep.routing.per_head import cut_into_heads, size_of_step
from polarstep.routing.roles import ROLES, Role, find_adapter, find_role
from polarstep.routing.routes import Route

__all__ = [
    "Choices",
    "Matcher",
    "Origin",
    "Parts",
    "Routed",
    "Target",
    "check_shaped",
    "is_muon",
    "split_by_rule",
]

Matcher = str | type[nn.Module] | nn.Module | Callable[[str, Tensor], bool]
Target = Elementwise | Literal["muon"] | Mapping[str, Any] | None
Parts = int | Sequence[int] | Mapping[str, Any]
# Roles whose parameters differ in size: where the rate is measured, each is a group by itself.
OF_THEIR_OWN = ("embedding", "head")
# Options that say together how a parameter is read as matrices.
READ_BY = frozenset({"layout", "split_sizes", "split_columns", "split_repeats"})


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
    per_head: tuple[str, ...] = ()
    """The projections of attention that are cut into heads: some of q, k, v and o."""

    def routed(self, anatomy: Anatomy) -> list[Routed]:
        """Every parameter of a model; raises for an argument that matches none of them."""
        return self._routed(anatomy, anatomy.sites, later=False)

    def routed_later(self, model: nn.Module, params: Iterable[Tensor]) -> list[Routed]:
        """The ``params`` that are in ``model``, which may have changed since the optimizer was made.

        A parameter that ``rules`` leave out gets the rule of its role: whoever adds it wants it trained.
        """
        asked = {id(p) for p in params}
        if not asked:
            return []
        check_shaped(model, "then add the parameters")
        check_unflattened(model)
        anatomy = dissect(model)
        sites = [site for site in anatomy.sites if id(site.parameter) in asked]
        return self._routed(anatomy, sites, later=True)

    def _routed(self, anatomy: Anatomy, sites: Sequence[Site], *, later: bool) -> list[Routed]:
        chosen = _apply_rules(self.rules, sites, later=later)
        forms = _apply_layouts(self.layouts, sites, later=later)
        cuts = _apply_splits(self.splits, sites, forms, later=later)
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
            options: Group = {}
            own = target if isinstance(target, Mapping) else {}
            scale = own.get("shape_scale", self.shape_scale)
            if self.per_head and is_muon(target) and site not in cuts:
                headed = cut_into_heads(site, form, self.per_head)
                if headed is not None:
                    size, its = (size_of_step(site, f, scale) for f in (form, headed))
                    options = {"lr_factor": size / its}
                    form, why = headed, f"{why}, per head"
            if site in cuts:
                cut = cuts[site][1]
                if is_muon(target):
                    form = cuts[site][0]
                    why = f"{why}, cut by {cut}" if by_rule else f"{found.role}: cut by {cut}"
            if found.role == "adapter" and (adapter := find_adapter(site.uses[0])) is not None:
                factor = adapter.lr_factor(self.shape_scale)
                options = {"shape_scale": "none", "lr_factor": factor}
                if adapter.transposed and site not in forms and site not in cuts:
                    options["layout"] = "transposed"
            if found.role == "hidden" and scale == "fan-ratio" and is_muon(target):
                factor = of_channels(site)
                if factor != 1:
                    options["lr_factor"] = factor * options.get("lr_factor", 1.0)
            everything.append(Routed(site, found.role, form, target, why, options, cut))
        if self.per_head and not later and not any("per head" in r.form.how for r in everything):
            model = type(anatomy.root.module).__name__
            raise ValueError(
                f"per_head: no projection of attention was found in {model}: "
                "expected layers such as q_proj, query or qkv; give "
                'splits={"*.name.weight": 12} for 12 heads'
            )
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
            group = groups.setdefault(key, options | {"role": r.role, "params": []})
            group["params"].append((r.site.name, r.site.parameter))
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


# --- the caller's exceptions


def is_muon(target: Target) -> bool:
    """Whether ``target`` sends parameters to Muon."""
    return target == "muon" or isinstance(target, Mapping)


def _apply_rules(
    rules: Sequence[tuple[Matcher, Target]], sites: Sequence[Site], *, later: bool = False
) -> dict[Site, tuple[Target, str]]:
    """For each parameter that a rule matches: the target of the first such rule, and its title."""
    if isinstance(rules, str | Mapping) or not isinstance(rules, Sequence):
        raise TypeError(
            f"rules={rules!r}: expected a list of pairs (which, target), "
            'as [("head.*", AdamW(lr=1e-3))]'
        )
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
        if is_muon(target):
            flat, matched = matched, [site for site in matched if site.parameter.ndim >= 2]
            if flat and not matched and not later:
                raise ValueError(
                    f"{title} sends {_some(flat)} to Muon, which updates matrices: expected "
                    "parameters of two dimensions and more; send these to an AdamW(...) or SGD(...)"
                )
        if not matched and not later:
            raise ValueError(f"{title} matches no parameter; {_closest(which, sites)}")
        if all(site in chosen for site in matched) and not later:
            earlier = chosen[matched[0]][1]
            raise ValueError(
                f"{title} has no effect: {earlier} came first for {_some(matched)}; "
                "put the more special rule before the more general one"
            )
        for site in matched:
            chosen.setdefault(site, (target, title))
    return chosen


def _check_target(title: str, target: Target) -> None:
    if isinstance(target, Mapping):
        reserved = sorted({"params", "param_names", "algorithm", "role"} & set(target))
        if reserved:
            raise ValueError(
                f"{title} has {reserved[0]!r} among its options: expected options of Muon only; "
                "for another algorithm give AdamW(...) or SGD(...)"
            )
    elif not (target is None or target == "muon" or isinstance(target, Elementwise)):
        otherwise = '; or "muon", a dict of Muon\'s options, or None to leave the parameters out'
        raise no_rule(f"{title} has the target ", target, otherwise)


def _apply_layouts(
    layouts: Mapping[str, Layout], sites: Sequence[Site], *, later: bool = False
) -> dict[Site, Form]:
    """The form of each weight that a pattern in ``layouts`` matches, before ``splits`` cut it."""
    _check_mapping("layouts", layouts, '{"*.proj.weight": "transposed"}')
    forms: dict[Site, Form] = {}
    for pattern, layout in layouts.items():
        title = f"layouts[{pattern!r}]"
        if layout not in get_args(Layout):
            raise ValueError(f"{title}={layout!r}: expected one of {', '.join(get_args(Layout))}")
        for site in _matrices(title, pattern, sites, later=later):
            said = f", {layout} by {title}"
            forms.setdefault(site, Form(layout, what=form_of(site).what, how=said))
    return forms


def _apply_splits(
    splits: Mapping[str, Parts],
    sites: Sequence[Site],
    forms: Mapping[Site, Form],
    *,
    later: bool = False,
) -> dict[Site, tuple[Form, str]]:
    """The parts of each weight that a pattern in ``splits`` matches."""
    _check_mapping("splits", splits, '{"*.qkv.weight": 3}')
    cuts: dict[Site, tuple[Form, str]] = {}
    for pattern, parts in splits.items():
        title = f"splits[{pattern!r}]"
        for site in _matrices(title, pattern, sites, later=later):
            form = forms.get(site) or form_of(site)
            cut = _cut(title, parts, site, form)
            form = replace(form, cut=cut)
            form.view(site.parameter, site.name)  # raises if the parts do not add up
            cuts.setdefault(site, (form, title))
    return cuts


def _check_mapping(argument: str, given: object, example: str) -> None:
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{argument}={given!r}: expected a dict by patterns of parameter names, as {example}"
        )


def _matrices(title: str, pattern: str, sites: Sequence[Site], *, later: bool) -> list[Site]:
    """The parameters of two dimensions and more that a pattern matches.

    An error if there are none, unless these are parameters that are added ``later``.
    """
    matrices = [site for site in sites if site.parameter.ndim >= 2]
    matched = [site for site in matrices if _matches(pattern, site)]
    if not matched and not later:
        known = _closest(pattern, matrices or sites)
        raise ValueError(f"{title} matches no parameter of two dimensions and more; {known}")
    return matched


def _cut(title: str, parts: Parts, site: Site, form: Form) -> Cut:
    """``parts``, as the argument ``splits`` has them, with the size of every part."""
    whole = Form(form.layout).view(site.parameter)
    outputs, inputs = whole.split[0], whole.columns[0]
    if not isinstance(parts, Mapping):
        parts = {"rows": parts}
    unknown = sorted(set(parts) - {"rows", "columns", "repeats"})
    if unknown or not parts:
        raise ValueError(
            f'{title}={dict(parts)!r}: expected "rows", "columns" or "repeats", '
            'as {"columns": 12} for the heads of an output projection'
        )
    repeats = parts.get("repeats", 1)
    if not is_integer(repeats) or repeats < 1 or outputs % repeats:
        raise ValueError(
            f"{title} has repeats={repeats!r}: {site.name} has {outputs} outputs, which is no multiple; "
            "give the number of heads that follow each other"
        )
    rows, columns = parts.get("rows"), parts.get("columns")
    if repeats > 1 and rows in (None, 1):
        raise ValueError(
            f'{title} has repeats={repeats} and "rows": {rows}: expected the parts that come in turn, '
            f'as {{"rows": 3, "repeats": {repeats}}} for q, k and v of each head'
        )
    _check_count(title, rows, repeats, site)
    # The outputs of a weight that is stored transposed are its columns.
    sides = ("outputs", "inputs") if whole.transposed else ("rows", "columns")
    return Cut(
        _sizes(title, rows, outputs // repeats, sides[0], site),
        _sizes(f'{title}["columns"]', columns, inputs, sides[1], site),
        repeats,
    )


def _sizes(title: str, parts: object, size: int, what: str, site: Site) -> tuple[int, ...] | None:
    """The size of each part, from their number or from the sizes themselves; ``None`` for one part."""
    if parts is None or (is_integer(parts) and parts == 1):
        return None
    example = size - size // 2, size // 2
    if is_integer(parts):
        if parts < 1 or size % parts:
            raise ValueError(
                f"{title}={parts}: {site.name} has {size} {what}, which {parts} does not divide; "
                f"give the {what} of each part, as {example}"
            )
        return (size // parts,) * parts
    if not isinstance(parts, Sequence) or isinstance(parts, str):
        raise TypeError(
            f"{title}={parts!r}: expected the number of equal parts, or the {what} of each, "
            f"as {example}"
        )
    return tuple(parts)


def _check_count(title: str, asked: object, repeats: int, site: Site) -> None:
    """Raise if a weight would be cut into equal parts, and the layers around it say otherwise."""
    found = form_of(site).cut
    if found.outputs is None or asked != len(found.outputs) or repeats != 1:
        return
    if found.repeats > 1:
        raise ValueError(
            f"{title}={asked}: {site.name} has its {asked} parts in turn, {found.repeats} times, so "
            "equal parts would each mix them; leave it out of splits, and it is cut as "
            f'{{"rows": {found.outputs}, "repeats": {found.repeats}}}'
        )
    if len(set(found.outputs)) > 1:
        raise ValueError(
            f"{title}={asked}: {site.name} has parts of {', '.join(map(str, found.outputs))} rows, as "
            "the layers around it say; leave it out of splits, or give the rows of each"
        )


def _matches(which: Matcher, site: Site) -> bool:
    if isinstance(which, str):
        # A name with brackets, as of a ModuleDict, does not match itself as a pattern.
        return any(name == which or fnmatchcase(name, which) for name in site.names)
    places = [node for use in site.uses for node in (use.owner, *use.owner.ancestors())]
    if isinstance(which, type):
        return any(isinstance(node.module, which) for node in places)
    if isinstance(which, nn.Module):
        return any(node.module is which for node in places)
    if callable(which):
        return bool(which(site.name, site.parameter))
    shown = f"a tensor of shape {tuple(which.shape)}" if isinstance(which, Tensor) else repr(which)
    raise TypeError(
        f"a rule for {shown}: expected a pattern of parameter names, a module of the model, a class of "
        "modules, or a function of (name, parameter)"
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
    if isinstance(which, nn.Module):
        return f"a {type(which).__name__}"
    if isinstance(which, Tensor):
        return "a tensor"
    return repr(which) if isinstance(which, str) else getattr(which, "__name__", repr(which))


def _some(sites: Sequence[Site]) -> str:
    rest = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
    return f"{sites[0].name}{rest}"


# --- after the optimizer was made


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
