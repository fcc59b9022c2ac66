"""The routing table: for every parameter of an optimizer, the algorithm, its options, and why.

The table is built from the parameter groups at each access, so it shows the current learning rates.
:mod:`polarstep.routing.table` prints it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from polarstep import kernels
from polarstep.checked_values import is_integer
from polarstep.engines.fused import can_tabulate
from polarstep.groups import (
    Group,
    labelled_params,
    scale_of,
    view_of,
)
from polarstep.others import ELEMENTWISE
from polarstep.ranks.layout import local
from polarstep.ranks.owned_graph import can_replay
from polarstep.ranks.plans import BY_OWNERS, Choice
from polarstep.rates import PER_SIZE
from polarstep.routing.table import WIDTH, html_table, terminal_width, text_table
from polarstep.state import is_compensated, stored_dtype

__all__ = ["Route", "Routes", "left_out", "routes_of"]

NOBODY = "left out"
NOTHING: Mapping[str, float | None] = MappingProxyType({})
NO_REASONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Route:
    """One parameter: what it is, which algorithm updates it, how, and why."""

    name: str
    shape: tuple[int, ...]
    matrix: str
    """The matrices as Muon reads them; the plain shape for other algorithms."""
    algorithm: str
    """``"Muon"``, ``"AdamW"``, the class of another rule, or ``"left out"``."""
    lr: float | None
    """The learning rate of its group."""
    base_lr: float | None
    """The rate that a scheduler multiplies; ``lr`` where there is no scheduler."""
    factors: tuple[float, ...]
    """What ``lr`` is multiplied by, for each kind of matrix in it; none where it is not measured yet."""
    factor_from: str
    """How the factor is measured; empty where it is given (:mod:`polarstep.rates`)."""
    polar: str
    """The polar map on this shape; ``"–"`` where there is none."""
    role: str | None
    why: str
    group: int | None
    """The index of its group in ``optimizer.param_groups``."""
    parameters: int
    """The number of entries."""


@dataclass(frozen=True, repr=False)
class Routes:
    """All routes of an optimizer, those of left-out parameters last; ``print`` it for the table."""

    rows: tuple[Route, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Route]:
        return iter(self.rows)

    def __contains__(self, name: object) -> bool:
        """Whether there is a parameter called ``name``, or whether ``name`` is one of the routes."""
        return any(name in (row.name, row) for row in self.rows)

    def __getitem__(self, name: str | int) -> Route:
        """The route of the parameter called ``name``, or the row of that number."""
        if isinstance(name, int):
            return self.rows[name]
        for row in self.rows:
            if row.name == name:
                return row
        near = difflib.get_close_matches(name, [row.name for row in self.rows], n=3, cutoff=0.5)
        nearest = f"; the nearest names are {', '.join(near)}" if near else ""
        raise KeyError(f"{name!r} is no parameter of the optimizer{nearest}")

    def table(self, width: int = WIDTH) -> str:
        """The table in lines of at most ``width`` characters; cells that are too long are folded.

        A line may be longer where ``width`` is below about 64: each of the five columns keeps twelve
        characters.
        """
        if not is_integer(width):
            raise TypeError(f"width={width!r}: expected a number of characters, as 80")
        return text_table(self.rows, width)

    def __str__(self) -> str:
        return self.table(terminal_width())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(self.rows)


def routes_of(
    groups: Sequence[Group],
    reasons: Mapping[str, str] = NO_REASONS,
    left_out: Iterable[Route] = (),
    choice_of: Callable[[Group, Tensor], Choice | None] = lambda group, p: None,
    measured: Mapping[str, float | None] = NOTHING,
) -> Routes:
    """The routes in ``groups``, then the routes ``left_out`` of parameters that are still in no group.

    ``reasons`` has why each parameter has its rule, by its name. ``choice_of`` returns the plan by which
    ranks share the work on a parameter, or ``None``. ``measured`` has the measured factors
    by the names of their groups.
    """
    rows = []
    for index, (group, params) in enumerate(zip(groups, labelled_params(groups), strict=True)):
        for name, p in params:
            matrix, polar = _shape(p), "–"
            factors, factor_from = _factors(group, measured)
            if group["algorithm"] == "muon":
                view, scale = view_of(group, p, name), scale_of(group, p.device)
                matrix = str(view)
                shapes = list(dict.fromkeys((m, n) for _, m, n in view.shapes))
                factors = tuple(dict.fromkeys(scale(m, n) for m, n in shapes))
                polar = _polar(group, p, shapes, choice_of(group, p))
            rows.append(
                Route(
                    name=name,
                    shape=tuple(p.shape),
                    matrix=matrix,
                    algorithm=_title(group["algorithm"]),
                    lr=float(group["lr"]),
                    base_lr=_base_lr(group),
                    factors=factors,
                    factor_from=factor_from,
                    polar=polar,
                    role=group.get("role"),
                    why=reasons.get(name, "as given"),
                    group=index,
                    parameters=p.numel(),
                )
            )
    names = {row.name for row in rows}
    return Routes((*rows, *(row for row in left_out if row.name not in names)))


def _base_lr(group: Group) -> float:
    """The rate at the height of a schedule: torch's schedulers leave it in the group."""
    base = group.get("max_lr", group.get("initial_lr"))
    return float(group["lr"] if base is None else base)


def _factors(group: Group, measured: Mapping[str, float | None]) -> tuple[tuple[float, ...], str]:
    """The factor of a group on ``lr``, and how it is measured."""
    factor = group["lr_factor"]
    if factor is None:
        return (), f"{PER_SIZE:g} × RMS, measured at the first step"
    is_measured = measured.get(group.get("name", "")) == factor
    return (factor,), f"{PER_SIZE:g} × RMS {factor / PER_SIZE:.3g}" if is_measured else ""


def _polar(
    group: Group, p: Tensor, shapes: Sequence[tuple[int, int]], choice: Choice | None
) -> str:
    """The polar maps of Muon's matrices in ``p``, how they run, and how ranks share them."""
    told = "; ".join(dict.fromkeys(group["polar"].describe(m, n, p.device) for m, n in shapes))
    if group["transform"] is not None:
        told += f", {group['transform'].describe()}"
    alone = choice is None or choice.plan == "local"
    if alone and can_tabulate(group, p if choice is None else local(p).detach()):
        told += ", fused"
    if choice is not None and choice.plan in BY_OWNERS and can_replay(group, p.device):
        told += ", map as a CUDA graph"
    told += _precision(group, p)
    return told if choice is None else f"{told}; {choice}"


def _precision(group: Group, p: Tensor) -> str:
    """How momentum and rounding differ from the defaults for a parameter, in words."""
    told = ""
    if stored_dtype(group, p) != p.dtype:
        told += f", momentum in {str(stored_dtype(group, p)).removeprefix('torch.')}"
    if is_compensated(group, p):
        told += ", rounding compensated"
    would_be_fused = group["fused"] and kernels.available(p.device)
    return f"{told}, so not fused" if told and would_be_fused else told


def left_out(name: str, p: Tensor, why: str) -> Route:
    """The route of a parameter that no group has."""
    shape = tuple(p.shape)
    return Route(
        name, shape, _shape(p), NOBODY, None, None, (), "", "–", None, why, None, p.numel()
    )


def _title(algorithm: str) -> str:
    """What the table calls an algorithm: Muon, or the name of a rule's class."""
    return "Muon" if algorithm == "muon" else ELEMENTWISE[algorithm].__name__


def _shape(p: Tensor) -> str:
    return "×".join(map(str, p.shape)) or "scalar"
