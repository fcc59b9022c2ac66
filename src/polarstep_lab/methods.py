"""Finding the methods of Table 2 by the paper's row names or by short names for a command line."""

from __future__ import annotations

import difflib

from polarstep_lab.paper import METHODS, Method
from polarstep_lab.structure import ConfigError

__all__ = ["METHODS", "Method", "find_method", "find_methods"]


def find_methods(names: str) -> list[Method]:
    """``"all"`` of them, or those of a list like ``"adamw,muon"``."""
    return list(METHODS) if names == "all" else [find_method(name) for name in names.split(",")]


def find_method(name: str) -> Method:
    """The method with this slug or row name.

    >>> find_method("rand-muon").name
    'Rand Muon (Nes.-Gaussian)'
    """
    for method in METHODS:
        if name in (method.slug, method.name):
            return method
    slugs = [method.slug for method in METHODS]
    close = difflib.get_close_matches(name.lower(), slugs, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"method {name!r}: {hint}expected one of {', '.join(slugs)}")
