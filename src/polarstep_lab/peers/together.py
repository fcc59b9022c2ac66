"""A peer for the hidden matrices and AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch.optim import Optimizer

import polarstep as ps
from polarstep.ranks.layout import is_sharded
from polarstep_lab.config import OptimizerConfig
from polarstep_lab.peers.catalogue import Peer, load
from polarstep_lab.settings_by_name import ConfigError

__all__ = ["Together", "beside_adamw"]


class Together(Optimizer):
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


def beside_adamw(peer: Peer, ours: ps.Muon, settings: OptimizerConfig) -> Together:
    """The peer on the parameters that are Muon's in ``ours``, and torch's AdamW on the others.

    The peer has one group, the first. A group of ``ours`` whose learning rate is 0 takes the rate of
    the matrices.
    """
    if settings.lr_scale != "spectral":
        raise ConfigError(
            f"optimizer.lr_scale={settings.lr_scale} with a peer, which scales its learning rate "
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
    return Together([hidden, torch.optim.AdamW(others, fused=fused)])
