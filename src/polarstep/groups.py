"""Parameter groups: the parameters of a group, their names, and how they are read as matrices.

A group is a plain dict, as torch requires. ``group["algorithm"]`` names the algorithm that updates its
parameters: ``"muon"``, ``"adamw"``, ``"sgd"`` or the name of another rule in :data:`ELEMENTWISE`. What
options it has, and which values they accept, is in :mod:`polarstep.options`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from polarstep.flattened import check_whole
from polarstep.matrix import MatrixView
from polarstep.rates import resolve_scale

__all__ = [
    "NAMELESS",
    "PER_PARAMETER",
    "Group",
    "Nonfinite",
    "Rounding",
    "check_new",
    "check_params",
    "is_by_norm",
    "is_transposed",
    "labelled_params",
    "named_params",
    "scale_of",
    "view_of",
    "views_of",
]

Group = dict[str, Any]

Nonfinite = Literal["propagate", "skip"]
Rounding = Literal["nearest", "compensated"]
# The precisions a parameter may have; 8-bit floats have no arithmetic of their own in torch.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# A parameter without a name is called by this prefix and its place in the group.
NAMELESS = "parameter "
# Lists in a group with an entry for each parameter, where a group has them.
PER_PARAMETER = ("param_names",)


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
                "are tied; leave one out, or give model.parameters(), which has each parameter once"
            )
        seen.add(id(p))
        if id(p) in held:
            raise ValueError(
                f"{name} is in another group of this optimizer: expected every parameter in one group, "
                "also where two layers are tied; leave it out, or change the options of its group"
            )


def _instead_of(found: object) -> str:
    """The remedy to show where ``found`` was given in place of a parameter."""
    if isinstance(found, str):
        return "of a dict of named parameters give the items()"
    if isinstance(found, torch.nn.Module):
        return "give the parameters() of a module, or the whole model to polarstep.muon_for"
    return "give one flat list of parameters"


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
        rank = min(m, n) if polar is None else polar.effective_rank(m, n)
        scaled: float = group["lr_factor"] * scale(*((n, m) if transposed else (m, n)), rank)
        return scaled

    return factor
