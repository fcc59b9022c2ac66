"""What ordinary accidents do to a step on many ranks: main returns what each rank saw."""

from __future__ import annotations

import copy
import math
import warnings
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import polarstep as ps
from polarstep import rng
from polarstep.engines.torch import ParameterUpdate
from polarstep.maps import Draw, MapState, Polar, Warm
from polarstep.ranks.exchange import OverRanks

STEPS = 3
EXPERTS = (5, 9, 12)  # on four ranks: two, two, one, none
WARM = ps.LowRank(4, 2, 0, sketch=Warm(), always_sketch=True)
MAPS = {"full": {}, "warm": {"polar": WARM}}
SKETCHED = ps.LowRank(4, 2, always_sketch=True, inner=ps.NewtonSchulz(3, "quintic"))
WITH_STATE: dict[str, dict[str, Any]] = {
    "warm": {"polar": WARM, "nonfinite": "skip"},
    "warm, skip": {"polar": replace(SKETCHED, sketch=ps.Warm()), "nonfinite": "skip"},
    "deflated": {"polar": ps.Deflated(SKETCHED), "nonfinite": "skip"},
    "rows": {"transform": ps.NormalizedRows(), "nonfinite": "skip"},
}


@dataclass(frozen=True)
class Broken(ps.PolarMap):
    """A map that fails on one rank."""

    rank: int = 1

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        if torch.distributed.get_rank() == self.rank:
            raise ValueError("this map is broken")
        return Polar(M, M), carry

    def flops(self, m: int, n: int) -> int:
        return 1


def given(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    g = rng.generator(name, step)
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def experts(rank: int, ranks: int, mesh: Any, plan: str, missing: bool, **options: Any) -> Any:
    """A stack that is cut between experts; some ranks may have no gradient, which counts as zero."""
    start = given("experts", EXPERTS, 0)
    X = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)]))
    Y = nn.Parameter(start.clone())
    ours, one = ps.Muon([X], lr=0.1, plan=plan, **options), ps.Muon([Y], lr=0.1, **options)
    for step in range(STEPS):
        G = given("gradient", EXPERTS, step)
        if missing and step == 1:
            G[: -(-EXPERTS[0] // ranks)] = 0  # the first rank's experts
        Y.grad, X.grad = G, distribute_tensor(G, mesh, [Shard(0)])
        if missing and step == 1 and rank == 0:
            X.grad = None
        ours.step()
        one.step()
    carries = [v.full_tensor() for k, v in ours.state[X].items() if k == "basis"]
    assert all(isinstance(v, DTensor) for v in ours.state[X].values())
    known = [v for k, v in one.state[Y].items() if k == "basis"]
    off = max([float((a - b).abs().max()) for a, b in zip(carries, known, strict=True)] or [0.0])
    return max(off, float((X.full_tensor() - Y).abs().max())), str(ours.routes)


def whole_state(mesh: Any) -> float:
    """A stack that is cut between experts goes on from a carry that is whole on every rank."""
    start = given("experts", EXPERTS, 0)
    X, Y = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])), nn.Parameter(start.clone())
    ours, one = ps.Muon([X], lr=0.1, polar=WARM), ps.Muon([Y], lr=0.1, polar=WARM)
    for step in range(STEPS):
        Y.grad = given("gradient", EXPERTS, step)
        X.grad = distribute_tensor(Y.grad, mesh, [Shard(0)])
        ours.step()
        one.step()
        if step == 0:
            ours.state[X]["basis"] = ours.state[X]["basis"].full_tensor()
    left = ours.state[X]["basis"]
    assert isinstance(left, DTensor)
    return float((left.full_tensor() - one.state[Y]["basis"]).abs().max())


