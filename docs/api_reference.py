"""Write docs/api.md: signatures and docstrings of polarstep's public names.

    python docs/api_reference.py

A name is described in the first section that has it. A docstring is shown up to its examples; its
``Args`` become a list.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from polarstep.storage import write_atomically

PAGE = Path(__file__).with_name("api.md")
WIDTH = 100  # of a signature on one line

HEAD = """# API reference

The public names with their signatures and docstrings. This page is written by
`python docs/api_reference.py`; a test compares it with the code. How to write a polar map, a sketch or a
range finder of your own is in [extending](extending.md).
"""


def page() -> str:
    """The whole page."""
    described: dict[int, str] = {}
    return "\n".join([HEAD, *(_section(module, described) for module in _modules())])


def _modules() -> Iterator[ModuleType]:
    for name in ("polarstep", "polarstep.polar", "polarstep.sketch", "polarstep.diagnostics"):
        yield importlib.import_module(name)
    theory = importlib.import_module("polarstep.theory")
    for name in theory.__all__:
        yield importlib.import_module(f"polarstep.theory.{name}")


def _section(module: ModuleType, described: dict[int, str]) -> str:
    """A module's own names, and a line about those that an earlier section has."""
    parts, elsewhere = [f"## {module.__name__}\n", _prose(_doc_of(module)), ""], []
    for name in module.__all__:
        value = getattr(module, name)
        if described.setdefault(id(value), module.__name__) != module.__name__:
            elsewhere.append(f"`{name}`")
        else:
            parts += [f"### {module.__name__}.{name}\n", _entry(name, value)]
    if elsewhere:
        parts.append(f"Described above: {', '.join(elsewhere)}.\n")
    return "\n".join(parts)


def _entry(name: str, value: Any) -> str:
    """Signature, docstring and, of a class, its public members."""
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return f"```python\n{name} = {value!r}\n```\n"
    lines = [f"```python\n{_signature(name, value)}\n```\n", _prose(_doc_of(value)), ""]
    if inspect.isclass(value):
        members = list(_members(value))
        lines += ["Members:\n", *members, ""] if members else []
    return "\n".join(lines)


def _signature(name: str, value: Any) -> str:
    """``name(parameters)`` with types and defaults, a parameter per line where it is long."""
    try:
        signature = inspect.signature(value)
    except ValueError:  # a class that is made by its base in C
        return f"{name}(...)"
    made = _made_defaults(value)
    parameters = []
    for parameter in signature.parameters.values():
        if parameter.name in made:
            parameter = parameter.replace(default=made[parameter.name])
        parameters.append(str(_unquoted(parameter)))
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    returns = signature.return_annotation
    arrow = "" if returns in (signature.empty, None, "None") else f" -> {returns}"
    line = f"{name}({', '.join(parameters)}){arrow}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {each}," for each in parameters), f"){arrow}"])


def _unquoted(parameter: inspect.Parameter) -> inspect.Parameter:
    """A parameter whose annotation prints without quotes."""
    if isinstance(parameter.annotation, str):
        return parameter.replace(annotation=_Words(parameter.annotation))
    return parameter


class _Words:
    """Text that ``inspect`` prints as it is."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _made_defaults(value: Any) -> dict[str, Any]:
    """The defaults that a dataclass makes by a function, as that function makes them."""
    if not (inspect.isclass(value) and dataclasses.is_dataclass(value)):
        return {}
    return {
        field.name: field.default_factory()
        for field in dataclasses.fields(value)
        if field.default_factory is not dataclasses.MISSING
    }


def _members(value: type) -> Iterator[str]:
    """A line for each public method and property that the class adds to those of its bases."""
    for name, member in vars(value).items():
        if name.startswith("_") and name != "__call__":
            continue
        if any(hasattr(base, name) for base in value.__bases__):
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        title = name
        if inspect.isfunction(function):
            names = [p for p in inspect.signature(function).parameters if p not in ("self", "cls")]
            title = f"{'' if name == '__call__' else name}({', '.join(names)})"
        elif not isinstance(member, property) and not hasattr(member, "func"):
            continue
        summary = _prose(_doc_of(member)).split("\n\n")[0]
        yield f"- `{title}`: {' '.join(summary.split())}"


def _doc_of(value: Any) -> str:
    """The docstring that somebody wrote for this very object."""
    written = value.__doc__
    return inspect.cleandoc(written) if written else ""


def _prose(docstring: str) -> str:
    """A docstring as Markdown: paragraphs, indented blocks as code, ``Args`` as a list."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", docstring.strip("\n")):
        if block.lstrip().startswith(">>>"):
            break
        if block.strip() == "::":
            continue
        if block.startswith("Args:\n"):
            out.append("\n".join(["Arguments:\n", *_listed(block.removeprefix("Args:\n"))]) + "\n")
        elif block.startswith("    "):
            out.append(f"```text\n{textwrap.dedent(block)}\n```\n")
        else:
            out.append(_markdown(re.sub(r"::$", ":", block)) + "\n")
    return _joined(out)


def _joined(blocks: list[str]) -> str:
    """Blocks apart by empty lines; code blocks in a row are one."""
    return "\n".join(blocks).replace("\n```\n\n```text\n", "\n\n").rstrip("\n")


def _listed(args: str) -> Iterator[str]:
    """``name: text`` of an ``Args`` section as list items."""
    for item in re.split(r"\n(?=\w)", textwrap.dedent(args)):
        name, _, text = item.partition(":")
        yield f"- `{name}`: {_markdown(' '.join(text.split()))}"


def _markdown(text: str) -> str:
    """Sphinx roles and double backticks as plain code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return text.replace("``", "`")


def main() -> None:
    """Write the page."""
    text = page().encode()
    write_atomically(PAGE, lambda file: file.write(text))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
