"""A deflated map whose polynomial step runs at every second optimizer step only: for measurements.

The polynomial lifts the small singular values of the rest R = M − QB, and is most of the cost. Between
two such steps the head QZ is made as always, and the rest gets one of three cheap forms:

    scaled   T = QZ + R/(δ·r)    r ≥ 1 is ‖X₀‖_op of the last lifted step: ‖T‖_op is near one
    sized    T = QZ + 2R/δ       ‖T‖_F is near that of a lifted step, ‖T‖_op is two to three
    head     T = QZ              the rest waits for the next lifted step

δ is twice the root mean square of R's singular values, which every step knows for nothing. So ``scaled``
carries one number for each matrix, and reads M once more than a low-rank step, in the update.

:class:`EverySecond` computes both forms at every step and chooses on the device by a carried counter. A
CUDA graph can replay it, and its quality is that of the idea; its time is not. The time would be the
mean of a lifted step and of :class:`Between`, which ``step_cost.py`` has rows for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

import polarstep as ps
from polarstep.maps import Draw, MapState, Polar
from polarstep.maps.base import Containing, Factors, Traits, wide
from polarstep.maps.deflated import FACTOR, _precision, rest_size
from polarstep.ops import ops_of
from polarstep.ops.lazy import HeadPlusRest

__all__ = ["Between", "EverySecond", "Form"]

Form = Literal["scaled", "sized", "head"]


@dataclass(frozen=True)
class Between(Containing):
    """The cheap step alone, at every step.

    Args:
        deflated: the map whose head is taken.
        form: what happens to the rest.
    """

    deflated: ps.Deflated
    form: Form = "scaled"

    @property
    def contained(self) -> ps.Deflated:
        """The deflated map."""
        return self.deflated

    @property
    def traits(self) -> Traits:
        """What the head carries, and r."""
        its = self.deflated.traits
        return replace(its, carries=(*its.carries, "reach"))

    def on(self, m: int, n: int, device: torch.device) -> ps.PolarMap:
        """The full-space map where the deflated map takes it."""
        inside = self.deflated.on(m, n, device)
        return self if inside is self.deflated else inside

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """The head and the rest, not multiplied out."""
        A = wide(M)
        polar, left = self.deflated.head.step(A, carry, draw)
        reach = _number(carry, "reach", 1.0, A)
        left = MapState(left | {"reach": reach.to(M.dtype)})
        assert polar.factors is not None
        if self.form == "head":
            return Polar(M, factors=polar.factors), left
        squares = draw.squares if polar.M is A else None
        flat, _ = between(polar.M, polar.factors, self.form, reach, squares)
        T = flat.multiplied_out()
        return Polar(M, T if M.shape[-2] <= M.shape[-1] else T.mT), left

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """The head, and the form of the rest."""
        return f"{self.deflated.head.describe(m, n, device)}; rest: {self.form}"


@dataclass(frozen=True)
class EverySecond(Between):
    """A lifted step of ``deflated``, then ``every`` − 1 cheap ones, and so on.

    Args:
        deflated: a map with polynomial steps.
        form: what happens to the rest between them.
        every: 2 for every second step.
    """

    every: int = 2

    @property
    def traits(self) -> Traits:
        """What the cheap step carries, and the number of steps since the last lifted one."""
        its = super().traits
        return replace(its, carries=(*its.carries, "turn"))

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """Both forms of T; matrices take the lifted one where their turn is zero."""
        A, ops = wide(M), ops_of(M.device)
        polar, left = self.deflated.head.step(A, carry, draw)
        factors = polar.factors
        assert factors is not None
        squares = draw.squares if polar.M is A else None
        A = polar.M
        turn = _number(carry, "turn", 0.0, A)
        reach = _number(carry, "reach", 1.0, A)
        lifts = (turn == 0)[..., None]
        lifted, _ = self.deflated._lifted(A, factors, ops, squares)
        high = lifted if isinstance(lifted, Tensor) else lifted.multiplied_out()
        if self.form == "head":
            low = factors.Q @ factors.Z
        else:
            flat, inverse = between(A, factors, self.form, reach, squares)
            low = flat.multiplied_out()
            reach = torch.where(lifts[..., 0], _reach(A, factors, inverse), reach)
        T = torch.where(lifts, high, low.to(high.dtype))
        left = MapState(
            left | {"reach": reach.to(M.dtype), "turn": ((turn + 1) % self.every).to(M.dtype)}
        )
        return Polar(M, T if M.shape[-2] <= M.shape[-1] else T.mT), left

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """The deflated map, and how often it lifts the rest."""
        lifted = self.deflated.describe(m, n, device)
        return f"{lifted}, at every {self.every}. step; else rest: {self.form}"


def between(
    A: Tensor, head: Factors, form: Form, reach: Tensor, squares: Tensor | None
) -> tuple[HeadPlusRest, Tensor]:
    """T of a cheap step on wide ``A``, not multiplied out, and 1/δ; ``reach`` is r."""
    ops = ops_of(A.device)
    size = rest_size(A.shape[-2], head.width, _precision(A, head))
    inverse = ops.inverse_rest_size(A, head.projected, *size, squares)
    factor = FACTOR if form == "sized" else 1 / reach.clamp_min(1)[..., None]
    dual = ops.dual(head.as_computed)
    return ops.head_plus_rest(A, dual, inverse * factor), inverse


def _reach(A: Tensor, head: Factors, inverse: Tensor) -> Tensor:
    """‖X₀‖_op (batch, 1), as a lifted step estimates it; 1 where that is not known."""
    ops = ops_of(A.device)
    X = ops.head_plus_rest(A, ops.dual(head.as_computed), inverse).multiplied_out()
    s = ops.scale_to_one(ops.symmetric(X, X), 1.0)
    return torch.where(s > 0, 1 / torch.where(s > 0, s, 1), 1)[..., 0].float()


def _number(carry: MapState, name: str, first: float, A: Tensor) -> Tensor:
    """A number for each matrix (batch, 1) in float32, from the carry or at the first step."""
    if name in carry:
        return carry[name].float()
    return torch.full((len(A), 1), first, device=A.device)
