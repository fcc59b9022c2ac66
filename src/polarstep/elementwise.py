"""AdamW and SGD for the parameters that are not hidden matrices.

The arithmetic is torch's own (``torch.optim.adamw.adamw``, ``torch.optim.sgd.sgd``, fused where the
device has it), with torch's names for the state, so that a checkpoint looks like one of
``torch.optim.AdamW``. One thing differs: the state of a float16 parameter is kept in float32
(:func:`polarstep.state.momentum_dtype`). :mod:`polarstep.elementwise_rule` says
how to write another rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from polarstep.checked_values import check_at_least_zero, check_bool, check_fraction, is_number
from polarstep.elementwise_rule import Elementwise, ParameterState

__all__ = ["SGD", "AdamW", "counter_device"]


WITHOUT_DECAY = "0 is without weight decay"


@dataclass(frozen=True)
class AdamW(Elementwise):
    """AdamW (Loshchilov and Hutter 2019) for the parameters that are not Muon's.

    This is a set of options, which :func:`polarstep.muon_for` takes, as ``others=AdamW(lr=1e-3)``. The
    step is torch's own, fused where the device has a fused step.

    Args:
        lr: the learning rate. By default :func:`polarstep.muon_for` finds it from its own ``lr`` and
            from the size of the entries (:mod:`polarstep.rates`); a group of a plain
            :class:`polarstep.Muon` gives its own.
        betas: β₁ and β₂, in [0, 1). torch's default is (0.9, 0.999), with which rows of an embedding
            that are rarely met move seven times as far.
        eps: ε, added to the root of the second moment.
        weight_decay: decoupled weight decay. torch's default is 0.01.
    """

    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0

    algorithm: ClassVar[str] = "adamw"
    buffers: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    _counters: ClassVar[tuple[str, ...]] = ("step",)

    def __post_init__(self) -> None:
        _refuse_tensor(self.lr)
        if self.lr is not None:
            check_at_least_zero("lr", self.lr, "without it, muon_for finds one")
        check_at_least_zero("eps", self.eps, "1e-8 is the default")
        check_at_least_zero("weight_decay", self.weight_decay, WITHOUT_DECAY)
        form = "expected two numbers in [0, 1), as (0.9, 0.95)"
        if not isinstance(self.betas, Sequence) or not all(map(is_number, self.betas)):
            raise TypeError(f"betas={self.betas!r}: {form}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: {form}")

    @staticmethod
    def new_state(p: Tensor) -> ParameterState:
        """The state that ``torch.optim.AdamW`` starts with, fused where the device has a fused step."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=counter_device(p)),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }

    @staticmethod
    def update(
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[ParameterState],
        found_inf: Tensor | None = None,
    ) -> None:
        """One step of every parameter, or no step at all if ``found_inf`` is one."""
        fused = _has_fused(params[0])
        if found_inf is not None and not fused:  # only the fused rule knows found_inf
            if bool(found_inf):
                return
            found_inf = None
        beta1, beta2 = group["betas"]
        # OneCycleLR and CyclicLR would cycle β₁ of torch's own AdamW. An optimizer with a default
        # "momentum" gets that key cycled in every group, beside a key "base_momentum". A group without
        # "base_momentum" keeps its β₁: a loop may have written Muon's momentum to all groups.
        if "base_momentum" in group:
            beta1 = group.get("momentum", beta1)
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        with _side_by_side(params, grads, means, squares) as (p, g, m, v):
            adamw(
                p,
                g,
                m,
                v,
                [],
                [state["step"] for state in states],
                fused=fused,
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
class SGD(Elementwise):
    """SGD with momentum for the parameters that are not Muon's.

    This is a set of options, which :func:`polarstep.muon_for` takes, as ``others=SGD(lr=0.1)``. The step
    is torch's own, fused where the device has a fused step.

    Args:
        lr: the learning rate.
        momentum: β in [0, 1).
        nesterov: Nesterov or Polyak momentum; must be ``False`` if ``momentum`` is zero.
        weight_decay: λ; as in torch, λX is added to the gradient.
    """

    lr: float = 1e-2
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0

    algorithm: ClassVar[str] = "sgd"
    buffers: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __post_init__(self) -> None:
        _refuse_tensor(self.lr)
        check_at_least_zero("lr", self.lr, "1e-2 is the default")
        check_at_least_zero("weight_decay", self.weight_decay, WITHOUT_DECAY)
        check_bool("nesterov", self.nesterov, "False is Polyak's momentum")
        check_fraction("momentum", self.momentum, "0.9 is the default")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs momentum > 0; set nesterov=False for plain SGD")

    @staticmethod
    def new_state(p: Tensor) -> ParameterState:
        """A buffer of zeros. The first step is torch's, which starts without a buffer."""
        return {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format)}

    @staticmethod
    def update(
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[ParameterState],
        found_inf: Tensor | None = None,
    ) -> None:
        """One step of every parameter, or no step at all if ``found_inf`` is one."""
        # On a CPU torch's fused SGD leaves most 16-bit parameters as they are, and writes something else
        # than the momentum to their buffers (torch 2.13; pytorch/pytorch#191763).
        in_16_bits = any(p.device.type == "cpu" and p.dtype.itemsize < 4 for p in params)
        fused = _has_fused(params[0]) and not in_16_bits
        if found_inf is not None and not fused:  # only the fused rule knows found_inf
            if bool(found_inf):
                return
            found_inf = None
        buffers = [state["momentum_buffer"] for state in states]
        with _side_by_side(params, grads, buffers) as (p, g, m):
            sgd(
                p,
                g,
                m,  # type: ignore[arg-type]  # list[Tensor | None] to torch
                fused=fused,
                found_inf=found_inf,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
            )


@contextmanager
def _side_by_side(
    params: list[Tensor], grads: list[Tensor], *states: list[Tensor]
) -> Iterator[list[list[Tensor]]]:
    """The tensors as torch's fused rules need them: the k-th numbers in memory belong together.

    The rules walk through memory and do not look at strides. A parameter may have gaps in memory, or a
    gradient in another order: a CPU would then update the wrong entries, and a GPU refuses. Such a
    parameter is updated in a contiguous copy.
    """
    aligned = [list(params), list(grads), *map(list, states)]
    copied = []
    for i, p in enumerate(params):
        beside = [each[i] for each in aligned]
        if all(X.is_contiguous() for X in beside):
            continue
        without_gaps = torch.empty_like(p, device="meta").stride()
        if any(X.stride() != without_gaps for X in beside):
            copied.append(i)
            for each in aligned:
                each[i] = each[i].contiguous()
    yield aligned
    for i in copied:
        for written, held in zip((params, *states), (aligned[0], *aligned[2:]), strict=True):
            if held[i] is not written[i]:
                written[i].copy_(held[i])


def counter_device(p: Tensor) -> torch.device:
    """Where AdamW's counter of steps lies: with ``p`` for a fused step, else on the CPU, as in torch.

    A step that is not fused reads the counter; on a GPU that would wait for the device.
    """
    return p.device if _has_fused(p) else torch.device("cpu")


def _has_fused(p: Tensor) -> bool:
    return p.device.type in ("cpu", "cuda")


def _refuse_tensor(lr: object) -> None:
    """Raise for a learning rate in a tensor: rules are compared, and tensors do not compare as one."""
    if isinstance(lr, Tensor):
        raise TypeError(
            "lr is a tensor: expected a number; a parameter group may hold a tensor, so make the "
            'optimizer with a number and then set group["lr"] = lr in optimizer.param_groups'
        )