def other_plan(mesh: Any, name: str, plan: str) -> float:
    """A stack of experts whose group has ``plan`` for a step, between steps with the plan local."""
    start = given("experts", EXPERTS, 0)
    X, Y = nn.Parameter(distribute_tensor(start, mesh, [Shard(0)])), nn.Parameter(start.clone())
    options = WITH_STATE[name]
    ours, one = ps.Muon([X], lr=0.1, **options), ps.Muon([Y], lr=0.1, **options)
    for step, its in enumerate(("local", plan, "local", plan, "local")):
        ours.param_groups[0]["plan"] = its
        Y.grad = given("gradient", EXPERTS, step)
        X.grad = distribute_tensor(Y.grad, mesh, [Shard(0)])
        ours.step()
        one.step()
    left = [
        value.full_tensor() - one.state[Y][key].view(value.shape)
        for key, value in sorted(ours.state[X].items())
    ]
    return max(float(off.abs().max()) for off in (X.full_tensor() - Y, *left))


def matrices(mesh: Any, count: int = 3) -> list[nn.Parameter]:
    return [
        nn.Parameter(distribute_tensor(given("matrix", (9, 12), i), mesh, [Shard(0)]))
        for i in range(count)
    ]


def missing_on_one(rank: int, mesh: Any, plan: str, algorithm: str) -> float:
    """The gradient of the middle of three matrices is there on the first rank alone."""
    params = matrices(mesh)
    whole = [nn.Parameter(p.full_tensor().detach()) for p in params]
    options = {"algorithm": algorithm, "lr": 0.1}
    ours = ps.Muon([{"params": params, **options}], plan=plan)
    one = ps.Muon([{"params": whole, **options}])
    for step in range(STEPS):
        for i, (p, q) in enumerate(zip(params, whole, strict=True)):
            G = given(f"gradient {i}", (9, 12), step)
            mine = distribute_tensor(G, mesh, [Shard(0)])
            if i == 1:
                G[-(-9 // mesh.size()) :] = 0
                mine = mine if rank == 0 else None
            p.grad, q.grad = mine, G
        ours.step()
        one.step()
    return max(float((p.full_tensor() - q).abs().max()) for p, q in zip(params, whole, strict=True))


def nonfinite_on_one(rank: int, mesh: Any, plan: str, value: float) -> tuple[float, bool]:
    """A bad entry on the last rank that has rows: the parameter is skipped on all, the others move."""
    params = matrices(mesh)
    before = [p.full_tensor().detach().clone() for p in params]
    ours = ps.Muon(params, lr=0.1, plan=plan, nonfinite="skip", polar=WARM)
    for i, p in enumerate(params):
        G = given(f"gradient {i}", (9, 12), 0)
        if i == 1:
            G[-1, -1] = value
        p.grad = distribute_tensor(G, mesh, [Shard(0)])
    ours.step()
    after = [p.full_tensor() for p in params]
    stayed = float((after[1] - before[1]).abs().max())
    moved = all(float((after[i] - before[i]).abs().max()) > 1e-3 for i in (0, 2))
    return stayed, moved


def eight_bits(mesh: Any, plan: str) -> float:
    """Momentum in eight bits of a matrix, whose rows are cut between ranks, and of experts."""
    shapes = ((9, 128), (5, 4, 256))
    params = [distribute_tensor(given("matrix", shape, 0), mesh, [Shard(0)]) for shape in shapes]
    params = [nn.Parameter(p) for p in params]
    whole = [nn.Parameter(p.full_tensor().detach()) for p in params]
    ours, one = (
        ps.Muon(each, lr=0.1, momentum_dtype=torch.int8, polar=WARM, plan=p)
        for each, p in ((params, plan), (whole, "auto"))
    )
    for step in range(STEPS):
        for p, q in zip(params, whole, strict=True):
            q.grad = given("gradient", tuple(q.shape), step)
            p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
        ours.step()
        one.step()
    off = []
    for p, q in zip(params, whole, strict=True):
        mine, theirs = ours.state[p], one.state[q]
        off.append(float((p.full_tensor() - q).abs().max()))
        codes = mine["momentum_buffer"].full_tensor().int() - theirs["momentum_buffer"].int()
        off.append(float(codes.abs().max()))
        scales = mine["momentum_scale"].full_tensor().flatten() - theirs["momentum_scale"]
        off.append(float(scales.abs().max()))
    return max(off)


def eight_bits_in_part(mesh: Any) -> list[str]:
    """Rows that are no whole blocks, and rows that are cut: both are refused."""
    words = []
    for shape, dim in (((9, 12), 0), ((8, 256), 1), ((4, 6, 20), 0)):
        p = nn.Parameter(distribute_tensor(given("matrix", shape, 0), mesh, [Shard(dim)]))
        p.grad = distribute_tensor(given("gradient", shape, 0), mesh, [Shard(dim)])
        words.append(raised(ps.Muon([p], momentum_dtype=torch.int8).step))
    return words


def raised(step: Any) -> str:
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def bad_option_on_one(rank: int, mesh: Any) -> list[str]:
    """One rank has a bad momentum; all raise, none moves, and all can go on when it is mended."""
    params = matrices(mesh)
    ours = ps.Muon(params, lr=0.1)
    for i, p in enumerate(params):
        p.grad = distribute_tensor(given(f"gradient {i}", (9, 12), 0), mesh, [Shard(0)])
    if rank == 1:
        ours.param_groups[0]["momentum"] = 7
    before = [p.full_tensor().detach().clone() for p in params]
    words = [raised(ours.step)]
    ours.param_groups[0]["momentum"] = 0.95
    words.append(
        str(all(torch.equal(p.full_tensor(), q) for p, q in zip(params, before, strict=True)))
    )
    words.append(raised(ours.step))
    return words


def broken_map_on_one(rank: int, mesh: Any) -> list[str]:
    """The map fails on one rank in the midst of a step: all ranks raise the same error."""
    params = matrices(mesh, count=4)
    ours = ps.Muon(params, lr=0.1, plan="owner", polar=Broken())
    words = []
    for step in range(2):
        for i, p in enumerate(params):
            p.grad = distribute_tensor(given(f"gradient {i}", (9, 12), step), mesh, [Shard(0)])
        words.append(raised(ours.step))
        if "failed" in words[-1]:
            return [*words, str(step)]
    return words


# Where a rank may run out of memory: it advances and packs M, and it writes T to the weights.
PLACES = {
    "packing": (ParameterUpdate, "local_momentum"),
    "receiving": (OverRanks, "_received_back"),
    "updating": (ParameterUpdate, "take_parts"),
}
FAILING = [
    *((place, plan) for place in PLACES for plan in ("owner", "replicated")),
    ("packing", "gather"),
]


def shared_matrices(mesh: Any, plan: str) -> tuple[list[nn.Parameter], Any]:
    """Four parameters with a gradient, in parts or as copies, and the group of the copies."""
    params = matrices(mesh, count=4)
    group = None
    if plan == "replicated":
        params = [nn.Parameter(p.full_tensor().detach()) for p in params]
        group = torch.distributed.group.WORLD
    for p in params:
        p.grad = p.detach().clone()
    return params, group


def fails_on_one(rank: int, mesh: Any, place: str, plan: str) -> list[str]:
    """What a step raises in which rank 1 fails, and the next step, in which no rank does."""
    params, group = shared_matrices(mesh, plan)
    ours = ps.Muon(params, lr=0.1, plan=plan, process_group=group, polar=ps.NewtonSchulz(1))

    def failing(*arguments: Any, **options: Any) -> Any:
        raise MemoryError(place)

    its, name = PLACES[place]
    known = getattr(its, name)
    if rank == 1:
        setattr(its, name, failing)
    try:
        words = [raised(ours.step)]
    finally:
        setattr(its, name, known)
    return [*words, raised(ours.step)]


def cleared_on_one(rank: int, mesh: Any, plan: str) -> list[str]:
    """Rank 1 clears its state between two steps of a map that carries a warm start."""
    params, group = shared_matrices(mesh, plan)
    ours = ps.Muon(params, lr=0.1, plan=plan, process_group=group, polar=WARM)
    words = [raised(ours.step)]
    if rank == 1:
        ours.state.clear()
    return [*words, raised(ours.step)]


def out_of_step(rank: int, mesh: Any) -> str:
    params = matrices(mesh)
    ours = ps.Muon(params, lr=0.1)
    ours.param_groups[0]["step"] = rank
    for p in params:
        p.grad = distribute_tensor(given("gradient", (9, 12), 0), mesh, [Shard(0)])
    return raised(ours.step)


def before_sharding(rank: int, mesh: Any, *, late: bool = False) -> tuple[str, float, str]:
    """muon_for is called before fully_shard, or even makes a step before it."""

    def model() -> nn.Sequential:
        layers = [nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)]
        found = nn.Sequential(*layers).double()
        for i, p in enumerate(found.parameters()):
            p.data = given("network", tuple(p.shape), i) / 3
        return found

    def go(found: nn.Module, optimizer: ps.Muon) -> None:
        optimizer.zero_grad()
        found(given("input", (16, 12), 0)).square().mean().backward()
        optimizer.step()

    one, ours = model(), model()
    known, optimizer = ps.muon_for(one), ps.muon_for(ours)
    if late:
        go(ours, optimizer)
    fully_shard(ours, mesh=mesh)
    word = "nothing"
    for _ in range(STEPS):
        go(one, known)
        word = raised(lambda: go(ours, optimizer))
    ends = zip(ours.parameters(), one.parameters(), strict=True)
    return (
        word,
        max(float((p.full_tensor() - q).abs().max()) for p, q in ends),
        str(optimizer.routes),
    )


def looked_at(mesh: Any, name: str, plan: str, every: int, skipped: int) -> float:
    """A monitor samples some steps, for which all ranks gather what they share otherwise.

    A step is skipped: one that is sampled, or one that follows it and finds a whole carry on all ranks.
    """
    p = matrices(mesh, count=1)[0]
    q = nn.Parameter(p.full_tensor().detach())
    ours, one = (
        ps.Muon([p], lr=0.1, plan=plan, **WITH_STATE[name]),
        ps.Muon([q], lr=0.1, **WITH_STATE[name]),
    )
    ps.certificate.Monitor(ours, every=every)
    for step in range(8):
        q.grad = given("gradient", (9, 12), step)
        if step == skipped:
            q.grad[0, 0] = math.nan
        p.grad = distribute_tensor(q.grad, mesh, [Shard(0)])
        ours.step()
        one.step()
    return float((p.full_tensor() - q).abs().max())


def gradients_kept(mesh: Any, plan: str) -> int:
    """How many of two gradients are still in memory after a step and zero_grad()."""
    params = matrices(mesh, count=2)
    ours = ps.Muon(params, lr=0.1, plan=plan)
    for p in params:
        p.grad = distribute_tensor(given("gradient", (9, 12), 0), mesh, [Shard(0)])
    parts = [weakref.ref(p.grad._local_tensor) for p in params]
    ours.step()
    ours.zero_grad()
    return sum(part() is not None for part in parts)


def zero_redundancy() -> float:
    """ZeroRedundancyOptimizer over muon_for's groups."""

    def model() -> nn.Sequential:
        layers = [nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)]
        found = nn.Sequential(*layers).double()
        for i, p in enumerate(found.parameters()):
            p.data = given("network", tuple(p.shape), i) / 3
        return found

    one, ours = model(), model()
    known = ps.muon_for(one, polar=WARM)
    groups = ps.muon_for(ours, polar=WARM).param_groups
    optimizer = ZeroRedundancyOptimizer(groups, optimizer_class=ps.Muon, lr=0.02)
    for step in range(STEPS):
        for net, its in ((one, known), (ours, optimizer)):
            its.zero_grad()
            net(given("input", (16, 12), step)).square().mean().backward()
            its.step()
    ends = zip(ours.parameters(), one.parameters(), strict=True)
    return max(float((p - q).abs().max()) for p, q in ends)


