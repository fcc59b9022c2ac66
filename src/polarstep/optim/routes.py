"""The routing table: for every parameter of an optimizer, the algorithm, its options, and why.

The table is built from the parameter groups at each access, so it shows the current learning rates.
Rows that differ only in the numbers in their names are printed as one row. A table wider than 120
columns shows its polar maps as numbered notes, and folds cells that are still too long.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from torch import Tensor

from polarstep import kernels
from polarstep.distributed.layout import local
from polarstep.optim.by_tables import can_tabulate
from polarstep.optim.groups import ELEMENTWISE, Group, named_params, scale_of, view_of
from polarstep.optim.low_precision import is_compensated, stored_dtype

__all__ = ["Route", "Routes", "left_out", "routes_of"]

NOBODY = "left out"
HEADER = ("parameter", "as matrices", "algorithm", "polar map", "why")
NUMBER = re.compile(r"\d+")
WIDTH = 120  # of the printed table
NARROWEST = 12  # width below which no column is folded
GAP = INDENT = "  "  # between columns, and before the rest of a folded cell
CUTS = re.compile(
    r"(?<= )|(?=\.[^\d ])"
)  # a cell may be folded after a space, before a dot in a name


@dataclass(frozen=True)
class Route:
    """One parameter: what it is, which algorithm updates it, how, and why."""

    name: str
    shape: tuple[int, ...]
    matrix: str  # the matrices that Muon reads; for others the plain shape
    algorithm: str  # "Muon", "AdamW", "SGD" or "left out"
    lr: float | None
    factors: tuple[
        float, ...
    ]  # what Muon multiplies lr by, for each kind of matrix in the parameter
    polar: str  # the polar map on this shape; "–" where there is none
    role: str | None
    why: str
    group: int | None  # index in optimizer.param_groups
    parameters: int


@dataclass(frozen=True, repr=False)
class Routes:
    """All routes of an optimizer, parameters left out of it last; ``print`` it for the table."""

    rows: tuple[Route, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Route]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Route:
        """The route of the parameter called ``name``."""
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __str__(self) -> str:
        notes: list[str] = []
        table = [HEADER, *(_cells(rows) for rows in _collapse(self.rows))]
        if _width(_widths(table)) > WIDTH:
            table, notes = _with_notes(table)
        return "\n".join([*_aligned(table), *notes, "", *_totals(self.rows)])

    __repr__ = __str__


def routes_of(
    groups: Sequence[Group],
    left_out: Iterable[Route] = (),
    plan_of: Callable[[Group, Tensor], str | None] = lambda group, p: None,
) -> Routes:
    """The routes in ``groups``, then those ``left_out`` that no group has since taken.

    ``plan_of`` tells how ranks share the work on a parameter; ``None`` where they do not.
    """
    rows = []
    for index, group in enumerate(groups):
        reasons = group.get("reasons") or []
        if len(reasons) != len(group["params"]):
            reasons = ["as given"] * len(group["params"])
        for (name, p), why in zip(named_params(group), reasons, strict=True):
            if len(groups) > 1 and not group.get("param_names"):
                name = f"group {index}, {name}"
            matrix, polar = _shape(p), "–"
            factors: tuple[float, ...] = ()
            if group["algorithm"] == "muon":
                view = view_of(group, p, name)
                matrix = str(view)
                shapes = dict.fromkeys((m, n) for _, m, n in view.shapes)
                scale = scale_of(group, p.device)
                factors = tuple(dict.fromkeys(scale(m, n) for m, n in shapes))
                told = (group["polar"].describe(m, n, p.device) for m, n in shapes)
                polar = "; ".join(dict.fromkeys(told))
                if group["transform"] is not None:
                    polar += f", {group['transform'].describe()}"
                plan = plan_of(group, p)
                is_local = plan is not None and plan.startswith("local")
                if can_tabulate(group, local(p).detach() if is_local else p, None):
                    polar += ", fused"
                polar += _precision(group, p)
                if plan is not None:
                    polar += f"; {plan}"
            rows.append(
                Route(
                    name=name,
                    shape=tuple(p.shape),
                    matrix=matrix,
                    algorithm=_title(group["algorithm"]),
                    lr=float(group["lr"]),
                    factors=factors,
                    polar=polar,
                    role=group.get("role"),
                    why=why,
                    group=index,
                    parameters=p.numel(),
                )
            )
    names = {row.name for row in rows}
    return Routes((*rows, *(row for row in left_out if row.name not in names)))


def _precision(group: Group, p: Tensor) -> str:
    """What is not as usual in the precision of a parameter's update."""
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
    return Route(name, shape, _shape(p), NOBODY, None, (), "–", None, why, None, p.numel())


def _title(algorithm: str) -> str:
    """What the table calls an algorithm: Muon, or the name of a rule's class."""
    return "Muon" if algorithm == "muon" else ELEMENTWISE[algorithm].__name__


def _shape(p: Tensor) -> str:
    return "×".join(map(str, p.shape)) or "scalar"


