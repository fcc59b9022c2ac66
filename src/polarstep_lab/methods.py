"""The methods that a run can be made with, and finding them by row name or by slug.

:data:`METHODS` are the paper's, the rows of Table 2. :data:`OURS` are the maps that this library has
beside them. A method whose slug begins with ``peer:`` runs the optimizer of another library
(:mod:`polarstep_lab.optimizers.peers`).
"""

from __future__ import annotations

from polarstep_lab.paper import METHODS, Method
from polarstep_lab.settings_by_name import ConfigError, hint

__all__ = [
    "DEFAULT",
    "METHODS",
    "OURS",
    "PEERS",
    "Method",
    "all_methods",
    "find_method",
    "find_methods",
]

DEFAULT = Method("polarstep (default)", "default", "muon", polar="default", normalize_rows=True)
"""What :func:`polarstep.muon_for` makes of a model with no option, at its own rate."""

OURS: tuple[Method, ...] = (
    DEFAULT,
    Method("Muon (PolarExpress 5)", "muon-polar-express", "muon", polar="polar-express"),
    Method(
        "Muon (PolarExpress 5, normalized rows)",
        "muon-polar-express-rows",
        "muon",
        polar="polar-express",
        normalize_rows=True,
    ),
    Method(
        "Rand Muon (Nes.-Gaussian, normalized rows)",
        "rand-muon-rows",
        "muon",
        sketch="gaussian",
        normalize_rows=True,
    ),
    Method("Deflated Muon", "deflated", "muon", sketch="warm", polar="deflated"),
    Method(
        "Deflated Muon (normalized rows)",
        "deflated-rows",
        "muon",
        sketch="warm",
        polar="deflated",
        normalize_rows=True,
    ),
    Method("Auto Muon", "auto", "muon", polar="auto"),
    Method("Auto Muon (normalized rows)", "auto-rows", "muon", polar="auto", normalize_rows=True),
)
"""Muon with maps that are not in Table 2: full space as :class:`polarstep.Muon` runs it by default, a
sketched head whose rest is kept (:class:`polarstep.Deflated`), and the map chosen for each shape
(:class:`polarstep.Auto`). These maps and the paper's sketch are there with normalized rows, too."""


PEERS: tuple[Method, ...] = (
    Method("torch.optim.Muon", "peer:torch-muon", "muon", peer="torch-muon"),
    Method("Muon of K. Jordan", "peer:jordan-muon", "muon", peer="jordan-muon"),
    Method("Muon of dion", "peer:dion-muon", "muon", peer="dion-muon"),
    Method("NorMuon of dion", "peer:dion-normuon", "muon", peer="dion-normuon"),
    Method("Dion2 (a quarter of the rows)", "peer:dion2", "muon", peer="dion2"),
    Method("Dion3 (a quarter of the rows)", "peer:dion3", "muon", peer="dion3"),
    Method("SOAP of pytorch_optimizer", "peer:soap", "adamw", peer="soap"),
)
"""Optimizers of other libraries (:mod:`polarstep_lab.optimizers.peers`)."""


def all_methods() -> tuple[Method, ...]:
    """Every method that :func:`find_method` knows."""
    return (*METHODS, *OURS, *PEERS)


def find_methods(names: str) -> list[Method]:
    """The methods of a list like ``"adamw,muon"``, each once.

    ``all`` in the list stands for the rows of Table 2, and ``ours`` for :data:`OURS`.

    >>> [method.slug for method in find_methods("sgd,ours")][:2]
    ['sgd', 'default']
    """
    groups = {"all": METHODS, "ours": OURS}
    found = [
        method
        for name in names.split(",")
        for method in (groups[name] if name in groups else [find_method(name)])
    ]
    return list(dict.fromkeys(found))


def find_method(name: str) -> Method:
    """The method with this slug or row name.

    >>> find_method("rand-muon").name
    'Rand Muon (Nes.-Gaussian)'
    """
    for method in all_methods():
        if name in (method.slug, method.name):
            return method
    if "," in name or name in ("all", "ours"):
        raise ConfigError(
            f"method {name!r}: expected one method; polarstep compare trains several, as in "
            f"polarstep compare RECIPE --methods {name}"
        )
    slugs = [method.slug for method in all_methods()]
    known = ", ".join(slugs)
    raise ConfigError(f"method {name!r}: {hint(name.lower(), slugs)}expected one of {known}")
