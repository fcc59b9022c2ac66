"""Finding the methods of Table 2 by the paper's row names or by short names for a command line."""

from __future__ import annotations

from polarstep_lab.paper import METHODS, Method
from polarstep_lab.structure import ConfigError, hint

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
    known = ", ".join(slugs)
    raise ConfigError(f"method {name!r}: {hint(name.lower(), slugs)}expected one of {known}")
