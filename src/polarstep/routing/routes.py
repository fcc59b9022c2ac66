"""The routing table: for every parameter of an optimizer, the algorithm, its options, and why.

The table is built from the parameter groups at each access, so it shows the current learning rates.
:mod:`polarstep.routing.routes` prints it.
"""

from __future__ import annotations

import difflib
import html
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
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
from polarstep.rates import per_size
from polarstep.state import is_compensated, stored_dtype

__all__ = ["Route", "Routes", "left_out", "routes_of"]

HEADER = ("parameter", "as matrices", "algorithm", "polar map", "why")
NUMBER = re.compile(r"\d+")
WIDTH = 120  # of a table that is not printed to a terminal, and at most of any
NARROWEST_PAGE = 80  # of a table in a terminal; a narrower terminal wraps its lines
NARROWEST = 12  # width below which no column is folded
GAP = INDENT = "  "  # between columns, and before the rest of a folded cell
# A cell may be folded after a space, and before a dot in a name.
CUTS = re.compile(r"(?<= )|(?=\.[^\d ])")
# Layers that are alike but for their sizes are one row if there are more than so many sizes.
SIZES = 6

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
        return (), f"{per_size(group):.3g} × RMS, measured at the first step"
    if measured.get(group.get("name", "")) != factor:
        return (factor,), ""
    return (factor,), f"{per_size(group):.3g} × RMS {factor / per_size(group):.3g}"


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


# --- as text and as HTML


def terminal_width() -> int:
    """The columns of the terminal, from 80 to 120; 120 where text is not printed to a terminal."""
    if not sys.stdout.isatty():
        return WIDTH
    return max(NARROWEST_PAGE, min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns))


def text_table(rows: Sequence[Route], width: int) -> str:
    """The table of ``rows`` in lines of at most ``width`` characters, and the totals below it."""
    width = max(width, NARROWEST)
    notes: list[str] = []
    table = [HEADER, *map(_cells, _collapsed(rows))]
    if _width(_natural_widths(table)) > width:
        table, notes = _with_notes(table, width)
    return "\n".join([*_aligned(table, width), *notes, "", *_schedule(rows), *_totals(rows)])


