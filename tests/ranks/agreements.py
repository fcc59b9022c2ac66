"""What ranks must agree on before they share a step: main returns what each of four ranks saw."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.ranks.faults import Broken, given, raised
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import polarstep as ps

WARM = ps.LowRank(
    4, 2, 0, sketch=ps.Warm(), always_sketch=True, inner=ps.NewtonSchulz(3, "quintic")
)
RESTING = 66  # steps; momentum is looked at after 64 of them


def matrix(name: str, mesh: Any, *placements: Any, shape: tuple[int, ...] = (8, 12)) -> Any:
    return nn.Parameter(distribute_tensor(given(name, shape, 0), mesh, placements))


def give_gradients(params: list[Any], step: int) -> None:
    for i, p in enumerate(params):
        G = given(f"gradient {i}", tuple(p.shape), step).to(p.dtype)
        p.grad = distribute_tensor(G, p.device_mesh, p.placements) if isinstance(p, DTensor) else G


def words_of(optimizer: ps.Muon, params: list[Any], steps: int = 2) -> list[str]:
    """What each step raised."""
    words = []
    for step in range(steps):
        give_gradients(params, step)
        words.append(raised(optimizer.step))
    return words


def an_error_on_two_meshes(rank: int, grid: Any) -> list[str]:
    """Rank 0 fails; one parameter is on its column of the mesh, and another on all ranks."""
    params = [matrix("a", grid["dp"], Shard(0)), matrix("b", grid, Shard(0), Shard(1))]
    optimizer = ps.Muon(params, lr=0.1)
    optimizer.param_groups[0]["momentum"] = 7 if rank == 0 else 0.95
    words = words_of(optimizer, params, 1)
    optimizer.param_groups[0]["momentum"] = 0.95
    return words + words_of(optimizer, params, 1)


def out_of_step_on_two_meshes(rank: int, grid: Any) -> list[str]:
    """Rank 3 is at another step; rank 0 has no parameter in common with it."""
    params = [matrix("a", grid["tp"], Shard(0)), matrix("b", grid["dp"], Shard(0))]
    optimizer = ps.Muon(params, lr=0.1)
    optimizer.param_groups[0]["step"] = int(rank == 3)
    return words_of(optimizer, params, 1)


def other_parameters_on_one(rank: int) -> list[str]:
    """Rank 1 has a matrix less, as where experts of its own are among the plain parameters."""
    params = [nn.Parameter(given("a", (8, 12), i)) for i in range(2 if rank == 1 else 3)]
    optimizer = ps.Muon(params, lr=0.1, process_group=dist.group.WORLD)
    return words_of(optimizer, params, 1)


def warned_of(step: Any) -> list[str]:
    """The warnings of ``step`` that say what differs between ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(w.message) for w in caught if "differ between ranks" in str(w.message)]


# What rank 1 has otherwise, of a matrix and of a vector.
COPIES: dict[str, tuple[Any, Any]] = {
    "nothing": (lambda p: None, lambda p: None),
    "rounding": (lambda p: p.data.mul_(1 + 1e-6), lambda p: p.grad.mul_(1 + 1e-6)),
    "values": (lambda p: p.data.neg_(), lambda p: None),
    "gradients": (lambda p: None, lambda p: p.grad.neg_()),
    "no gradient": (lambda p: None, lambda p: setattr(p, "grad", None)),
}


def other_copies_on_one(rank: int, kind: str) -> list[list[str]]:
    """What each of three steps is warned of."""
    of_values, of_gradients = COPIES[kind]
    params = [nn.Parameter(given("a", (8, 12), 0)), nn.Parameter(given("v", (12,), 0))]
    groups = [{"params": [("a", params[0])]}, {"params": [("v", params[1])], "algorithm": "adamw"}]
    optimizer = ps.Muon(groups, lr=0.1, process_group=dist.group.WORLD)
    told = []
    for step in range(3):
        give_gradients(params, step)
        if rank == 1:
            for p in params:
                of_values(p)
                of_gradients(p)
        told.append(warned_of(optimizer.step))
    return told


