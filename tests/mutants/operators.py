"""The ways a line of code is made wrong: one change of the syntax tree each.

Left alone are annotations, docstrings, strings, assertions (``strict=`` of zip is one), error messages
with their ``stacklevel=``, and ``__all__``. A mutant of those would be a change that no test should see.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["Mutant", "mutants_of", "mutated"]

Change = Callable[[ast.AST], ast.AST]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
# Functions of which the order of arguments does not matter.
SYMMETRIC = {"min", "max", "minimum", "maximum", "promote_types", "gcd"}


@dataclass(frozen=True)
class Mutant:
    """One wrong version of a file.

    ``where``, ``was``, ``now`` and ``nth`` name it. They stay the same when other lines change.
    """

    line: int
    where: str  # the function or class around the change
    was: str
    now: str
    nth: int  # among the mutants of the file with the same where, was and now
    site: int  # the number of the changed node


def mutants_of(source: str) -> list[Mutant]:
    """Every mutant of a file, in the order of its lines.

    >>> [(m.was, m.now, m.nth) for m in mutants_of("def f(x): return x + 1 - 1")]
    [('x + 1 - 1', 'x + 1 + 1', 0), ('x + 1', 'x - 1', 0), ('1', '2', 0), ('1', '2', 1)]
    """
    found = []
    seen: Counter[tuple[str, str, str]] = Counter()
    for site, (node, where) in enumerate(_sites(ast.parse(source))):
        change = _change(node)
        if change is None:
            continue
        was, now = (_short(ast.unparse(n)) for n in (node, change(copy.deepcopy(node))))
        found.append(Mutant(node.lineno, where, was, now, seen[where, was, now], site))
        seen[where, was, now] += 1
    return found


def mutated(source: str, mutant: Mutant) -> str:
    """The source with the mutant in it.

    >>> source = "def f(x): return x + 1"
    >>> [mutated(source, mutant).split("return ")[1] for mutant in mutants_of(source)]
    ['x - 1', 'x + 2']
    """
    tree = ast.parse(source)
    target = next(node for site, (node, _) in enumerate(_sites(tree)) if site == mutant.site)
    change = _change(target)
    assert change is not None
    _replace(tree, target, change(target))
    return ast.unparse(ast.fix_missing_locations(tree))


def _sites(tree: ast.AST, where: str = "") -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """The nodes that may be changed, with the name of the definition around them."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or _is_left_alone(node):
                continue
            inside = where
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                inside = f"{where}.{node.name}".strip(".")
            if isinstance(node, ast.expr | ast.stmt):
                yield node, inside
            yield from _sites(node, inside)


def _is_left_alone(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        return "__all__" in names
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.keyword):
        return node.arg in ("strict", "stacklevel")
    message = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    strings = ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert
    return message or isinstance(node, strings)


def _change(node: ast.expr | ast.stmt) -> Change | None:
    """What makes a node wrong, in place; ``None`` if it stays as it is."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            return lambda n: _with(n, ops=[COMPARISONS[type(op)]()])
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            return lambda n: _with(n, op=ARITHMETIC[type(op)]())
        case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            return lambda n: _with(n, op=ARITHMETIC[type(op)]())
        case ast.BoolOp(op=op):
            other = ast.Or if isinstance(op, ast.And) else ast.And
            return lambda n: _with(n, op=other())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            return lambda n: n.operand  # type: ignore[attr-defined]
        case ast.Constant(value=bool(value)):
            return lambda n: _with(n, value=not value)
        case ast.Constant(value=int(value)):
            return lambda n: _with(n, value=value + 1)
        case ast.Constant(value=float(value)):
            return lambda n: _with(n, value=2 * value if value else 1.0)
        case ast.If() | ast.IfExp() | ast.While():
            return lambda n: _with(n, test=ast.UnaryOp(ast.Not(), n.test))  # type: ignore[attr-defined]
        case ast.Call(args=[first, second, *_]) if ast.dump(first) != ast.dump(second):
            starred = any(isinstance(each, ast.Starred) for each in (first, second))
            if not starred and ast.unparse(node.func).split(".")[-1] not in SYMMETRIC:
                return _swap_arguments
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete() | ast.Continue() | ast.Break():
            return lambda n: ast.copy_location(ast.Pass(), n)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return lambda n: ast.copy_location(ast.Pass(), n)
    return None


def _with(node: ast.AST, **fields: object) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _swap_arguments(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Call)
    node.args[0], node.args[1] = node.args[1], node.args[0]
    return node


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    if old is new:
        return
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if value is old:
                setattr(parent, field, new)
            elif isinstance(value, list) and any(each is old for each in value):
                setattr(parent, field, [new if each is old else each for each in value])


def _short(code: str, most: int = 90) -> str:
    line = " ".join(code.split())
    return line if len(line) <= most else line[: most - 1] + "…"
