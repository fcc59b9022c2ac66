"""Parameter groups: what callers give, parameters and names, and how these are read as matrices.

A group is a plain dict, as torch requires. ``group["algorithm"]`` names the algorithm that updates its
parameters: ``"muon"``, ``"adamw"``, ``"sgd"`` or the name of another rule of :mod:`polarstep.others`.
What options it has, and which values they accept, is in :mod:`polarstep.options`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from polarstep.matrix import MatrixView
from polarstep.rates import resolve_scale

__all__ = [
    "COUNTED",
    "NAMELESS",
    "CheckedGroups",
    "Group",
    "Nonfinite",
    "Rounding",
    "check_new",
    "check_params",
    "check_unflattened",
    "check_whole",
    "is_by_norm",
    "is_transposed",
    "labelled_params",
    "listed_group",
    "listed_params",
    "named_params",
    "named_uniquely",
    "scale_of",
    "view_of",
    "views_of",
    "with_names",
]

Group = dict[str, Any]

Nonfinite = Literal["propagate", "skip"]
Rounding = Literal["nearest", "compensated"]
# The precisions a parameter may have; 8-bit floats have no arithmetic of their own in torch.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# What a group counts itself, and no option that a user gives.
COUNTED = {"step"}
# What a group holds beside options.
NO_OPTIONS = {"params", "param_names", *COUNTED}
# A parameter without a name is called by this prefix and its place in the group.
NAMELESS = "parameter "
# FSDP1 sets this on every parameter that it has laid end to end with others.
FLATTENED = "_fsdp_flattened"
USE_FSDP2 = (
    "expected FSDP2, torch.distributed.fsdp.fully_shard(model), whose parameters keep their shapes; or, "
    "where nothing need be cut, FullyShardedDataParallel with "
    "sharding_strategy=ShardingStrategy.NO_SHARD and use_orig_params=True"
)


def listed_params(params: Any) -> list[Any]:
    """The parameters, named parameters or groups that :class:`polarstep.Muon` was given, as a list."""
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"params is a {type(params).__name__}, a whole model: let polarstep.muon_for(model) "
            "choose its hidden matrices, or give parameters"
        )
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {type(params).__name__}: expected parameters or groups of them, as "
            "model.parameters() with its brackets"
        )
    if isinstance(params, dict) and "params" in params:
        raise TypeError(
            "params is a dict with the key 'params', a single parameter group: expected a list of "
            'groups, as [{"params": ...}]'
        )
    given = list(params)
    if not given:
        raise ValueError(
            "params is empty: expected at least one parameter. A generator, as model.parameters() "
            "returns, can be read once: make it anew for every use, or give a list"
        )
    return given


def listed_group(group: Group) -> Group:
    """``group`` with its parameters as a list, and names as a list of their own, as in torch."""
    if "params" not in group:
        raise ValueError(
            f"a parameter group has no 'params', only {', '.join(group)}; "
            "expected {'params': [...], ...}"
        )
    params = group["params"]
    if isinstance(params, Tensor):
        params = [params]
    elif not isinstance(params, Iterable):
        raise TypeError(
            f"params is a {type(params).__name__}: expected a list of parameters, as "
            "list(module.parameters())"
        )
    elif isinstance(params, set):
        raise TypeError("parameters in a set have no order, which a checkpoint needs; give a list")
    else:
        params = list(params)
    if params and all(isinstance(p, tuple) for p in params):
        names = [name for name, _ in params]
        return group | {"params": [p for _, p in params], "param_names": names}
    return group | {"params": params}


def check_params(group: Group, before: Sequence[Group] = ()) -> None:
    """Raise for the first parameter that the algorithm of ``group`` cannot update.

    ``before`` has the groups before this one, for the number of the group in the message.
    """
    for name, p in _told_by_group(group, len(before) or None):
        if not isinstance(p, Tensor):
            raise TypeError(f"{name} is a {type(p).__name__}: expected a tensor; {_instead_of(p)}")
        if is_lazy(p):
            raise ValueError(
                f"{name} has no shape yet, its module is lazy: run one batch through the model, then "
                "give its parameters to the optimizer"
            )
        if p.dtype not in DTYPES:
            remedy = "leave it out"
            if p.is_complex():
                remedy += ", or keep torch.view_as_real(p) of it in the model"
            elif p.is_floating_point():
                remedy += ", or train a copy in a wider precision"
            raise TypeError(
                f"{name} is {str(p.dtype).removeprefix('torch.')}: expected parameters in float32, "
                f"float64, bfloat16 or float16; {remedy}"
            )
        if p.is_inference():
            raise TypeError(
                f"{name} was made inside torch.inference_mode() and can never be updated: expected a "
                "parameter made outside; build the model outside, or take copy.deepcopy of it there"
            )
        if p.layout != torch.strided:
            raise TypeError(
                f"{name} has layout {p.layout}: expected a dense (strided) parameter, as "
                "torch.nn.Parameter(p.to_dense())"
            )
        if p.numel() and any(
            step == 0 and size > 1 for size, step in zip(p.shape, p.stride(), strict=True)
        ):
            raise ValueError(
                f"{name} has strides {tuple(p.stride())} for its shape {tuple(p.shape)}, so that "
                "several entries are one number in memory, as after expand(): expected a number for "
                "each entry; make the parameter of tensor.clone()"
            )
        if group["algorithm"] == "muon":
            check_whole([(name, p)])
            view_of(group, p, name)


def check_new(group: Group, before: Sequence[Group]) -> None:
    """Raise for the first parameter of ``group`` that it has twice, or that ``before`` holds already.

    torch only warns of a parameter that a group has twice. Here both would be in one batch, and a
    kernel would write to the same memory twice at once.
    """
    held = {id(p) for other in before for p in other["params"]}
    seen: set[int] = set()
    for name, p in _told_by_group(group, len(before) or None):
        if id(p) in seen:
            raise ValueError(
                f"{name} is in its group twice: expected every parameter once, also where two layers "
                "are tied; leave one out, or let polarstep.muon_for(model) take each parameter once"
            )
        seen.add(id(p))
        if id(p) in held:
            raise ValueError(
                f"{name} is in another group of this optimizer: expected every parameter in one group, "
                "also where two layers are tied; leave it out, or change the options of its group"
            )


class CheckedGroups:
    """What an optimizer's groups were like when they were last checked; users may write to them.

    A step checks a group only where an option, or a parameter's shape or device, has changed since.
    """

    def __init__(self) -> None:
        self._known: dict[int, _Checked] = {}  # by the number of the group

    def has_changed(self, number: int, group: Group) -> bool:
        """Whether ``group``, the optimizer's group of this number, is not as it was last noted."""
        known, now = self._known.get(number), _Checked.of(group)
        if (
            known is None
            or known.params != now.params
            or known.options.keys() != now.options.keys()
        ):
            return True
        return not all(map(operator.is_, known.options.values(), now.options.values()))

    def note(self, number: int, group: Group) -> None:
        """Note that ``group`` was checked as it is now."""
        self._known[number] = _Checked.of(group)


