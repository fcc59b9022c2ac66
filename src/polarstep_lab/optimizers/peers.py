"""Optimizers of other libraries in the same training loop, each beside torch's AdamW.

A peer updates the matrices that would be Muon's, and AdamW everything else, at the rates it has beside
Muon. A row of the table says where a peer comes from, its options, and what it makes of a learning rate.

Packages that the registry has come with the extra ``peers``. Others are taken from a checkout whose
folder is named in the environment variable ``POLARSTEP_PEERS``. Nothing is imported before a run needs
it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.optim import Optimizer

import polarstep as ps
from polarstep.ranks.layout import is_sharded
from polarstep_lab.git import NoAnswer, git
from polarstep_lab.methods import find_method
from polarstep_lab.settings_by_name import ConfigError

if TYPE_CHECKING:
    from polarstep_lab.config import OptimizerConfig

__all__ = [
    "FOLDERS",
    "PEERS",
    "Peer",
    "PeerWithAdamW",
    "beside_adamw",
    "find_peer",
    "load",
    "search_folders",
    "versions",
]

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
        module: where the class is.
        attribute: the name of the class.
        package: the name under which it is installed.
        source: what to install, for the message when it is missing.
        rate: what it makes of a learning rate.
        options: its arguments beside parameters, learning rate and weight decay.
        momentum: the key of a parameter group that follows the run's schedule of momentum.
        cycle: the work of a step repeats after so many steps; times are means over whole cycles.
    """

    name: str
    module: str
    attribute: str
    package: str
    source: str
    rate: str
    options: Options
    momentum: str | None = None
    cycle: int = 1

    @property
    def title(self) -> str:
        """The name of its row in tables."""
        return find_method(f"peer:{self.name}").name

    @property
    def algorithm(self) -> str:
        """Whose learning rate and momentum the recipe gives it."""
        return find_method(f"peer:{self.name}").algorithm


def _momentum(settings: OptimizerConfig) -> dict[str, Any]:
    return {"momentum": settings.momentum}


def _mu(settings: OptimizerConfig) -> dict[str, Any]:
    return {"mu": settings.momentum, "nesterov": True}


def _betas(settings: OptimizerConfig) -> dict[str, Any]:
    return {"betas": (settings.momentum, settings.beta2), "eps": settings.eps}


def _none(settings: OptimizerConfig) -> dict[str, Any]:
    """No momentum is passed on. The peer keeps its own 0.95, which decays only rows that a step used."""
    return {}


def _of_dion(name: str, attribute: str, options: Options, momentum: str | None) -> Peer:
    return Peer(
        name,
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
            "muon",
            "SingleDeviceMuon",
            "muon-optimizer",
            EXTRA,
            SPECTRAL,
            _momentum,
            "momentum",
        ),
        _of_dion("dion-muon", "Muon", _mu, "mu"),
        _of_dion("dion-normuon", "NorMuon", _mu, "mu"),
        _of_dion("dion2", "Dion2", _none, None),
        _of_dion("dion3", "Dion3", _none, None),
        Peer(
            "soap",
            "pytorch_optimizer",
            "SOAP",
            "pytorch_optimizer",
            EXTRA,
            PER_ENTRY,
            _betas,
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


def search_folders() -> None:
    """Let Python import from the folders of :data:`FOLDERS`."""
    for folder in filter(None, os.environ.get(FOLDERS, "").split(os.pathsep)):
        if folder not in sys.path:
            sys.path.append(folder)


def load(peer: Peer) -> Callable[..., Optimizer]:
    """The peer's class; a :class:`ConfigError` says what is missing where it cannot be imported."""
    search_folders()
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


class PeerWithAdamW(Optimizer):
    """Several optimizers as one: a step of this optimizer is one step of each part.

    Parameter groups are those of the parts, one after another. The state stays with the parts.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        """Join ``parts``, which have no parameter in common."""
        self.parts = tuple(parts)
        super().__init__([group for part in parts for group in part.param_groups], {})

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of each part; ``closure`` is called once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            with _only_with_gradients(part):
                part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of each part."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of each part, whose parameter groups are new objects afterwards."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]


@contextmanager
def _only_with_gradients(part: Optimizer) -> Iterator[None]:
    """Hide the parameters without a gradient from an optimizer, as a GPT's spare matrices.

    Most optimizers skip such parameters, but ``muon.SingleDeviceMuon`` fails on them.
    """
    held = [(group, group["params"]) for group in part.param_groups]
    for group, params in held:
        group["params"] = [p for p in params if p.grad is not None]
    try:
        yield
    finally:
        for group, params in held:
            group["params"] = params


def beside_adamw(peer: Peer, ours: ps.Muon, settings: OptimizerConfig) -> PeerWithAdamW:
    """The peer on the parameters that are Muon's in ``ours``, and torch's AdamW on the others.

    The peer has one group, the first. A group of ``ours`` whose learning rate is 0 takes the rate of
    the matrices.
    """
    if settings.shape_scale != "spectral":
        raise ConfigError(
            f"optimizer.shape_scale={settings.shape_scale} with a peer, which scales its learning rate "
            f"itself ({peer.rate}): expected spectral"
        )
    matrices, names, others = [], [], []
    for group in ours.param_groups:
        if any(is_sharded(p) for p in group["params"]):
            raise ConfigError(
                f"method peer:{peer.name} with --parallel fsdp: expected ddp or a single process"
            )
        if group["algorithm"] == "muon":
            matrices += group["params"]
            names += group["param_names"]
        else:
            others.append(
                {
                    "params": group["params"],
                    "param_names": group["param_names"],
                    "lr": group["lr"] * group["lr_factor"] or settings.lr,
                    "betas": group["betas"],
                    "eps": group["eps"],
                    "weight_decay": group["weight_decay"],
                }
            )
    hidden = load(peer)(
        matrices, lr=settings.lr, weight_decay=settings.weight_decay, **peer.options(settings)
    )
    (group,) = hidden.param_groups
    group["param_names"] = names
    fused = True if matrices[0].is_cuda else None
    return PeerWithAdamW([hidden, torch.optim.AdamW(others, fused=fused)])
