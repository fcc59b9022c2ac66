"""The seven methods of Table 2, under the paper's row names and short ones for a command line."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from polarstep_lab.structure import ConfigError

__all__ = ["METHODS", "Method", "find_method", "find_methods"]


@dataclass(frozen=True)
class Method:
    """One row of Table 2: which algorithm updates the hidden matrices, and with which polar map."""

    name: str
    slug: str
    algorithm: Literal["adamw", "sgd", "muon"]
    nesterov: bool = True
    sketch: Literal["gaussian", "kaczmarz"] | None = None

    @property
    def randomized(self) -> bool:
        """Whether the polar map works in a sketched subspace (Algorithms 1 and 2)."""
        return self.sketch is not None


METHODS: tuple[Method, ...] = (
    Method("AdamW", "adamw", "adamw"),
    Method("SGD (Nesterov)", "sgd", "sgd"),
    Method("Muon (Polyak)", "muon-polyak", "muon", nesterov=False),
    Method("Rand Muon (Polyak)", "rand-muon-polyak", "muon", nesterov=False, sketch="gaussian"),
    Method("Muon (Nesterov)", "muon", "muon"),
    Method("Rand Muon (Nes.-Gaussian)", "rand-muon", "muon", sketch="gaussian"),
    Method("Rand Muon (Nes.-Kaczmarz)", "rand-muon-kaczmarz", "muon", sketch="kaczmarz"),
)


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