class _Checked(NamedTuple):
    """What is compared of a group."""

    options: Group
    params: list[tuple[torch.Size, torch.device]]

    @classmethod
    def of(cls, group: Group) -> _Checked:
        options = {key: value for key, value in group.items() if key not in NO_OPTIONS}
        return cls(options, [(p.shape, p.device) for p in group["params"]])


def _instead_of(found: object) -> str:
    """The remedy to show where ``found`` was given in place of a parameter."""
    if isinstance(found, str):
        return "of a dict of named parameters give the items()"
    if isinstance(found, torch.nn.Module):
        return "give the parameters() of a module, or the whole model to polarstep.muon_for"
    return "give one flat list of parameters"


def check_unflattened(model: nn.Module) -> None:
    """Raise if FSDP1 has cut some part of ``model`` into flat slices, in which no matrix is whole."""
    if not any(getattr(p, FLATTENED, False) for p in model.parameters()):
        return
    # Imported here, as most programs do without it.
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    for path, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        marked = [name for name, p in module.named_parameters() if getattr(p, FLATTENED, False)]
        cut = module.sharding_strategy != ShardingStrategy.NO_SHARD
        if marked and (cut or any(name.endswith("_flat_param") for name in marked)):
            where = f"has at {path!r}" if path else "is"
            raise ValueError(
                f"model {where} a FullyShardedDataParallel (FSDP1), which keeps parameters in flat "
                f"vectors, where Muon needs whole matrices: {USE_FSDP2}"
            )


