"""AdamW and SGD for the parameters that are not hidden matrices.

The arithmetic is torch's own (``torch.optim.adamw.adamw``, ``torch.optim.sgd.sgd``, fused where the
device has it), with torch's names for the state, so that a checkpoint looks like one of
``torch.optim.AdamW``. This module describes the two rules for parameter groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

__all__ = ["SGD", "AdamW", "Elementwise"]

State = dict[str, Any]


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019), decoupled weight decay."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0

    algorithm: ClassVar[str] = "adamw"

    def __post_init__(self) -> None:
        check_at_least_zero(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        form = "expected two numbers in [0, 1), as (0.9, 0.95)"
        if not isinstance(self.betas, Sequence) or not all(isinstance(b, Real) for b in self.betas):
            raise TypeError(f"betas={self.betas!r}: {form}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: {form}")

    @staticmethod
    def new_state(p: Tensor) -> State:
        """The initial state of ``torch.optim.AdamW(fused=True)``."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=p.device),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }

    @staticmethod
    def update(
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[State],
        found_inf: Tensor | None = None,
    ) -> None:
        """One step of every parameter, or no step at all if ``found_inf`` is one."""
        beta1, beta2 = group["betas"]
        # OneCycleLR and CyclicLR cycle "momentum" in every group of an optimizer whose default it is,
        # where they would cycle β₁ of torch's own AdamW.
        beta1 = group.get("momentum", beta1)
        adamw(
            params,
            grads,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=_has_fused(params[0]),
            found_inf=found_inf,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


@dataclass(frozen=True)
class SGD:
    """SGD with (Nesterov) momentum; its weight decay is torch's, added to the gradient."""

    lr: float = 1e-2
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0

    algorithm: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        check_at_least_zero(lr=self.lr, weight_decay=self.weight_decay)
        check_bool(nesterov=self.nesterov)
        if not isinstance(self.momentum, Real):
            raise TypeError(f"momentum={self.momentum!r}: expected a number in [0, 1), as 0.9")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum={self.momentum}: expected 0 ≤ momentum < 1, as 0.9")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs momentum > 0; set nesterov=False for plain SGD")

    @staticmethod
    def new_state(p: Tensor) -> State:
        """A zero buffer, from which the first step is torch's; a skipped step leaves it zero."""
        return {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format)}

    @staticmethod
    def update(
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[State],
        found_inf: Tensor | None = None,
    ) -> None:
        """One step of every parameter, or no step at all if ``found_inf`` is one."""
        sgd(
            params,
            grads,
            [state["momentum_buffer"] for state in states],
            fused=_has_fused(params[0]),
            found_inf=found_inf,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
        )


Elementwise = AdamW | SGD


def group_of(rule: Elementwise) -> dict[str, Any]:
    """The hyperparameters of ``rule`` as a parameter group holds them."""
    return {"algorithm": rule.algorithm, **asdict(rule)}


def _has_fused(p: Tensor) -> bool:
    return p.device.type in ("cpu", "cuda")


def check_at_least_zero(**values: float) -> None:
    """Raise for the first value that is not a finite number ≥ 0."""
    for name, value in values.items():
        if not isinstance(value, Real):
            raise TypeError(f"{name}={value!r}: expected a finite number ≥ 0")
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: expected a finite number ≥ 0")


def check_bool(**values: bool) -> None:
    """Raise for the first value that is neither True nor False: ``"no"`` would count as True."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name}={value!r}: expected True or False")