def later_drift(rank: int, grid: Any, where: str) -> list[list[str]]:
    """What each step is warned of; at step 2 alone ranks 0 and 1 have other gradients than the rest."""
    names = ("a", "b", "c")
    if where == "plain":
        params = [nn.Parameter(given(name, (8, 12), 0)) for name in names]
        optimizer = ps.Muon(list(zip(names, params, strict=True)), process_group=dist.group.WORLD)
    else:
        params = [matrix(name, grid, Replicate(), Shard(0)) for name in names]
        optimizer = ps.Muon(list(zip(names, params, strict=True)))
    told = []
    for step in range(6):
        give_gradients(params, step)
        if step == 2 and rank < 2:  # one copy of hsdp
            for p in params:
                getattr(p.grad, "_local_tensor", p.grad).neg_()
        told.append(warned_of(optimizer.step))
    return told


def more_parameters_on_one(rank: int, mesh: Any) -> list[str]:
    """Rank 1 gets a matrix that no other rank has, between two steps."""
    params = [matrix("a", mesh, Shard(0))]
    optimizer = ps.Muon(params, lr=0.1, plan="owner")
    words = words_of(optimizer, params, 1)
    if rank == 1:
        params.append(nn.Parameter(given("alone", (8, 12), 0)))
        optimizer.add_param_group({"params": params[1:]})
    return words + words_of(optimizer, params)


# Options that rank 1 has otherwise. Without an agreement some make ranks wait for one another, and the
# others a step that is that of no process.
OPTIONS: dict[str, Any] = {
    "lr": 0.3,
    "momentum": 0.5,
    "nesterov": False,
    "polar": WARM,
    "weight_decay": 0.1,
    "shape_scale": "rms",
    "transform": ps.NormalizedRows(),
    "nonfinite": "skip",
    "seed": 2**60,
    "plan": "gather",
}


def other_options_on_one(rank: int, mesh: Any) -> dict[str, list[str]]:
    """What the ranks raise, by the option that rank 1 has otherwise; then it has that of the others."""
    found = {}
    for option, value in OPTIONS.items():
        params = [matrix(name, mesh, Shard(0)) for name in "ab"]
        groups: list[dict[str, Any]] = [{"params": [p]} for p in params]
        optimizer = ps.Muon(groups, lr=0.1, plan="owner")
        group, key = optimizer.param_groups[1], "shape_scale" if option == "shape_scale" else option
        known = group.get(key)
        group[key] = value if rank == 1 else known
        before = [p.full_tensor().detach().clone() for p in params]
        words = words_of(optimizer, params, 1)
        pairs = zip(params, before, strict=True)
        words.append(str(all(torch.equal(p.full_tensor(), q) for p, q in pairs)))
        group[key] = known
        found[option] = words + words_of(optimizer, params, 1)
    return found


def rates_in_their_last_digit(rank: int, mesh: Any) -> list[str]:
    """A cosine may have another last digit on another machine."""
    params = [matrix("a", mesh, Shard(0))]
    optimizer = ps.Muon(params, lr=0.1 if rank else math.nextafter(0.1, 1))
    return words_of(optimizer, params, 1)


def other_option_on_a_later_axis(rank: int, grid: Any) -> list[str]:
    """Rank 3 has another option for what it shares with rank 1 alone; rank 0 has nothing with it."""
    params = [matrix("a", grid["tp"], Shard(0)), matrix("b", grid["dp"], Shard(0))]
    optimizer = ps.Muon([{"params": [p]} for p in params], lr=0.1, plan="owner")
    optimizer.param_groups[1]["weight_decay"] = 0.1 * (rank == 3)
    return words_of(optimizer, params, 1)


def other_order_on_one(rank: int, mesh: Any) -> list[str]:
    """Matrices of one shape: nothing but their names tells them apart."""
    named = [(name, matrix(name, mesh, Shard(0))) for name in "abc"]
    if rank == 1:
        named = [named[i] for i in (0, 2, 1)]
    return words_of(ps.Muon(named, lr=0.1, plan="owner"), [p for _, p in named], 1)


