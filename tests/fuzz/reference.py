"""Muon, AdamW and SGD in float64, one matrix at a time, written from the formulas alone.

Sketched maps get the package's random numbers, which are a documented function of seed, shape and step,
and run Algorithm 1 with QR and SVD. Three kinds of maps are taken from the package, one matrix at a
time: :class:`polarstep.Deflated`, whose δ is an estimate of its own; bases made by products, which are
orthonormal only roughly; and sampled columns, which repeat and then leave room for any basis.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from tests.fuzz.maps import reference
from torch import Tensor

from polarstep import Exact, Kaczmarz, LowRank, PolarMap, rng
from polarstep.maps import Draw, MapState, Warm

__all__ = ["Reference"]

SCALES = {
    "none": lambda m, n, rank: 1.0,
    "spectral": lambda m, n, rank: math.sqrt(max(1.0, m / n)),
    "fan-ratio": lambda m, n, rank: math.sqrt(m / n),
    "rms": lambda m, n, rank: 0.2 * math.sqrt(m * n / rank),
}


class Reference:
    """One parameter X of a group, its state, and the steps that its group's algorithm takes."""

    def __init__(self, X: Tensor, options: dict[str, Any]) -> None:
        self.X, self.dtype, self.options = X.detach().double().clone(), X.dtype, options
        self.C = torch.zeros_like(self.X)
        self.second, self.updates = torch.zeros_like(self.X), 0  # AdamW's v and t
        self.known = True  # False once a NaN has come in, or a basis of nothing was kept
        self._memory: dict[int, dict[str, Any]] = {}  # by matrix

    def step(self, G: Tensor | None, lr: float, step: int) -> None:
        """One step; ``step`` counts those of the group."""
        if G is None or (self.options["nonfinite"] == "skip" and not G.isfinite().all()):
            if G is not None and self._remembers():
                self._muon(torch.zeros_like(self.X), lr, step, skipped=True)
            return
        self.known &= bool(G.isfinite().all())
        if not self.known:
            return
        {"muon": self._muon, "adamw": self._adamw, "sgd": self._sgd}[self.options["algorithm"]](
            G.double(), lr, step
        )

    def _remembers(self) -> bool:
        """Whether a map with memory sees a skipped matrix, as zero, before it has seen another."""
        return self.options["algorithm"] == "muon" and not self._memory

    def _muon(self, G: Tensor, lr: float, step: int, skipped: bool = False) -> None:
        beta, decay = self.options["momentum"], self.options["weight_decay"]
        if skipped:
            M = torch.zeros_like(self.X)
        else:
            self.C = beta * self.C + G
            M = beta * self.C + G if self.options["nesterov"] else self.C
        T = [self._factor(i, each, step) for i, each in enumerate(self._matrices(M))]
        if not skipped:
            self.X = (1 - lr * decay) * self.X - lr * self._assembled(T)

    def _matrices(self, M: Tensor) -> list[Tensor]:
        """The matrices of a parameter: a convolution is one, a stack many, a split one several."""
        layout = self.options["layout"]
        if layout == "auto":
            layout = "conv" if M.ndim in (4, 5) else "stack"
        flat = M.reshape(1, len(M), -1) if layout == "conv" else M.reshape(-1, *M.shape[-2:])
        rows = self.options["split_sizes"] or (flat.shape[1],)
        return [part for each in flat for part in torch.split(each, list(rows))]

    def _assembled(self, T: list[Tensor]) -> Tensor:
        sized = [self._scale(i, each.shape) * each for i, each in enumerate(T)]
        return torch.cat(sized).reshape(self.X.shape)

    def _scale(self, place: int, shape: torch.Size) -> float:
        """The factor on lr; for "rms" by max(‖Z‖²_F, ℓ/9), ‖T‖²_F as the package says, or min(m, n)."""
        name = self.options["shape_scale"]  # where a group keeps shape_scale
        return SCALES[name](*shape, self._memory[place].get("squared_norm", min(shape)))

    def _factor(self, place: int, M: Tensor, step: int) -> Tensor:
        """T of one matrix, and T' of a transform."""
        memory = self._memory.setdefault(place, {})
        wide = M.shape[0] <= M.shape[1]
        runs = self.options["polar"].on(*M.shape, M.device)
        if isinstance(runs, Exact):
            U, S, Vh = torch.linalg.svd(M, full_matrices=False)
            T = (U * (1e-13 * S[0] < S)) @ Vh
        elif _has_its_own_formula(runs):
            T = self._low_rank(runs, M if wide else M.mT, M.shape, memory, step)
            T = T if wide else T.mT
        else:
            found = reference(runs, M[None])
            T = self._by_package(runs, M, memory, step) if found is None else found[0]
        transform = self.options["transform"]
        if transform is None:
            return T
        v = (1 - transform.beta2) * T.square().mean(1)
        v = v + transform.beta2 * memory.get("rows", torch.zeros_like(v))
        memory["rows"] = v
        changed = torch.where(v[:, None] > 0, T / v[:, None].sqrt(), 0)
        size = changed.norm()
        return changed * (T.norm() / size) if size > 0 else changed

    def _numbers(self, polar: PolarMap, shape: torch.Size, *key: int) -> Tensor:
        m, n = shape
        generator = rng.generator(self.options["seed"], f"{m}x{n}", *key)
        return polar.numbers(m, n, generator, torch.promote_types(self.dtype, torch.float32))

    def _low_rank(
        self, polar: LowRank, M: Tensor, shape: torch.Size, memory: dict[str, Any], step: int
    ) -> Tensor:
        """Algorithm 1 of wide M: Y = (MMᵀ)^h MΩ, Q = orth(Y), T = Q·inner(QᵀM)."""
        warm = isinstance(polar.sketch, Warm)
        numbers = self._numbers(polar, shape, *(() if warm else (step,)))
        products = int(2 * polar.power)
        first = M if products % 2 == 0 else M.mT
        if warm and "Omega" in memory:
            products, Y = 0, M @ memory["Omega"]
        else:
            Y = first @ numbers.double()
        for _ in range(products):
            first = first.mT
            Y = first @ _basis(Y)
        Q = _basis(Y)
        Z = reference(polar.inner, (Q.mT @ M)[None])
        assert Z is not None
        memory["squared_norm"] = max(Z[0].square().sum().item(), polar.width / 9)
        if warm:
            noise = self._numbers(polar, shape).double() / math.sqrt(M.shape[1])
            memory["Omega"] = Z[0].mT + polar.sketch.noise * noise
        return Q @ Z[0]

    def _by_package(self, polar: PolarMap, M: Tensor, memory: dict[str, Any], step: int) -> Tensor:
        carry = memory.get("carry", MapState())
        key = {"never": None, "once": (), "every step": (step,)}[polar.traits.draws]
        numbers = None if key is None else self._numbers(polar, M.shape, *key)
        found, left = polar.step(M[None].to(self.dtype), MapState(carry), Draw(numbers))
        if polar.traits.carries:
            memory["carry"] = MapState({k: v.to(self.dtype).clone() for k, v in left.items()})
        if found.squared_norm is not None:
            memory["squared_norm"] = found.squared_norm().item() or 1.0
        return found.dense[0].double()

    def _adamw(self, G: Tensor, lr: float, step: int) -> None:
        (beta1, beta2), eps = self.options["betas"], self.options["eps"]
        self.updates += 1
        self.X = (1 - lr * self.options["weight_decay"]) * self.X
        self.C = beta1 * self.C + (1 - beta1) * G
        self.second = beta2 * self.second + (1 - beta2) * G.square()
        mean, root = 1 - beta1**self.updates, math.sqrt(1 - beta2**self.updates)
        self.X = self.X - lr * (self.C / mean) / (self.second.sqrt() / root + eps)

    def _sgd(self, G: Tensor, lr: float, step: int) -> None:
        beta = self.options["momentum"]
        G = G + self.options["weight_decay"] * self.X
        self.C = beta * self.C + G
        self.X = self.X - lr * (G + beta * self.C if self.options["nesterov"] else self.C)


def _has_its_own_formula(polar: PolarMap) -> bool:
    sketched = isinstance(polar, LowRank) and not isinstance(polar.sketch, Kaczmarz)
    return sketched and polar.orth != "products"


def _basis(Y: Tensor) -> Tensor:
    """Q of Y = QR with R's diagonal positive: a warm start adds noise to Z = QᵀT in this basis."""
    Q, R = torch.linalg.qr(Y)
    return torch.where(R.diagonal() < 0, -Q, Q)