def zero_redundancy_resumed(**options: Any) -> float:
    """How far a run ends from one that was not saved and loaded; two layers get their gradients late.

    A checkpoint has Muon's of them as a layer whose gradient was zero, as it is in the run that goes on.
    The last layer is AdamW's.
    """

    def start() -> tuple[nn.Sequential, Any]:
        model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(4))).double()
        for i, p in enumerate(model.parameters()):
            p.data = given("network", tuple(p.shape), i) / 3
        groups = ps.muon_for(model, weight_decay=0.0, **options).param_groups
        return model, ZeroRedundancyOptimizer(groups, optimizer_class=ps.Muon, lr=0.02)

    def go(model: nn.Module, optimizer: Any, steps: range, late: float | None = 1.0) -> None:
        for step in steps:
            for i, p in enumerate(model.parameters()):
                G = given(f"gradient {i}", (12, 12), step)
                p.grad = G if i < 2 or late else None
                if i == 2 and late == 0:
                    p.grad = 0 * G
            optimizer.step()

    one, known = start()
    go(one, known, range(2), late=0.0)
    first, saving = start()
    go(first, saving, range(2), late=None)
    saving.consolidate_state_dict(0)
    saved = [copy.deepcopy(saving.state_dict()) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(saved)
    ours, optimizer = start()
    ours.load_state_dict(first.state_dict())
    optimizer.load_state_dict(saved[0])
    for each, its in ((one, known), (ours, optimizer)):
        go(each, its, range(2, 5))
    ends = list(zip(ours.parameters(), one.parameters(), strict=True))
    assert not any(p.isnan().any() for p in one.parameters())
    return float(torch.stack([(p - q).abs().max() for p, q in ends]).max())


class Compensated(nn.Module):
    """A matrix, experts and an AdamW matrix in bfloat16, of which the last rank has no part; and twins.

    The twins, whose names begin with "late", get a gradient from the second step on.
    """

    def __init__(self, mesh: Any, plan: str) -> None:
        super().__init__()
        rows = mesh.size() - 1
        shapes = {"matrix": (rows, 12), "experts": (rows, 9, 12), "table": (rows, 4)}
        for late in ("", "late_"):
            for name, shape in shapes.items():
                X = distribute_tensor(given(name, shape, 0).bfloat16(), mesh, [Shard(0)])
                self.register_parameter(late + name, nn.Parameter(X))
        groups = [
            {"params": [self.matrix, self.experts, self.late_matrix, self.late_experts]},
            {"params": [self.table, self.late_table], "algorithm": "adamw"},
        ]
        self.optimizer = ps.Muon(groups, lr=0.01, polar=WARM, plan=plan, rounding="compensated")

    def go(self, step: int, *, zeros: bool = False) -> None:
        for name, p in self.named_parameters():
            G = given(name, tuple(p.shape), step + 1).bfloat16()
            p.grad = distribute_tensor(G, p.device_mesh, p.placements)
            if step == 0 and name.startswith("late"):
                p.grad = 0 * p.grad if zeros and "table" not in name else None
        self.optimizer.step()


def compensated(mesh: Any, plan: str, path: Path) -> dict[str, Any]:
    """The keys of the state on all ranks, and how far a run ends that was saved and loaded."""
    one, ours, known = (Compensated(mesh, plan) for _ in range(3))
    one.go(0)
    known.go(0, zeros=True)
    keys: list[Any] = [None] * mesh.size()
    names = {name: sorted(one.optimizer.state.get(p, {})) for name, p in one.named_parameters()}
    torch.distributed.all_gather_object(keys, names)
    found: dict[str, Any] = {"keys": keys}
    if any(each != keys[0] for each in keys):
        return found  # to gather this state would abort the process
    whole = get_optimizer_state_dict(
        one, one.optimizer, options=StateDictOptions(full_state_dict=True)
    )
    found["gathered"] = {name: sorted(its) for name, its in whole["state"].items()}
    dcp.save({"its": get_optimizer_state_dict(one, one.optimizer)}, checkpoint_id=path)
    fresh = {"its": get_optimizer_state_dict(ours, ours.optimizer)}
    try:
        dcp.load(fresh, checkpoint_id=path)
    except Exception as error:
        return found | {"loaded": str(error)}
    set_optimizer_state_dict(ours, ours.optimizer, fresh["its"])
    for p, q in zip(ours.parameters(), known.parameters(), strict=True):
        p.data.copy_(q.data)
        error = ours.optimizer.state[p]["rounding_error"]
        assert (error.shape, error.dtype, error.placements) == (p.shape, p.dtype, p.placements)
    for step in (1, 2):
        known.go(step)
        ours.go(step)
    ends = zip(ours.parameters(), known.parameters(), strict=True)
    off = [(p.full_tensor() - q.full_tensor()).abs().max() for p, q in ends]
    return found | {"loaded": float(torch.stack(off).max())}


def uneven_strided(ranks: int) -> str:
    """Tensor parallelism cut 10 rows in two, and FSDP each of them in two."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Linear(12, 10, bias=False)
    parallelize_module(model, mesh["tp"], ColwiseParallel())
    try:
        fully_shard(model, mesh=mesh["dp"])
    except Exception as error:  # some versions of torch refuse it themselves
        return f"torch: {error}"
    model.weight.grad = torch.zeros_like(model.weight)
    return raised(ps.Muon(model.parameters()).step)


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, Any] = {}
    for name, options in MAPS.items():
        for plan in ("auto", "local", "owner", "gather"):
            for missing in (False, True):
                found["experts", name, plan, missing] = experts(
                    rank, ranks, mesh, plan, missing, **options
                )
    for plan in ("owner", "gather"):
        for algorithm in ("muon", "adamw"):
            found["missing", plan, algorithm] = missing_on_one(rank, mesh, plan, algorithm)
        for value in (math.nan, math.inf):
            found["nonfinite", plan, value] = nonfinite_on_one(rank, mesh, plan, value)
    for plan in ("auto", "owner", "gather"):
        found["eight bits", plan] = eight_bits(mesh, plan)
    for plan in ("owner", "gather"):
        found["gradients kept", plan] = gradients_kept(mesh, plan)
        for name in WITH_STATE:
            found["looked at", name, plan] = looked_at(mesh, name, plan, every=3, skipped=6)
            found["after a look", name, plan] = looked_at(mesh, name, plan, every=2, skipped=3)
    for plan in ("owner", "gather"):
        for name in WITH_STATE:
            found["other plan", name, plan] = other_plan(mesh, name, plan)
    found["whole state"] = whole_state(mesh)
    found["eight bits in part"] = eight_bits_in_part(mesh)
    found["bad option"] = bad_option_on_one(rank, mesh)
    found["broken map"] = broken_map_on_one(rank, mesh)
    for place, plan in FAILING:
        found["fails", place, plan] = fails_on_one(rank, mesh, place, plan)
    for plan in ("owner", "replicated"):
        found["cleared", plan] = cleared_on_one(rank, mesh, plan)
    found["out of step"] = out_of_step(rank, mesh)
    found["before sharding"] = before_sharding(rank, mesh)
    found["after a step"] = before_sharding(rank, mesh, late=True)
    found["zero redundancy"] = zero_redundancy()
    for name in ("warm", "rows"):
        found["resumed", name] = zero_redundancy_resumed(**WITH_STATE[name])
    for plan in ("auto", "owner", "gather"):
        found["compensated", plan] = compensated(mesh, plan, folder / f"compensated {plan}")
    if ranks == 4:
        found["strided"] = uneven_strided(ranks)
    return found
