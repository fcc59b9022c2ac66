"""The peers: where each one comes from, its options, and what it makes of a learning rate.

Packages that the registry has come with the extra ``peers``. Others are taken from a checkout whose
folder is named in the environment variable ``POLARSTEP_PEERS``. Nothing is imported before a run needs
it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from polarstep_lab.git import NoAnswer, git
from polarstep_lab.paper import Method
from polarstep_lab.settings_by_name import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from polarstep_lab.config import OptimizerConfig

__all__ = ["FOLDERS", "PEERS", "Peer", "find_peer", "load", "versions"]

FOLDERS = "POLARSTEP_PEERS"
"""The environment variable with folders of checkouts, separated as in PATH."""

COMMIT = "COMMIT"
"""The file with the commit of a copy that has no ``.git``."""

EXTRA = "pip install 'polarstep[peers]'"
CHECKOUT = "a checkout of github.com/microsoft/dion"

SPECTRAL = "lr·√max(1, m/n) for an m×n matrix, as ours"
SPECTRAL_BOTH_WAYS = (
    "lr·√(m/n), which is smaller than ours for matrices with more columns than rows"
)
PER_ENTRY = "per entry, as AdamW's: it takes AdamW's rate"

Options = Callable[["OptimizerConfig"], dict[str, Any]]


@dataclass(frozen=True)
class Peer:
    """An optimizer class of another library.

    Args:
        name: as in the method ``peer:NAME``.
        title: the name of its row in tables.
        module: where the class is.
        attribute: the name of the class.
        package: the name under which it is installed.
        source: what to install, for the message when it is missing.
        rate: what it makes of a learning rate.
        options: its arguments beside parameters, learning rate and weight decay.
        momentum: the key of a parameter group that follows the run's schedule of momentum.
        algorithm: whose learning rate and momentum the recipe gives it.
        cycle: the work of a step repeats after so many steps; times are means over whole cycles.
    """

    name: str
    title: str
    module: str
    attribute: str
    package: str
    source: str
    rate: str
    options: Options
    momentum: str | None = None
    algorithm: Literal["muon", "adamw"] = "muon"
    cycle: int = 1

    @property
    def method(self) -> Method:
        """The method of runs with this peer."""
        return Method(self.title, f"peer:{self.name}", self.algorithm, peer=self.name)


def _momentum(settings: OptimizerConfig) -> dict[str, Any]:
    return {"momentum": settings.momentum}


def _mu(settings: OptimizerConfig) -> dict[str, Any]:
    return {"mu": settings.momentum, "nesterov": True}


def _betas(settings: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (settings.momentum, settings.beta2), "eps": settings.eps}


def _none(settings: OptimizerConfig) -> dict[str, Any]:
    """No momentum is passed on. The peer keeps its own 0.95, which decays only rows that a step used."""
    return {}


def _of_dion(name: str, title: str, attribute: str, options: Options, momentum: str | None) -> Peer:
    return Peer(
        name,
        title,
        "dion",
        attribute,
        "dion",
        CHECKOUT,
        SPECTRAL_BOTH_WAYS,
        options,
        momentum,
    )


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(
            "torch-muon",
            "torch.optim.Muon",
            "torch.optim",
            "Muon",
            "torch",
            "torch 2.9 or newer",
            SPECTRAL,
            _momentum,
            "momentum",
        ),
        Peer(
            "jordan-muon",
            "Muon of K. Jordan",
            "muon",
            "SingleDeviceMuon",
            "muon-optimizer",
            EXTRA,
            SPECTRAL,
            _momentum,
            "momentum",
        ),
        _of_dion("dion-muon", "Muon of dion", "Muon", _mu, "mu"),
        _of_dion("dion-normuon", "NorMuon of dion", "NorMuon", _mu, "mu"),
        _of_dion("dion2", "Dion2 (a quarter of the rows)", "Dion2", _none, None),
        _of_dion("dion3", "Dion3 (a quarter of the rows)", "Dion3", _none, None),
        Peer(
            "soap",
            "SOAP of pytorch_optimizer",
            "pytorch_optimizer",
            "SOAP",
            "pytorch_optimizer",
            EXTRA,
            PER_ENTRY,
            _betas,
            algorithm="adamw",
            cycle=10,  # the default of precondition_frequency: a QR of every preconditioner
        ),
    )
}
"""All peers by name."""


def find_peer(name: str) -> Peer:
    """The peer of this name."""
    if name not in PEERS:
        raise ConfigError(f"peer {name!r}: expected one of {', '.join(PEERS)}")
    return PEERS[name]


def load(peer: Peer) -> Callable[..., Optimizer]:
    """The peer's class; a :class:`ConfigError` says what is missing where it cannot be imported."""
    for folder in filter(None, os.environ.get(FOLDERS, "").split(os.pathsep)):
        if folder not in sys.path:
            sys.path.append(folder)
    try:
        found: Callable[..., Optimizer] = getattr(
            importlib.import_module(peer.module), peer.attribute
        )
    except (ImportError, AttributeError) as error:
        how = f"{FOLDERS}=FOLDER polarstep …" if peer.source == CHECKOUT else peer.source
        raise ConfigError(
            f"method peer:{peer.name} needs {peer.attribute} of the package {peer.package!r}, which "
            f"cannot be imported ({error}): expected {peer.source}; give it with `{how}`"
        ) from error
    if peer.source == CHECKOUT:
        # dion compiles functions for each set of shapes, and torch refuses a ninth set.
        dynamo: Any = importlib.import_module("torch._dynamo.config")
        dynamo.recompile_limit = max(64, dynamo.recompile_limit)
    return found


def versions() -> dict[str, str]:
    """Package and version of every peer that was imported; the commit of one that is a checkout."""
    found = {}
    for peer in PEERS.values():
        module = sys.modules.get(peer.module)
        if module is None or peer.package == "torch":
            continue
        try:
            found[peer.package] = metadata.version(peer.package)
        except metadata.PackageNotFoundError:
            found[peer.package] = _commit(Path(module.__file__ or "."))
    return found


def _commit(path: Path) -> str:
    """The commit of the checkout that holds the file ``path``.

    A copy without ``.git`` has its commit in a file :data:`COMMIT`, beside the package or one folder up.
    A copy may lie inside a repository of something else, whose commit says nothing about it.
    """
    for folder in list(path.parents)[:2]:
        if (folder / COMMIT).is_file():
            return (folder / COMMIT).read_text(encoding="utf-8").strip()
    try:
        git(path.parent, "ls-files", "--error-unmatch", path.name)
        return git(path.parent, "rev-parse", "HEAD")
    except NoAnswer:
        return "unknown"
