"""What the phases of a step hand to each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from polarstep.matrix import MatrixView
from polarstep.optim.groups import Group

__all__ = ["Place", "Placed", "Product", "State", "Work"]

# What an optimizer keeps per parameter, as torch has it.
State = dict[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Product:
    """T = LR of a block, not multiplied out: X can take it in as a product, and T is never stored."""

    L: Tensor  # (batch, m, ℓ)
    R: Tensor  # (batch, ℓ, n)


@dataclass
class Work:
    """What one step does to one parameter group."""

    group: Group
    names: list[str]
    params: list[Tensor]
    grads: list[Tensor]
    finite: list[Tensor] | None  # a flag on the device per parameter, where nonfinite="skip"
    views: list[MatrixView] = field(default_factory=list)
    T: list[list[Tensor | Product]] = field(default_factory=list)  # per parameter and block

    def select(self, indices: list[int]) -> Work:
        """The same for some of the parameters, before any phase has run."""
        return Work(
            self.group,
            [self.names[i] for i in indices],
            [self.params[i] for i in indices],
            [self.grads[i] for i in indices],
            None if self.finite is None else [self.finite[i] for i in indices],
            [self.views[i] for i in indices],
        )


# A block in a bucket: its work, the indices of parameter and block; and with the M of the block.
Place = tuple[Work, int, int]
Placed = tuple[Work, int, int, Tensor]
