"""The caller's exceptions in ``muon_for``: the arguments ``rules``, ``layouts`` and ``splits``.

Each entry says which parameters it is about, by patterns of :mod:`fnmatch` on their names. An entry that
matches no parameter is an error, but not where parameters are added ``later``: it may then be about the
rest of the model.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import Tensor, nn

from polarstep.checked_values import is_integer
from polarstep.elementwise_rule import Elementwise, meant, shown
from polarstep.matrix import Layout
from polarstep.routing.anatomy import Site
from polarstep.routing.fused_weights import Cut
from polarstep.routing.roles import Form, form_of

__all__ = [
    "Matcher",
    "Parts",
    "Target",
    "apply_layouts",
    "apply_rules",
    "apply_splits",
    "is_muon",
]

Matcher = str | type[nn.Module] | nn.Module | Callable[[str, Tensor], bool]
Target = Elementwise | Literal["muon"] | Mapping[str, Any] | None
Parts = int | Sequence[int] | Mapping[str, Any]


def is_muon(target: Target) -> bool:
    """Whether ``target`` sends parameters to Muon."""
    return target == "muon" or isinstance(target, Mapping)


def apply_rules(
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
        reserved = sorted({"params", "param_names", "algorithm", "role", "reasons"} & set(target))
        if reserved:
            raise ValueError(
                f"{title} has {reserved[0]!r} among its options: expected options of Muon only; "
                "for another algorithm give AdamW(...) or SGD(...)"
            )
    elif not (target is None or target == "muon" or isinstance(target, Elementwise)):
        raise TypeError(
            f"{title} has the target {shown(target)}: expected AdamW(...), SGD(...) or another "
            'polarstep.Elementwise, "muon", a dict of Muon\'s options, or None to leave the parameters '
            f"out{meant(target)}"
        )


def apply_layouts(
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


def apply_splits(
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
