"""Train matrices that have owners, with replayed graphs and without, and compare bit for bit.

On a GPU the graphs are CUDA's. Without a GPU a stand-in takes their place. It repeats the launches that
were captured, on the tensors that they were captured with, as a CUDA graph does.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import Parameter

import polarstep as ps
from polarstep.engines.graphs import Replays
from polarstep.maps import Draw, MapState, Polar
from polarstep.ranks import owned_graph
from polarstep.routing import routes

__all__ = ["BUCKETS", "CASES", "EVENTS", "MAPS", "STEPS", "Waiting", "main"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 6
# Each rank of two owns matrices of both shapes. On a GPU the larger ones have a whitened start.
LARGE = (256, 192) if DEVICE == "cuda" else (64, 48)
SHAPES = ((32, 48), (32, 48), (32, 48), LARGE, LARGE)
BUCKETS = len(set(SHAPES))
SKETCH = {"always_sketch": True, "inner": ps.NewtonSchulz(4, "polar-express-sketch")}
MAPS: dict[str, dict[str, Any]] = {
    "full space": {"weight_decay": 0.1},
    "fresh": {"polar": ps.LowRank(12, 4, **SKETCH)},
    "warm": {"polar": ps.LowRank(12, 4, sketch=ps.Warm(), **SKETCH)},
    "deflated": {
        "polar": ps.Deflated(ps.LowRank(12, 4, **SKETCH), ps.NewtonSchulz(1, "flat")),
        "shape_scale": "rms",
    },
    "rows, with flags": {"transform": ps.NormalizedRows(), "nonfinite": "skip"},
}


class Waiting(ps.NewtonSchulz):
    """A map that reads a number from the device, which no graph can do."""

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        assert float(M.abs().amax()) > 0
        return super().step(M, carry, draw)


class Again:
    """In place of a CUDA graph: launches again what was captured."""

    def __init__(self, launch: Callable[[], object]) -> None:
        self._launch = launch

    def replay(self) -> None:
        self._launch()


@contextmanager
def counted_replays() -> Iterator[list[int]]:
    """A list with a number for each replay of a graph."""
    found: list[int] = []
    kind: Any = torch.cuda.CUDAGraph if DEVICE == "cuda" else Again
    replay = kind.replay

    def counted(graph: Any) -> None:
        found.append(len(found))
        replay(graph)

    with patch.object(kind, "replay", counted):
        yield found


@contextmanager
def stand_ins() -> Iterator[None]:
    """Graphs without a GPU, by the same rules as on a GPU."""
    if DEVICE == "cuda":
        yield
        return
    can_capture = Replays._can_capture

    def on_gpu(self: Replays, kind: Any, devices: Any) -> bool:
        return can_capture(self, kind, [torch.device("cuda")])

    def capture(self: Replays, kind: Any, launch: Any, devices: Any, beside: Any) -> None:
        self.graphs[kind] = [Again(lambda: launch(devices[0]))]  # type: ignore[list-item]

    with (
        patch.object(Replays, "_can_capture", on_gpu),
        patch.object(Replays, "_capture", capture),
        patch.object(owned_graph, "can_replay", lambda group, device: group["fused"]),
        patch.object(routes, "can_replay", lambda group, device: group["fused"]),
    ):
        yield


def matrix(i: int, step: int) -> Tensor:
    """Parameter ``i`` at step -1, and its gradient at others."""
    g = torch.Generator().manual_seed(100 * step + i + 100)
    return torch.randn(SHAPES[i], generator=g).to(DEVICE)


def step(params: list[Any], optimizer: ps.Muon, laid: Any, at: int) -> None:
    for i, p in enumerate(params):
        p.grad = laid(matrix(i, at))
    optimizer.step()


def nothing(params: list[Any], optimizer: ps.Muon, laid: Any) -> ps.Muon:
    return optimizer


def without_a_gradient(params: list[Any], optimizer: ps.Muon, laid: Any) -> ps.Muon:
    """Two steps in which a parameter has no gradient on any rank."""
    for at in (91, 92):
        for i, p in enumerate(params):
            p.grad = laid(matrix(i, at)) if i else None
        optimizer.step()
    return optimizer


def rewound(params: list[Any], optimizer: ps.Muon, laid: Any) -> ps.Muon:
    """The state of two steps ago, loaded into the optimizer that has graphs."""
    before = optimizer.state_dict()
    before["state"] = {
        key: {name: X.clone() if isinstance(X, Tensor) else X for name, X in entries.items()}
        for key, entries in before["state"].items()
    }
    for at in (91, 92):
        step(params, optimizer, laid, at)
    optimizer.load_state_dict(before)
    return optimizer


def resumed(params: list[Any], optimizer: ps.Muon, laid: Any) -> ps.Muon:
    """A new optimizer with the state of the old one."""
    made = ps.Muon(
        params,
        plan=optimizer._distribution.plan,
        process_group=optimizer._distribution.process_group,
        **MAPS["full space"],  # the checkpoint has the options
    )
    made.load_state_dict(optimizer.state_dict())
    return made


def retuned(params: list[Any], optimizer: ps.Muon, laid: Any) -> ps.Muon:
    """Another learning rate, and another map for all matrices."""
    optimizer.param_groups[0].update(lr=0.05, polar=ps.NewtonSchulz(3, "quintic"))
    return optimizer


def other_flags(params: list[Any], optimizer: ps.Muon, laid: Any) -> ps.Muon:
    """From now on there are flags of gradients that are finite, or there are none any more."""
    group = optimizer.param_groups[0]
    group["nonfinite"] = "propagate" if group["nonfinite"] == "skip" else "skip"
    return optimizer


def with_a_bad_gradient(params: list[Any], optimizer: ps.Muon, laid: Any) -> ps.Muon:
    """A step that is skipped for one parameter where the options say so."""
    for i, p in enumerate(params):
        p.grad = laid(matrix(i, 91) * (float("nan") if i == 1 else 1))
    optimizer.step()
    return optimizer


# What happens after half of the steps.
EVENTS: dict[str, Callable[[list[Any], ps.Muon, Any], ps.Muon]] = {
    each.__name__: each
    for each in (
        nothing,
        without_a_gradient,
        rewound,
        resumed,
        retuned,
        other_flags,
        with_a_bad_gradient,
    )
}


# Maps and events, beside every map with no event.
CASES = (
    *(("warm", event) for event in ("without_a_gradient", "rewound", "resumed", "other_flags")),
    *(("fresh", event) for event in ("without_a_gradient", "rewound", "retuned")),
    *(("rows, with flags", event) for event in ("with_a_bad_gradient", "other_flags")),
)


def plain(X: Any) -> Tensor:
    return (X.to_local() if hasattr(X, "to_local") else X).detach()


def trained(
    options: dict[str, Any], plan: str, laid: Any, event: str, *, fused: bool
) -> dict[str, Any]:
    """Parameters and state after all steps, and the number of replays."""
    params = [Parameter(laid(matrix(i, -1))) for i in range(len(SHAPES))]
    group = torch.distributed.group.WORLD if plan == "replicated" else None
    optimizer = ps.Muon(params, lr=0.02, plan=plan, process_group=group, fused=fused, **options)
    with counted_replays() as replays:
        for at in range(STEPS // 2):
            step(params, optimizer, laid, at)
        optimizer = EVENTS[event](params, optimizer, laid)
        optimizer.param_groups[0]["fused"] = fused
        for at in range(STEPS // 2, STEPS):
            step(params, optimizer, laid, at)
    values = {f"{i}": plain(p) for i, p in enumerate(params)}
    for i, p in enumerate(params):
        values |= {f"{i} {key}": plain(X) for key, X in optimizer.state[p].items()}
    return {
        "values": values,
        "replays": len(replays),
        "routes": [route.polar for route in optimizer.routes],
    }


def main(rank: int, ranks: int, folder: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """By plan, map and event: what differs between a run with graphs and a run without."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh(DEVICE, (ranks,))

    def in_parts(X: Tensor) -> Tensor:
        part = X.chunk(ranks)[rank].clone()
        return DTensor.from_local(part, mesh, [Shard(0)], run_check=False)

    cases = [("owner", name, "nothing") for name in MAPS]
    cases += [("replicated", name, "nothing") for name in ("full space", "warm")]
    cases += [("owner", *case) for case in CASES]
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    with stand_ins():
        for plan, name, event in cases:
            laid = in_parts if plan == "owner" else Tensor.clone
            options = MAPS[name]
            one, other = (
                trained(options, plan, laid, event, fused=fused) for fused in (True, False)
            )
            found[plan, name, event] = _compared(one, other)
    if DEVICE == "cuda":
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            waiting = {"polar": Waiting(3)}
            one = trained(waiting, "owner", in_parts, "nothing", fused=True)
        other = trained(waiting, "owner", in_parts, "nothing", fused=False)
        found["owner", "waiting", "nothing"] = _compared(one, other) | {
            "told": [str(each.message) for each in told if "CUDA graph" in str(each.message)]
        }
        torch.randn(2, device=DEVICE)  # an error in a capture leaves torch's generator as it was
    return found


def _compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = one["values"], other["values"]
    differ = [key for key in theirs if not torch.equal(ours[key], theirs[key])]
    return {
        "differ": differ + sorted(ours.keys() ^ theirs.keys()),
        "finite": all(bool(X.isfinite().all()) for X in theirs.values()),
        "replays": (one["replays"], other["replays"]),
        "routes": (one["routes"], other["routes"]),
    }
