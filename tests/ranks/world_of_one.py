"""FSDP2 in a world of one rank: what a step does to a ``DTensor``, and changes of its state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import polarstep as ps
from polarstep import rng
from polarstep.maps import Warm

SHAPES = ((12, 20), (12, 20), (16, 9))
MAPS: dict[str, dict[str, Any]] = {
    "full space": {},
    "warm": {"polar": ps.LowRank(4, 2, 0, sketch=Warm(), always_sketch=True)},
    "8 bits": {"momentum_dtype": torch.int8},
}


class Pair:
    """The same layers twice: in plain parameters, and sharded over one rank."""

    def __init__(self, **options: Any) -> None:
        self.plain, self.sharded = (
            nn.Sequential(*[nn.Linear(n, m, bias=False) for m, n in SHAPES]).double()
            for _ in range(2)
        )
        self.sharded.load_state_dict(self.plain.state_dict())
        fully_shard(self.sharded)
        self.optimizers = [
            ps.Muon(model.parameters(), lr=0.1, **options) for model in (self.plain, self.sharded)
        ]
        self.number = 0

    def params(self) -> list[tuple[Tensor, Any]]:
        return list(zip(self.plain.parameters(), self.sharded.parameters(), strict=True))

    def go(self, steps: int, around: Callable[[Callable[[], None]], None] | None = None) -> None:
        for _ in range(steps):
            for i, (p, q) in enumerate(self.params()):
                g = rng.generator("gradient", i, self.number)
                p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype)
                q.grad = distribute_tensor(p.grad, q.device_mesh, q.placements)
            self.number += 1
            self.optimizers[0].step()
            step = self.optimizers[1].step
            step() if around is None else around(step)

    def off(self) -> float:
        return max(float((q.full_tensor() - p).abs().max()) for p, q in self.params())


def dispatched(name: str) -> list[str]:
    """What the third step of a world of one asks of its ``DTensor`` objects: operations, gathering."""
    pair, asked = Pair(**MAPS[name]), []

    def noting(step: Callable[[], None]) -> None:
        dispatch = DTensor.__torch_dispatch__

        def noted(kind: Any, func: Any, *arguments: Any, **options: Any) -> Any:
            asked.append(str(func))
            return dispatch(func, *arguments, **options)

        to_local = DTensor.to_local
        DTensor.__torch_dispatch__ = classmethod(noted)  # type: ignore[method-assign, assignment]
        DTensor.to_local = lambda X, **_: asked.append("to_local") or to_local(X)  # type: ignore[method-assign, func-returns-value]
        try:
            step()
        finally:
            DTensor.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
            DTensor.to_local = to_local  # type: ignore[method-assign]

    pair.go(2)
    pair.go(1, noting)
    return asked


def replaced(what: str) -> tuple[float, bool]:
    """How far the pair is apart when the state of both was changed from outside between two steps."""
    pair = Pair(**MAPS["warm"])
    pair.go(2)
    for p, q in pair.params()[:2]:
        mine, theirs = (o.state[x] for o, x in zip(pair.optimizers, (p, q), strict=True))
        if what == "momentum":
            mine["momentum_buffer"] = 2 - mine["momentum_buffer"]
            theirs["momentum_buffer"] = 2 - theirs["momentum_buffer"]
        elif what == "carry":
            del mine["basis"], theirs["basis"]
        elif what == "everything":
            pair.optimizers[0].state[p], pair.optimizers[1].state[q] = {}, {}
        elif what == "memory":
            q._local_tensor = q._local_tensor.clone()
    p, q = pair.params()[0]
    last = pair.params()[2][1]
    pair.go(1)
    first = pair.off()
    if what == "gradient":  # a parameter that rests for a step keeps what it has
        p.grad = q.grad = None
        for optimizer in pair.optimizers:
            optimizer.step()
    pair.go(2)
    is_sharded = isinstance(pair.optimizers[1].state[last]["momentum_buffer"], DTensor)
    return max(first, pair.off()), is_sharded


CHANGES = ("nothing", "momentum", "carry", "everything", "memory", "gradient")


def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    found: dict[Any, Any] = {("asked", name): dispatched(name) for name in MAPS}
    for name, options in MAPS.items():
        pair = Pair(**options)
        pair.go(3)
        found["off", name] = pair.off()
    return found | {("replaced", what): replaced(what) for what in CHANGES}