def _collapse(rows: Sequence[Route]) -> list[tuple[str, int, Route]]:
    """(pattern of names, count, one row) for each set of rows alike but for numbers in names."""
    alike: dict[tuple[object, ...], list[Route]] = {}
    for row in rows:
        key = (NUMBER.sub("#", row.name), row.shape, row.matrix, row.polar, row.group, row.why)
        alike.setdefault(key, []).append(row)
    collapsed = []
    for members in alike.values():
        numbers = {tuple(NUMBER.findall(row.name)): row for row in members}
        between = NUMBER.split(members[0].name)
        for choice, count in _products(list(numbers)):
            ranges = [_range(values) for values in choice]
            name = between[0] + "".join(
                part + text for part, text in zip(ranges, between[1:], strict=True)
            )
            first = numbers[tuple(values[0] for values in choice)]
            collapsed.append((name, count, first))
    return collapsed


def _products(
    tuples: Sequence[tuple[str, ...]],
) -> list[tuple[tuple[tuple[str, ...], ...], int]]:
    """A set of index tuples as a few products of index sets, each with its number of tuples.

    Layers 0…11 with experts 0…7 in each are one product; if layer 3 has fewer, there are two.
    """
    if not tuples or not tuples[0]:
        return [((), 1)]
    rest: dict[str, list[tuple[str, ...]]] = {}
    for indices in tuples:
        rest.setdefault(indices[0], []).append(indices[1:])
    firsts: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for first, others in rest.items():
        firsts.setdefault(tuple(others), []).append(first)
    return [
        ((tuple(values), *choice), len(values) * count)
        for others, values in firsts.items()
        for choice, count in _products(others)
    ]


def _range(values: Sequence[str]) -> str:
    """``{0…5,7…11}``; a single value as it is."""
    if len(values) == 1:
        return values[0]
    if any(value != str(int(value)) for value in values):  # zero-padded
        return "{" + ",".join(values) + "}"
    runs: list[list[int]] = []
    for value in sorted(map(int, values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    spans = [f"{run[0]}…{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return "{" + ",".join(spans) + "}"


def _cells(collapsed: tuple[str, int, Route]) -> tuple[str, ...]:
    name, count, row = collapsed
    times = f" ×{count}" if count > 1 else ""
    algorithm = row.algorithm if row.lr is None else f"{row.algorithm}, lr {row.lr:g}"
    if set(row.factors) - {1.0}:
        algorithm += " × " + ", ".join(f"{factor:.3g}" for factor in row.factors)
    return name + times, row.matrix, algorithm, row.polar, row.why


def _widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*table, strict=True)]


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _with_notes(table: Sequence[tuple[str, ...]]) -> tuple[list[tuple[str, ...]], list[str]]:
    """A table with a number in place of each polar map, and the lines that say what each number is."""
    place = HEADER.index("polar map")
    numbers: dict[str, str] = {}
    for row in table[1:]:
        if row[place] != "–":
            numbers.setdefault(row[place], f"[{len(numbers) + 1}]")
    rows = [(*row[:place], numbers.get(row[place], row[place]), *row[place + 1 :]) for row in table]
    notes = [f"{number} {polar}" for polar, number in numbers.items()]
    return rows, ["", *(line for note in notes for line in _folded(note, WIDTH))]


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """Lines at most :data:`WIDTH` wide; long cells are folded and go on below, indented."""
    widths = _widths(table)
    while _width(widths) > WIDTH and max(widths) > NARROWEST:
        # Narrow the column in which that folds the fewest cells; of equal ones, the widest.
        folds = [sum(len(row[i]) >= width for row in table) for i, width in enumerate(widths)]
        wide = [i for i, width in enumerate(widths) if width > NARROWEST]
        widths[min(wide, key=lambda i: (folds[i], -widths[i]))] -= 1
    out = []
    for row in table:
        cells = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
            out.append(GAP.join(padded).rstrip())
    return out


def _folded(cell: str, width: int) -> list[str]:
    """``cell`` in pieces of at most ``width`` characters, cut after a space or before a dot if possible.

    >>> _folded("transformer.h.{0…11}.mlp.weight ×12", 24)
    ['transformer.h.{0…11}.mlp', '  .weight ×12']
    """
    lines = [""]
    for piece in CUTS.split(cell):
        if len((lines[-1] + piece).rstrip()) > width and lines[-1].strip():
            lines.append(INDENT)
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], INDENT + lines[-1][width:]]
    return [line.rstrip() for line in lines]


def _totals(rows: Sequence[Route]) -> list[str]:
    """Parameters and tensors of each algorithm."""
    everything = max(1, sum(row.parameters for row in rows))
    lines = []
    for title in (*map(_title, ("muon", *ELEMENTWISE)), NOBODY):
        own = [row for row in rows if row.algorithm == title]
        if own:
            count = sum(row.parameters for row in own)
            tensors = f"in {len(own):,} tensor{'s' if len(own) > 1 else ''}"
            lines.append((title, f"{count:,} parameters", tensors, f"{count / everything:.1%}"))
    lengths = [max((len(line[i]) for line in lines), default=0) for i in range(4)]
    return [
        f"{a:<{lengths[0]}}  {b:>{lengths[1]}}  {c:<{lengths[2]}}  {d:>{lengths[3]}}"
        for a, b, c, d in lines
    ]
