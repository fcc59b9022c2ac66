"""Docstrings as Markdown, for the API reference: roles, literal blocks and examples."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|mod|meth|data|attr):`~?([^`]+)`")
EXAMPLE = re.compile(r"(?:^ *>>> .*\n(?:^ *\S.*\n?)*(?:\n(?= *>>> ))?)+", re.MULTILINE)
LITERAL = re.compile(r"::[ \t]*$", re.MULTILINE)


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring when its object has been read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace an object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """A docstring with ``:role:`name``` as code, ``::`` as a colon and examples in fences.

    >>> as_markdown("See :class:`polarstep.Muon`::")
    'See `polarstep.Muon`:'
    """
    text = ROLE.sub(r"`\1`", text)
    text = EXAMPLE.sub(_fenced, text)
    return LITERAL.sub(":", text)


def _fenced(match: re.Match[str]) -> str:
    """An example as a block of code with its own indentation; empty lines of output are empty."""
    lines = re.sub(r"^ *<BLANKLINE>$", "", match[0], flags=re.MULTILINE).rstrip("\n").split("\n")
    indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
    return "\n".join([f"{indent}```pycon", *lines, f"{indent}```", ""])