def a_group_added_on_one(rank: int, mesh: Any) -> list[str]:
    params = [matrix("a", mesh, Shard(0))]
    optimizer = ps.Muon(params, lr=0.1, plan="owner")
    words = words_of(optimizer, params, 1)
    params.append(matrix("b", mesh, Shard(0)))
    if rank == 1:
        optimizer.add_param_group({"params": params[1:]})
    return words + words_of(optimizer, params, 1)


def a_sum_and_no_gradient(rank: int, mesh: Any) -> list[str]:
    """A gradient that is still to be summed, and is missing on rank 1, which would not sum with them."""
    params = [matrix(name, mesh, Shard(0)) for name in "ab"]
    optimizer = ps.Muon(list(zip("ab", params, strict=True)), lr=0.1, plan="owner")
    give_gradients(params, 0)
    for p in params:
        G = given("gradient", (8, 12), 0)
        p.grad = DTensor.from_local(G, mesh, [Partial()], run_check=False)
    words = [raised(optimizer.step)]
    if rank == 1:
        params[1].grad = None
    return [*words, raised(optimizer.step)]


def parts_of_another_shape(rank: int, mesh: Any) -> str:
    """Ten rows as 3, 3, 2, 2 in place of 3, 3, 3, 1: two ranks have what is expected."""
    X = given("a", ((3, 3, 2, 2)[rank], 6), 0)
    sizes = {"shape": torch.Size((10, 6)), "stride": (6, 1)}
    p = nn.Parameter(DTensor.from_local(X, mesh, [Shard(0)], run_check=False, **sizes))
    p.grad = torch.zeros_like(p)
    optimizer = ps.Muon([p])
    assert raised(optimizer.step) == raised(optimizer.step)
    return raised(optimizer.step)


def a_map_that_fails_on_one_while_all_gather(mesh: Any) -> tuple[list[str], float]:
    """The matrices of other shapes are gathered after it."""
    params = [matrix(f"gathered {i}", mesh, Shard(0), shape=(8, 12 + i)) for i in range(3)]
    groups = [{"params": params[:1], "polar": Broken()}, {"params": params[1:]}]
    words = words_of(ps.Muon(groups, lr=0.1, plan="gather"), params, 1)
    alone = [nn.Parameter(given(f"gathered {i}", (8, 12 + i), 0)) for i in (1, 2)]
    one = ps.Muon(alone, lr=0.1)
    for i, q in enumerate(alone, 1):
        q.grad = given(f"gradient {i}", tuple(q.shape), 0)
    one.step()
    pairs = zip(params[1:], alone, strict=True)
    return words, max(float((p.full_tensor() - q).detach().abs().max()) for p, q in pairs)


@dataclass(frozen=True)
class BrokenRule(ps.Elementwise):
    """A rule that fails on rank 1, where it starts or at its steps."""

    lr: float = 0.1
    algorithm = "broken rule"

    @staticmethod
    def new_state(p: Tensor) -> dict[str, Tensor]:
        if dist.get_rank() == 1 and not BrokenRule.at_steps:
            raise OSError("no memory")
        return {}

    @staticmethod
    def update(group: Any, params: Any, grads: Any, states: Any, found_inf: Any = None) -> None:
        if dist.get_rank() == 1:
            raise OSError("no memory")


BrokenRule.at_steps = False  # type: ignore[attr-defined]


def a_rule_that_fails_on_one(mesh: Any, *, at_steps: bool) -> list[str]:
    BrokenRule.at_steps = at_steps  # type: ignore[attr-defined]
    params = [matrix(name, mesh, Shard(0)) for name in "ab"]
    groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "broken rule"}]
    return words_of(ps.Muon(groups, lr=0.1, plan="owner"), params)


def a_monitor_on_one(rank: int, mesh: Any) -> list[str]:
    params = [matrix("a", mesh, Shard(0))]
    optimizer = ps.Muon(params, lr=0.1, plan="owner")
    if rank == 0:
        ps.certificate.Monitor(optimizer, every=2)
    return words_of(optimizer, params, 1)