def html_table(rows: Sequence[Route]) -> str:
    """The table of ``rows`` for a notebook."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    lines = [line(HEADER, "th"), *(line(_cells(each), "td") for each in _collapsed(rows))]
    below = html.escape("\n".join([*_schedule(rows), *_totals(rows)]))
    return "<table>" + "".join(lines) + f"</table><pre>{below}</pre>"


# --- rows that stand for many parameters


def _collapsed(rows: Sequence[Route]) -> list[tuple[str, int, list[Route]]]:
    """(pattern of names, count, routes that it stands for) for parameters alike but for numbers.

    There is one route for each of the sizes that the parameters have.
    """
    alike: dict[tuple[object, ...], dict[tuple[object, ...], list[Route]]] = {}
    for row in rows:
        why = NUMBER.sub("#", row.why)
        kind = (NUMBER.sub("#", row.name), why, row.algorithm, row.lr, row.base_lr, len(row.shape))
        size = (row.shape, row.matrix, row.polar, row.group, row.why)
        alike.setdefault(kind, {}).setdefault(size, []).append(row)
    collapsed = []
    for sizes in alike.values():
        together = list(sizes.values())
        if len(together) > SIZES:
            together = [[row for each in together for row in each]]
        for members in together:
            numbers = {tuple(NUMBER.findall(row.name)): row for row in members}
            between = NUMBER.split(members[0].name)
            for choice, times in _products(list(numbers)):
                ranges = [_range(values) for values in choice]
                name = between[0] + "".join(
                    part + text for part, text in zip(ranges, between[1:], strict=True)
                )
                chosen = [numbers[each] for each in product(*choice)]
                collapsed.append((name, times, list({row.shape: row for row in chosen}.values())))
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


def _cells(collapsed: tuple[str, int, list[Route]]) -> tuple[str, ...]:
    """The cells of one row of the table."""
    name, times, rows = collapsed
    row = rows[0]
    label = f"{name} ×{times}" if times > 1 else name
    factors = sorted({factor for row in rows for factor in row.factors})
    algorithm = row.algorithm if row.base_lr is None else f"{row.algorithm}, {_rate(row, factors)}"
    if len(rows) == 1:
        return label, row.matrix, algorithm, row.polar, row.why
    first, *_, last = sorted(rows, key=lambda row: row.parameters)
    matrices = f"{len(rows)} sizes, {first.matrix} … {last.matrix}"
    polar = row.polar if len({row.polar for row in rows}) == 1 else f"by size; {row.polar}"
    return label, matrices, algorithm, polar, row.why


def _rate(row: Route, factors: Sequence[float]) -> str:
    """The learning rate of a row, and where it comes from."""
    assert row.base_lr is not None
    if not row.factors:
        return f"lr × {row.factor_from}"
    if not set(factors) - {1.0}:
        return f"lr {row.base_lr:g}"
    several = len(row.factors) < len(factors)
    shown = [factors[0], factors[-1]] if several else row.factors
    told = (" … " if several else ", ").join(f"{factor:.3g}" for factor in shown)
    if row.algorithm == "Muon":
        return f"lr {row.base_lr:g} × {told}"
    why = f", {row.factor_from}" if row.factor_from else ""
    return f"{row.base_lr * row.factors[0]:.3g} = lr × {told}{why}"


def _natural_widths(table: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*table, strict=True)]


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _with_notes(
    table: Sequence[tuple[str, ...]], width: int
) -> tuple[list[tuple[str, ...]], list[str]]:
    """A table with a number in place of each polar map, and the lines that say what each number is."""
    place = HEADER.index("polar map")
    numbers: dict[str, str] = {}
    for row in table[1:]:
        if row[place] != "–":
            numbers.setdefault(row[place], f"[{len(numbers) + 1}]")
    rows = [(*row[:place], numbers.get(row[place], row[place]), *row[place + 1 :]) for row in table]
    notes = [f"{number} {polar}" for polar, number in numbers.items()]
    return rows, ["", *(line for note in notes for line in _folded(note, width))]


def _aligned(table: Sequence[Sequence[str]], width: int) -> list[str]:
    """Lines at most ``width`` wide; long cells are folded and go on below, indented."""
    widths = _fitted(table, width)
    out = []
    for row in table:
        cells = [_folded(cell, each) for cell, each in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(each) for part, each in zip(parts, widths, strict=True))
            out.append(GAP.join(padded).rstrip())
    return out


def _fitted(table: Sequence[Sequence[str]], width: int) -> Sequence[int]:
    """The widths of the columns with which a table of ``width`` has the fewest lines.

    Of equally long tables it takes the table in which the fewest sizes, rates and maps are folded, then
    the fewest cells of any kind. Where none is narrow enough, every column is as narrow as it may be.
    """
    if _width(_natural_widths(table)) <= width:
        return _natural_widths(table)
    columns = [_choices(column) for column in zip(*table, strict=True)]
    best = None
    for choice in product(*columns):
        widths = [each for each, _ in choice]
        if _width(widths) > width:
            continue
        heights = [lines for _, lines in choice]
        folds = [sum(lines) for lines in heights]
        cost = (sum(map(max, zip(*heights, strict=True))), sum(folds[1:-1]), sum(folds))
        if best is None or cost < best[0]:
            best = (cost, widths)
    return [column[0][0] for column in columns] if best is None else best[1]


def _choices(column: Sequence[str]) -> list[tuple[int, tuple[int, ...]]]:
    """The widths worth trying for a column, narrowest first, with the lines of each cell."""
    found: dict[tuple[int, ...], int] = {}
    widest = max(map(len, column))
    for width in range(min(NARROWEST, widest), widest + 1):
        found.setdefault(tuple(len(_folded(cell, width)) for cell in column), width)
    return [(width, lines) for lines, width in found.items()]


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
    for title in dict.fromkeys(row.algorithm for row in rows):
        own = [row for row in rows if row.algorithm == title]
        count = sum(row.parameters for row in own)
        tensors = f"in {len(own):,} tensor{'s' if len(own) > 1 else ''}"
        lines.append((title, f"{count:,} parameters", tensors, f"{count / everything:.1%}"))
    lengths = [max((len(line[i]) for line in lines), default=0) for i in range(4)]
    return [
        f"{a:<{lengths[0]}}  {b:>{lengths[1]}}  {c:<{lengths[2]}}  {d:>{lengths[3]}}"
        for a, b, c, d in lines
    ]


def _schedule(rows: Sequence[Route]) -> list[str]:
    """Where a scheduler runs: the rates of now. The table shows those that it multiplies."""
    now = dict.fromkeys(
        f"lr {row.lr:.3g} in place of {row.base_lr:g}" for row in rows if row.lr != row.base_lr
    )
    return [f"By a scheduler, now: {', '.join(now)}", ""] if now else []