def check_whole(params: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for the first of some named parameters of Muon that FSDP1 has made a vector."""
    for name, p in params:
        if p.ndim < 2 and getattr(p, FLATTENED, False):
            raise ValueError(
                f"{name} has shape {tuple(p.shape)}, as FullyShardedDataParallel (FSDP1) keeps "
                f"parameters in flat vectors, where Muon needs whole matrices: {USE_FSDP2}"
            )


def named_params(group: Group) -> Iterator[tuple[str, Tensor]]:
    """Parameters with their names, or with their place in the group where they have none.

    ``ZeroRedundancyOptimizer`` gives each rank some parameters of a group with the names of all, so a
    list of another length counts as no names.
    """
    params: list[Tensor] = group["params"]
    names = group.get("param_names") or []
    if len(names) != len(params):
        names = [f"{NAMELESS}{i}" for i in range(len(params))]
    return zip(names, params, strict=True)


def labelled_params(groups: Sequence[Group]) -> Iterator[list[tuple[str, Tensor]]]:
    """For each group its parameters, with names that differ between groups too.

    If there are several groups, the label of a parameter without a name includes the group's number.
    """
    for index, group in enumerate(groups):
        yield list(_told_by_group(group, index) if len(groups) > 1 else named_params(group))


def _told_by_group(group: Group, index: int | None) -> Iterator[tuple[str, Tensor]]:
    """Parameters with their names, or with the number of the group and their place in it."""
    prefix = "" if index is None or group.get("param_names") else f"group {index}, "
    return ((f"{prefix}{name}", p) for name, p in named_params(group))


def view_of(group: Group, p: Tensor, name: str = "the parameter") -> MatrixView:
    """How a Muon group reads ``p`` as matrices."""
    return views_of(group, [name], [p.shape])[0]


def views_of(group: Group, names: list[str], shapes: list[torch.Size]) -> list[MatrixView]:
    """How a Muon group reads parameters of these names and shapes as matrices."""
    layout, repeats = group["layout"], group["split_repeats"]
    split, columns = (
        None if sizes is None else tuple(sizes)
        for sizes in (group["split_sizes"], group["split_columns"])
    )
    known = _VIEWS.setdefault((layout, split, columns, repeats), {})
    for name, shape in zip(names, shapes, strict=True):
        if shape not in known:
            known[shape] = MatrixView.of(
                shape,
                layout=layout,
                split_sizes=split,
                split_columns=columns,
                split_repeats=repeats,
                name=name,
            )
    return [known[shape] for shape in shapes]


# Views by the options of a group and then by shape, as every step needs the views of all parameters.
# A dict, because torch.compile traces through functools.cache.
_VIEWS: dict[tuple[Any, ...], dict[torch.Size, MatrixView]] = {}


def is_transposed(group: Group) -> bool:
    """Whether a Muon group's matrices are stored inputs × outputs."""
    return bool(group["layout"] == "transposed")


def is_by_norm(group: Group) -> bool:
    """Whether the factor on a Muon group's learning rate depends on ‖T‖_F, and so on the map."""
    return bool(group["shape_scale"] == "rms")


def scale_of(group: Group, device: torch.device) -> Callable[[int, int], float]:
    """The factor on a Muon group's learning rate, for a matrix that is stored as m × n."""
    scale, by_norm, transposed = (
        resolve_scale(group["shape_scale"]),
        is_by_norm(group),
        is_transposed(group),
    )

    def factor(m: int, n: int) -> float:
        polar = group["polar"].on(m, n, device) if by_norm else None
        rank = min(m, n) if polar is None else polar.traits.rank_of(m, n)
        scaled: float = group["lr_factor"] * scale(*((n, m) if transposed else (m, n)), rank)
        return scaled

    return factor


def with_names(group: Group, others: Sequence[Group], known: Mapping[int, str]) -> Group:
    """``group`` with names for its parameters if ``others`` have them: torch wants all or none.

    ``known`` has names in the model by the ids of parameters. If another parameter has the name already,
    as an old head that a new head replaces, a number is added.
    """
    if "param_names" in group or not any("param_names" in other for other in others):
        return group
    first = sum(len(other["params"]) for other in others)
    taken = {name for other in others for name in other.get("param_names") or ()}
    names = []
    for i, p in enumerate(group["params"]):
        names.append(_unused(known.get(id(p), f"{NAMELESS}{first + i}"), taken))
        taken.add(names[-1])
    return group | {"param_names": names}


def named_uniquely(group: Group, others: Sequence[Group]) -> Group:
    """``group`` with a ``"name"`` that no other group has: the name given, its role or its algorithm.

    Monitors of learning rates show the name, and Lightning's refuses two groups of one name.
    """
    base = group.get("name") or group.get("role") or group["algorithm"]
    return group | {"name": _unused(base, {other.get("name") for other in others})}


def _unused(base: str, taken: Container[Any]) -> str:
    """``base``, or ``base`` with the first number from 2 on that makes it a name not yet taken."""
    name, count = base, 1
    while name in taken:
        count += 1
        name = f"{base}-{count}"
    return name