def a_monitor_where_a_gradient_is_missing(rank: int, mesh: Any) -> tuple[int, float]:
    """How many values two monitors have in common, and how far those of the ranks are off."""
    p, q = matrix("a", mesh, Shard(0)), nn.Parameter(given("a", (8, 12), 0))
    ours, one = ps.Muon([("a", p)], lr=0.1), ps.Muon([("a", q)], lr=0.1)
    monitors = [ps.certificate.Monitor(each, every=2) for each in (ours, one)]
    for step in range(6):
        G = given("gradient", (8, 12), step)
        if step in (0, 3, 4):
            G[2:4] = 0
        q.grad, p.grad = G, distribute_tensor(G, mesh, [Shard(0)])
        if step in (0, 3, 4) and rank == 1:
            p.grad = None
        if step == 5:
            p.grad = q.grad = None
        ours.step()
        one.step()
    mine, theirs = (each.rows for each in monitors)
    assert [sorted(row) for row in mine] == [sorted(row) for row in theirs]
    off = [
        abs(row[key] - its[key])
        for row, its in zip(mine, theirs, strict=True)
        for key in row
        if isinstance(row[key], float)
    ]
    return len(off), max(off)


def through_checkpoints(
    p: Any, steps: int, *, matrices: int, polar: ps.LowRank, plan: Any = "auto"
) -> float:
    """How far ``p``, with a checkpoint of whole tensors after each step, is off one process."""
    q = nn.Parameter(p.full_tensor().detach().clone())
    ours, one = ps.Muon([p], lr=0.1, plan=plan, polar=polar), ps.Muon([q], lr=0.1, polar=polar)
    options = StateDictOptions(full_state_dict=True)
    for step in range(steps):
        give_gradients([p], step)
        give_gradients([q], step)
        ours.step()
        one.step()
        whole = get_optimizer_state_dict(One(p), ours, options=options)
        assert whole["state"]["p"]["peak"].shape == (matrices,)
        assert whole["state"]["p"]["basis"].shape == one.state[q]["basis"].shape
        set_optimizer_state_dict(One(p), ours, whole, options=options)
    return float((p.full_tensor() - q).detach().abs().max())


def an_axis_of_one_rank(mesh: Any, placed: Any) -> float:
    """Experts on one axis of a mesh; the other has one rank, and cuts their rows or columns."""
    p = matrix("experts", mesh, *placed, shape=(5, 9, 12))
    polar = ps.LowRank(4, 2, 0, sketch=ps.Warm(), always_sketch=True)
    return through_checkpoints(p, 3, matrices=5, polar=polar)


def uneven_channels(mesh: Any) -> float:
    """Filters of six input channels, on four ranks, through a checkpoint with a warm start."""
    p = matrix("filter", mesh, Shard(1), shape=(4, 6, 3, 3))
    polar = ps.LowRank(2, 1, 0, sketch=ps.Warm(), always_sketch=True)
    return through_checkpoints(p, 4, matrices=1, polar=polar)


def a_plain_state(mesh: Any) -> list[str]:
    """state_dict() of a plain optimizer in one of sharded parameters, and the other way round."""
    p, q = matrix("a", mesh, Shard(0)), nn.Parameter(given("a", (8, 12), 0))
    both = [ps.Muon([each]) for each in (p, q)]
    give_gradients([p], 0)
    give_gradients([q], 0)
    for each in both:
        each.step()
    states = [each.state_dict() for each in both]
    return [
        raised(lambda each=each, its=its: each.load_state_dict(its))
        for each, its in zip(both, reversed(states), strict=True)
    ]


def a_state_loaded_on_one(rank: int, mesh: Any) -> list[str]:
    """Loading does not wait for other ranks, and the next step says what is wrong."""
    params = [matrix("a", mesh, Shard(0))]
    polar = ps.LowRank(4, 2, 0, sketch=ps.Warm(), always_sketch=True)
    optimizer = ps.Muon(params, lr=0.1, plan="owner", polar=polar)
    words_of(optimizer, params)
    state = optimizer.state_dict()
    optimizer = ps.Muon(params, lr=0.1, plan="owner", polar=polar)
    words = [raised(lambda: optimizer.load_state_dict(state))] if rank == 0 else ["nothing"]
    return words + words_of(optimizer, params, 1)


def unequal_numbers_of_groups(rank: int, grid: Any) -> list[str]:
    """torch names a group that only its members make by how many groups a rank has."""
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    params = [matrix("a", grid["tp"], Shard(0))]
    return words_of(ps.Muon(params, lr=0.1, plan="owner"), params, 1)


