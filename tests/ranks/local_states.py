"""When a step looks for parts that another plan has left in the state of experts.

main returns what each rank saw. Five experts are on four ranks, of which the last has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tests.ranks.faults import EXPERTS, WARM, given
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import polarstep as ps

PLACED = {"rows cut": Shard(1), "columns cut": Shard(2), "copies": Replicate()}


@contextmanager
def placements_read() -> Iterator[list[int]]:
    """The ids of the tensors whose placements are read from here on."""
    found: list[int] = []
    known = DTensor.placements

    def noted(X: DTensor) -> Any:
        found.append(id(X))
        return known.fget(X)  # type: ignore[attr-defined]

    DTensor.placements = property(noted)  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        DTensor.placements = known  # type: ignore[method-assign]


class Stacks:
    """Stacks of experts that are cut between experts, each in a group of its own, and their twins."""

    def __init__(self, mesh: Any, count: int = 2) -> None:
        self.mesh = mesh
        starts = [given(f"experts {i}", EXPERTS, 0) for i in range(count)]
        self.params = [nn.Parameter(distribute_tensor(X, mesh, [Shard(0)])) for X in starts]
        self.twins = [nn.Parameter(X.clone()) for X in starts]
        self.ours, self.one = (
            ps.Muon([{"params": [p]} for p in params], lr=0.1, polar=WARM)
            for params in (self.params, self.twins)
        )
        self.number = 0

    def go(self, *, without: int | None = None) -> int:
        """A step; how often it read the placements of a tensor in the state."""
        self.number += 1
        for i, (p, q) in enumerate(zip(self.params, self.twins, strict=True)):
            q.grad = None if i == without else given(f"gradient {i}", EXPERTS, self.number)
            p.grad = None if i == without else distribute_tensor(q.grad, self.mesh, [Shard(0)])
        with placements_read() as read:
            self.ours.step()
        self.one.step()
        return sum(read.count(id(X)) for its in self.ours.state.values() for X in its.values())

    def put(self, index: int, placement: Any) -> None:
        """Place the warm start of a stack otherwise, as another plan or a checkpoint does."""
        its = self.ours.state[self.params[index]]
        its["basis"] = its["basis"].redistribute(placements=[placement])

    def off(self) -> float:
        pairs = list(zip(self.params, self.twins, strict=True))
        starts = [
            (self.ours.state[p]["basis"].full_tensor(), self.one.state[q]["basis"])
            for p, q in pairs
        ]
        ends = [(p.full_tensor(), q) for p, q in pairs]
        return max(float((a - b).detach().abs().max()) for a, b in (*starts, *ends))


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, Any] = {}
    stacks = Stacks(mesh)
    found["first steps"] = [stacks.go() for _ in range(2)]
    found["steps alike"] = [stacks.go() for _ in range(3)]
    found["without a gradient"] = [stacks.go(without=1), stacks.go(), stacks.go()][-1:]
    for name, placement in PLACED.items():
        stacks.put(0, placement)
        found[name] = [stacks.go(), stacks.go(), stacks.go()]
    found["off"] = stacks.off()

    # Another plan for the first stack, at the very step that makes the state of the second.
    stacks = Stacks(mesh)
    stacks.go(without=1)
    stacks.ours.param_groups[0]["plan"] = "owner"
    stacks.go()
    stacks.go()
    stacks.ours.param_groups[0]["plan"] = "local"
    stacks.go()
    found["beside another plan"] = stacks.off()
    stacks.go()
    found["alike after another plan"] = stacks.go()

    # A checkpoint in which a carry lies as another plan leaves it.
    stacks.put(1, Shard(2))
    stacks.ours.load_state_dict(stacks.ours.state_dict())
    stacks.go()
    found["loaded"] = stacks.off()

    # A group that is added brings a stack whose state comes later.
    X = given("late", EXPERTS, 0)
    stacks.params.append(nn.Parameter(distribute_tensor(X, mesh, [Shard(0)])))
    stacks.twins.append(nn.Parameter(X.clone()))
    stacks.ours.add_param_group({"params": stacks.params[-1:], "plan": "owner"})
    stacks.one.add_param_group({"params": stacks.twins[-1:]})
    stacks.go(without=2)
    stacks.go()
    stacks.ours.param_groups[-1]["plan"] = "local"
    stacks.go()
    found["added"] = stacks.off()
    torch.distributed.barrier()
    return found
