"""Full space with a weight that is kept for several steps: for measurements.

In the Gram form T = W·M/‖M‖_F, where W ≈ (MMᵀ)^−½·‖M‖_F is a polynomial in MMᵀ and most of the cost. M
moves slowly from step to step, so W may be made at every k-th step, with one product in between. What
speaks against it: W lifts the small singular values of the M it was made for, and those directions turn
fast. In between T has singular values far above one, unless something holds them back:

    plain    T = W·M/‖M‖_F
    capped   the same over its own ‖T‖_op where that is above one

:class:`KeptWeight` makes W at every step and chooses on the device by a carried counter, so that a CUDA
graph can replay it. Its quality is that of the idea; its time is not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

import polarstep as ps
from polarstep.maps import Draw, MapState, Polar, PolarMap
from polarstep.maps.base import Traits, wide

__all__ = ["Form", "KeptWeight", "weight_of"]

Form = Literal["plain", "capped"]


@dataclass(frozen=True)
class KeptWeight(PolarMap):
    """A new W, then ``every`` − 1 steps with the same one, and so on.

    Args:
        every: 2 for a new W at every second step.
        form: what holds T in between.
        inner: the map in full space whose polynomials make W.
    """

    every: int = 2
    form: Form = "plain"
    inner: ps.NewtonSchulz = field(default_factory=lambda: ps.NewtonSchulz(5, "polar-express"))

    @property
    def traits(self) -> Traits:
        """Carried are W, and the number of steps since it was made."""
        return Traits(carries=("weight", "turn"))

    def resumes(self, carry: MapState, m: int, n: int) -> bool:
        """Whether the carry has a W for these matrices."""
        rows = min(m, n)
        return {"weight", "turn"} <= carry.keys() and carry["weight"].shape[-2:] == (rows, rows)

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        """T with the W of this step or of an earlier one, by the turn of each matrix."""
        X = wide(M).float()
        norm = torch.linalg.matrix_norm(X, keepdim=True)
        X = X / torch.where(norm > 0, norm, 1)
        W = weight_of(X, self.inner)
        turn = torch.zeros(len(X), 1, device=X.device)
        if self.resumes(carry, *M.shape[-2:]):
            turn = carry["turn"].float()
            W = torch.where(turn[..., None] == 0, W, carry["weight"].float())
        T = W @ X
        if self.form == "capped":
            T = T / (_operator_norm(T)).clamp_min(1)
        kept = {"weight": W.to(M.dtype), "turn": ((turn + 1) % self.every).to(M.dtype)}
        if draw.finite is not None and carry:
            moves = draw.finite.reshape(-1, *[1] * 2) != 0
            kept["weight"] = torch.where(moves, kept["weight"], carry["weight"].to(M.dtype))
            kept["turn"] = torch.where(moves[..., 0], kept["turn"], carry["turn"].to(M.dtype))
        return Polar(M, T if M.shape[-2] <= M.shape[-1] else T.mT), MapState(kept)

    def flops(self, m: int, n: int) -> int:
        """The mean over ``every`` steps."""
        return (self.inner.flops(m, n) + (self.every - 1) * 2 * min(m, n) * m * n) // self.every

    def describe(self, m: int, n: int, device: torch.device | None = None) -> str:
        """The map in full space, and how long W is kept."""
        return f"{self.inner.describe(m, n, device)}, W kept {self.every} steps, {self.form}"


def weight_of(X: Tensor, inner: ps.NewtonSchulz) -> Tensor:
    """W with W·X = T(X), for wide ``X`` of Frobenius norm one: the polynomials, in the Gram matrix."""
    polynomials = inner.polynomials
    eye = torch.eye(X.shape[-2], device=X.device, dtype=X.dtype)
    S, W = X @ X.mT, eye.expand(len(X), -1, -1)
    for coefficients in polynomials:
        P = torch.zeros_like(S)
        for coefficient in reversed(coefficients):  # Horner in S
            P = P @ S + coefficient * eye
        W, S = P @ W, P @ S @ P
    return W


def _operator_norm(T: Tensor, rounds: int = 8) -> Tensor:
    """‖T‖_op (batch, 1, 1) by power iteration from fixed vectors, a little too small."""
    generator = torch.Generator().manual_seed(0)
    V = torch.randn(T.shape[-2], 4, generator=generator).to(T)
    V = V.expand(len(T), -1, -1)
    for _ in range(rounds):
        V = T @ (T.mT @ V)
        V = V / torch.linalg.vector_norm(V, dim=-2, keepdim=True).clamp_min(1e-30)
    return torch.linalg.vector_norm(T.mT @ V, dim=-2, keepdim=True).amax(-1, keepdim=True)