def on_other_ranks() -> list[str]:
    """A matrix on the first two ranks, in the optimizers of all."""
    params = [matrix("elsewhere", DeviceMesh("cpu", [0, 1]), Shard(0))]
    return words_of(ps.Muon(params, lr=0.1, plan="owner"), params, 1)


def offloaded(mesh: Any) -> set[str]:
    """The backends by which parameters on the host are exchanged, where the main one is NCCL."""
    main, swap, used = dist.group.WORLD, dist.all_to_all_single, set()
    backend = dist.get_backend

    def noted(*arguments: Any, group: Any, **options: Any) -> Any:
        used.add("nccl" if group is main else backend(group))
        return swap(*arguments, group=group, **options)

    dist.all_to_all_single = noted
    dist.get_backend = lambda group: "nccl" if group is main else backend(group)
    try:
        params = [matrix("offloaded", mesh, Shard(0))]
        words_of(ps.Muon(params, lr=0.1, plan="owner"), params)
    finally:
        dist.all_to_all_single, dist.get_backend = swap, backend
    return used


def a_hook_on_one(rank: int, mesh: Any, plan: str) -> tuple[list[str], int, float]:
    """What the steps raised, how many buckets the hook of rank 0 saw, how far weights are off."""
    names = [f"hooked {i}" for i in range(3)]
    params = [matrix(name, mesh, Shard(0), shape=(9, 12)) for name in names]
    if plan == "replicated":
        params = [nn.Parameter(given(name, (9, 12), 0)) for name in names]
    alone = [nn.Parameter(given(name, (9, 12), 0)) for name in names]
    polar = ps.LowRank(4, 2, always_sketch=True)
    group = dist.group.WORLD if plan == "replicated" else None
    ours = ps.Muon(params, lr=0.1, plan=plan, polar=polar, process_group=group)
    one, seen = ps.Muon(alone, lr=0.1, polar=polar), []
    if rank == 0:
        ours.register_polar_hook(lambda bucket: seen.append(bucket.M.shape))
    words = words_of(ours, params)
    words_of(one, alone)
    ends = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
    off = max(float((p - q).detach().abs().max()) for p, q in zip(ends, alone, strict=True))
    return words, len(seen), off


def a_hook_that_fails_on_one(rank: int, mesh: Any) -> list[str]:
    """The matrices of two shapes are gathered, and the hook fails at the first."""
    params = [matrix(f"bad {i}", mesh, Shard(0), shape=(9, 12 + i)) for i in range(2)]
    optimizer = ps.Muon(params, lr=0.1, plan="owner")

    def hook(bucket: object) -> None:
        if rank == 0:
            raise OSError("the disk is full")

    optimizer.register_polar_hook(hook)
    return words_of(optimizer, params)


def a_map_that_fails_on_experts_of_one(mesh: Any) -> tuple[list[str], float]:
    """Rank 1 fails on its experts, while it owes others a part of a matrix."""
    params = [matrix("experts", mesh, Shard(0), shape=(4, 9, 12)), matrix("a", mesh, Shard(0))]
    groups = [
        {"params": params[:1], "polar": Broken()},
        {"params": params[1:], "plan": "owner"},
    ]
    words = words_of(ps.Muon(groups, lr=0.1), params, 1)
    alone = nn.Parameter(given("a", (8, 12), 0))
    one = ps.Muon([alone], lr=0.1)
    alone.grad = given("gradient 1", (8, 12), 0)
    one.step()
    return words, float((params[1].full_tensor() - alone).detach().abs().max())


class One(nn.Module):
    def __init__(self, p: nn.Parameter) -> None:
        super().__init__()
        self.p = p


def channels_last(mesh: Any, plan: str) -> float:
    """Filters in channels_last, until their momentum has been looked at."""
    shape = (8, 4, 3, 3)

    def stored(X: Tensor) -> Tensor:
        return X.contiguous(memory_format=torch.channels_last)

    def placed(X: Tensor) -> Any:
        if plan == "replicated":
            return stored(X)
        part = X.chunk(mesh.size())[mesh.get_local_rank()]
        return DTensor.from_local(stored(part), mesh, [Shard(0)], run_check=False)

    p, q = nn.Parameter(placed(given("filter", shape, 0))), nn.Parameter(given("filter", shape, 0))
    group = dist.group.WORLD if plan == "replicated" else None
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.1, "polar": ps.NewtonSchulz(3, "quintic")}
    ours, one = ps.Muon([p], plan=plan, process_group=group, **options), ps.Muon([q], **options)
    for step in range(RESTING):
        # Without a gradient the momentum has faded when it is looked at, and is set to zero.
        G = given("gradient", shape, step) * (step < 3)
        p.grad, q.grad = placed(G), G
        ours.step()
        one.step()
    whole = p.full_tensor() if isinstance(p, DTensor) else p
    return float((whole - q).detach().abs().max())


def peaks(mesh: Any) -> list[tuple[torch.dtype, torch.dtype]]:
    """The precision of the momentum, and of its peak, of parameters in three precisions."""
    params = [matrix("peak", mesh, Shard(0)) for _ in range(3)]
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    params = [nn.Parameter(p.detach().to(dtype)) for p, dtype in zip(params, kinds, strict=True)]
    optimizer = ps.Muon(params, lr=0.1, plan="owner", polar=ps.NewtonSchulz(1, "quintic"))
    words_of(optimizer, params, RESTING)
    states = [optimizer.state[p] for p in params]
    return [(its["momentum_buffer"].dtype, its["peak"].dtype) for its in states]


def main(rank: int, ranks: int, folder: Path) -> dict[Any, Any]:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (ranks,))
    grid = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    found: dict[Any, Any] = {
        "error": an_error_on_two_meshes(rank, grid),
        "out of step": out_of_step_on_two_meshes(rank, grid),
        "bad hook": a_hook_that_fails_on_one(rank, mesh),
        "bad map": a_map_that_fails_on_experts_of_one(mesh),
        "peaks": peaks(mesh),
        "other parameters": other_parameters_on_one(rank),
        "copies": {kind: other_copies_on_one(rank, kind) for kind in COPIES},
        **{f"later {where}": later_drift(rank, grid, where) for where in ("plain", "hsdp")},
        "more parameters": more_parameters_on_one(rank, mesh),
        # On some ranks only, a group is made here. The group for the host comes after it.
        "elsewhere": on_other_ranks(),
        "offloaded": offloaded(mesh),
        "options": other_options_on_one(rank, mesh),
        "last digit": rates_in_their_last_digit(rank, mesh),
        "later axis": other_option_on_a_later_axis(rank, grid),
        "order": other_order_on_one(rank, mesh),
        "added": a_group_added_on_one(rank, mesh),
        "a sum": a_sum_and_no_gradient(rank, mesh),
        "parts": parts_of_another_shape(rank, mesh),
        "bad map, gathered": a_map_that_fails_on_one_while_all_gather(mesh),
        "bad start of a rule": a_rule_that_fails_on_one(mesh, at_steps=False),
        "bad step of a rule": a_rule_that_fails_on_one(mesh, at_steps=True),
        "monitor on one": a_monitor_on_one(rank, mesh),
        "monitor": a_monitor_where_a_gradient_is_missing(rank, mesh),
        "plain state": a_plain_state(mesh),
        "channels": uneven_channels(mesh),
        "loaded on one": a_state_loaded_on_one(rank, mesh),
    }
    thin = [init_device_mesh("cpu", sizes) for sizes in ((ranks, 1), (1, ranks))]
    for cut in (1, 2):
        found["axis of one", cut] = an_axis_of_one_rank(thin[0], [Shard(0), Shard(cut)])
        found["axis of one", -cut] = an_axis_of_one_rank(thin[1], [Shard(cut), Shard(0)])
    for plan in ("owner", "replicated", "gather"):
        found["hook", plan] = a_hook_on_one(rank, mesh, plan)
    for plan in ("owner", "replicated", "gather"):
        found["channels last", plan] = channels_last(mesh, plan)
    found["unequal groups"] = unequal_numbers_of_groups(rank, grid)  # last: it makes them unequal
    return found
