"""One clear error on all ranks, whatever one of them lacks or fails in; no rank waits for ever."""

from __future__ import annotations

import math
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.own_parts import PerEntry
from tests.ranks.launch import needs_gloo
from tests.ranks.twins import WARM, Broken, distributed, given, matrix, mesh_of, placed_as, raised
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import polarstep as ps
from polarstep import gradients, rates, stale_momentum
from polarstep.engines.torch import ParameterUpdate
from polarstep.ranks import agree, carries, collectives, distribution
from polarstep.ranks.exchange import OverRanks

pytestmark = needs_gloo


def words_of(optimizer: ps.Muon, params: list[Any], steps: int = 2) -> list[str]:
    """What each step raised."""
    words = []
    for step in range(steps):
        for i, p in enumerate(params):
            p.grad = placed_as(p, given(f"gradient {i}", tuple(p.shape), step).to(p.dtype))
        words.append(raised(optimizer.step))
    return words


def rows(names: str = "ab", **options: Any) -> tuple[list[Any], ps.Muon]:
    """Matrices of which each rank has some rows, in an optimizer that shares the work."""
    params = [matrix(name, Shard(0)) for name in names]
    return params, ps.Muon(
        list(zip(names, params, strict=True)), **({"lr": 0.1, "plan": "owner"} | options)
    )


def same_on_all(found: list[Any]) -> Any:
    assert all(each == found[0] for each in found)
    return found[0]


# Before a step: an error on one rank


def bad_option_on_one() -> list[str]:
    params, optimizer = rows("abc")
    optimizer.param_groups[0]["momentum"] = 7 if dist.get_rank() == 1 else 0.95
    before = [p.full_tensor().detach().clone() for p in params]
    words = words_of(optimizer, params, 1)
    optimizer.param_groups[0]["momentum"] = 0.95
    pairs = zip(params, before, strict=True)
    words.append(str(all(torch.equal(p.full_tensor(), q) for p, q in pairs)))
    return words + words_of(optimizer, params, 1)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_raises_before_the_step(ranks, ranks_of) -> None:
    """All raise, no weight moves, and all can go on when it is mended."""
    first, unchanged, after = same_on_all(ranks_of(ranks)(bad_option_on_one))
    assert f"failed on 1 of {ranks} ranks" in first
    assert "rank 1: ValueError: momentum=7: expected 0 ≤ momentum < 1" in first
    assert (unchanged, after) == ("True", "nothing")


def an_error_on_two_meshes() -> list[str]:
    """Rank 0 fails; one parameter is on its column of the mesh, and another on all ranks."""
    grid = mesh_of(2, 2)
    params = [matrix("a", Shard(0), mesh=grid["dp"]), matrix("b", Shard(0), Shard(1), mesh=grid)]
    optimizer = ps.Muon(params, lr=0.1)
    optimizer.param_groups[0]["momentum"] = 7 if dist.get_rank() == 0 else 0.95
    words = words_of(optimizer, params, 1)
    optimizer.param_groups[0]["momentum"] = 0.95
    return words + words_of(optimizer, params, 1)


def test_an_error_reaches_ranks_that_have_another_mesh_in_common(four) -> None:
    """Tensor parallelism with FSDP2: some parameters are on an axis of the mesh, others on all of it."""
    first, second = same_on_all(four(an_error_on_two_meshes))
    assert "failed on 1 of 4 ranks" in first
    assert "rank 0: ValueError: momentum=7" in first
    assert second == "nothing"


def parts_of_another_shape() -> list[str]:
    """Ten rows as 3, 3, 2, 2 in place of 3, 3, 3, 1: two ranks have what is expected."""
    X = given("a", ((3, 3, 2, 2)[dist.get_rank()], 6))
    sizes = {"shape": torch.Size((10, 6)), "stride": (6, 1)}
    p = nn.Parameter(DTensor.from_local(X, mesh_of(), [Shard(0)], run_check=False, **sizes))
    p.grad = torch.zeros_like(p)
    optimizer = ps.Muon([p])
    first, second = raised(optimizer.step), raised(optimizer.step)
    assert first == second
    return [second]


# Before a step: ranks that differ


def out_of_step() -> list[str]:
    params, optimizer = rows()
    optimizer.param_groups[0]["step"] = dist.get_rank()
    return words_of(optimizer, params, 1)


def out_of_step_on_two_meshes() -> list[str]:
    """Rank 3 is at another step; rank 0 has no parameter in common with it."""
    grid = mesh_of(2, 2)
    params = [matrix("a", Shard(0), mesh=grid["tp"]), matrix("b", Shard(0), mesh=grid["dp"])]
    optimizer = ps.Muon(params, lr=0.1)
    optimizer.param_groups[0]["step"] = 3 * (dist.get_rank() == 3)
    return words_of(optimizer, params, 1)


def loaded_on_one() -> list[str]:
    """Loading does not wait for other ranks, and the next step says what is wrong."""
    params, optimizer = rows("a", polar=WARM)
    for _ in range(3):
        words_of(optimizer, params, 1)
    state = optimizer.state_dict()
    params, optimizer = rows("a", polar=WARM)
    if dist.get_rank() == 0:
        optimizer.load_state_dict(state)
    return words_of(optimizer, params, 1)


def other_parameters_on_one() -> list[str]:
    """Rank 1 has a matrix less, as where experts of its own are among the plain parameters."""
    count = 2 if dist.get_rank() == 1 else 3
    params = [nn.Parameter(given("a", (8, 12), i)) for i in range(count)]
    return words_of(ps.Muon(params, lr=0.1, process_group=dist.group.WORLD), params, 1)


def other_order_on_one() -> list[str]:
    """Matrices of one shape: nothing but their names tells them apart."""
    params, optimizer = rows("acb" if dist.get_rank() == 1 else "abc")
    return words_of(optimizer, params, 1)


def a_group_added_on_one() -> list[str]:
    params, optimizer = rows("a")
    words = words_of(optimizer, params, 1)
    params.append(matrix("b", Shard(0)))
    if dist.get_rank() == 1:
        optimizer.add_param_group({"params": params[1:]})
    assert words == ["nothing"]
    return words_of(optimizer, params, 1)


def more_parameters_on_one() -> list[str]:
    """Rank 1 gets a matrix that no other rank has, between two steps."""
    params, optimizer = rows("a")
    words = words_of(optimizer, params, 1)
    if dist.get_rank() == 1:
        params.append(nn.Parameter(given("alone", (8, 12))))
        optimizer.add_param_group({"params": params[1:]})
    return words + words_of(optimizer, params)


def test_a_rank_may_have_parameters_of_its_own(four) -> None:
    """The steps of its own groups do not count where ranks compare their steps."""
    assert four(more_parameters_on_one) == [["nothing"] * 3] * 4


# Options that rank 1 has otherwise. Without an agreement some make ranks wait for one another, and the
# others a step that is that of no process.
OPTIONS: dict[str, Any] = {
    "lr": 0.3,
    "momentum": 0.5,
    "nesterov": False,
    "momentum_rule": PerEntry(),
    "polar": WARM,
    "weight_decay": 0.1,
    "shape_scale": "rms",
    "transform": ps.NormalizedRows(),
    "nonfinite": "skip",
    "seed": 2**60,
    "plan": "gather",
}


def other_option_on_one(option: str) -> list[str]:
    """What the ranks raise; then rank 1 has the option of the others."""
    params = [matrix(name, Shard(0)) for name in "ab"]
    optimizer = ps.Muon([{"params": [p]} for p in params], lr=0.1, plan="owner")
    group = optimizer.param_groups[1]
    known = group.get(option)
    group[option] = OPTIONS[option] if dist.get_rank() == 1 else known
    before = [p.full_tensor().detach().clone() for p in params]
    words = words_of(optimizer, params, 1)
    pairs = zip(params, before, strict=True)
    words.append(str(all(torch.equal(p.full_tensor(), q) for p, q in pairs)))
    group[option] = known
    return words + words_of(optimizer, params, 1)


@pytest.mark.parametrize("option", OPTIONS)
def test_ranks_with_other_options(option, four) -> None:
    """Nothing has changed then, and the run goes on when they have been put right."""
    first, unchanged, after = same_on_all(four(other_option_on_one, option))
    assert f"{option} of group 'muon-2' is" in first
    assert "on ranks 0, 2, 3 and" in first
    assert "expected the same options on all ranks" in first
    assert (unchanged, after) == ("True", "nothing")


def rates_in_their_last_digit() -> list[str]:
    """A cosine may have another last digit on another machine."""
    params, optimizer = rows("a", lr=0.1 if dist.get_rank() else math.nextafter(0.1, 1))
    return words_of(optimizer, params, 1)


def other_option_on_a_later_axis() -> list[str]:
    """Rank 3 has another option for what it shares with rank 1 alone; rank 0 has nothing with it."""
    grid = mesh_of(2, 2)
    params = [matrix("a", Shard(0), mesh=grid["tp"]), matrix("b", Shard(0), mesh=grid["dp"])]
    optimizer = ps.Muon([{"params": [p]} for p in params], lr=0.1, plan="owner")
    optimizer.param_groups[1]["weight_decay"] = 0.1 * (dist.get_rank() == 3)
    return words_of(optimizer, params, 1)


def test_rates_may_differ_in_their_last_digit(four) -> None:
    assert four(rates_in_their_last_digit) == [["nothing"]] * 4


def a_sum_and_no_gradient() -> list[str]:
    """A gradient that is still to be summed, and is missing on rank 1, which would not sum with them."""
    params, optimizer = rows()
    for p in params:
        p.grad = DTensor.from_local(given("gradient", (8, 12)), mesh_of(), [Partial()])
    words = [raised(optimizer.step)]
    if dist.get_rank() == 1:
        params[1].grad = None
    return [*words, raised(optimizer.step)]


def a_monitor_on_one() -> list[str]:
    params, optimizer = rows("a")
    if dist.get_rank() == 0:
        ps.certificate.Monitor(optimizer, every=2)
    return words_of(optimizer, params, 1)


def cleared_on_one(plan: str) -> list[str]:
    """Rank 1 clears its state between two steps of a map that carries a warm start."""
    params, optimizer = shared(plan, polar=WARM)
    words = words_of(optimizer, params, 1)
    if dist.get_rank() == 1:
        optimizer.state.clear()
    return words + words_of(optimizer, params, 1)


def shared(plan: str, **options: Any) -> tuple[list[Any], ps.Muon]:
    """Four matrices, in parts or as copies."""
    if plan != "replicated":
        return rows("abcd", plan=plan, **options)
    params = [nn.Parameter(given(name, (8, 12))) for name in "abcd"]
    return params, ps.Muon(params, lr=0.1, plan=plan, process_group=dist.group.WORLD, **options)


def in_another_form() -> list[str]:
    """state_dict() of a plain optimizer in one of sharded parameters, and the other way round."""
    p, q = matrix("a", Shard(0)), nn.Parameter(given("a", (8, 12)))
    both = [ps.Muon([each]) for each in (p, q)]
    for optimizer, each in zip(both, (p, q), strict=True):
        words_of(optimizer, [each], 1)
    states = reversed([each.state_dict() for each in both])
    return [
        raised(lambda each=each, its=its: each.load_state_dict(its))
        for each, its in zip(both, states, strict=True)
    ]


def test_a_state_of_another_sharding_is_refused_with_a_remedy(two) -> None:
    for into_sharded, into_plain in two(in_another_form):
        assert "is a plain tensor, and the parameter is sharded" in into_sharded
        assert "is a sharded tensor, and the parameter is not sharded" in into_plain
        for word in (into_sharded, into_plain):
            assert "StateDictOptions(full_state_dict=True)" in word


def uneven_strided() -> list[str]:
    """Tensor parallelism cut 10 rows in two, and FSDP each of them in two."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = nn.Linear(12, 10, bias=False)
    parallelize_module(model, mesh_of(2, 2)["tp"], ColwiseParallel())
    try:
        fully_shard(model, mesh=mesh_of(2, 2)["dp"])
    except Exception as error:  # some versions of torch refuse it themselves
        return [f"torch, and not a dimension that both axes cut evenly: {error}"]
    model.weight.grad = torch.zeros_like(model.weight)
    return [raised(ps.Muon(model.parameters()).step)]


def sharded_after_muon_for(late: bool) -> list[str]:
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    optimizer = ps.muon_for(model)

    def go() -> None:
        optimizer.zero_grad()
        model(given("input", (16, 12))).square().mean().backward()
        optimizer.step()

    if late:
        go()
    fully_shard(model, mesh=mesh_of())
    return [raised(go)]


# Copies that are none


def warned_of(step: Any) -> list[str]:
    """The warnings of ``step`` that say what differs between ranks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    return [str(w.message) for w in caught if "differ between ranks" in str(w.message)]


# What rank 1 has otherwise.
COPIES: dict[str, Any] = {
    "nothing": lambda p: None,
    "rounding": lambda p: (p.data.mul_(1 + 1e-6), p.grad.mul_(1 + 1e-6)),
    "values": lambda p: p.data.neg_(),
    "gradients": lambda p: p.grad.neg_(),
    "no gradient": lambda p: setattr(p, "grad", None),
}


def other_copies_on_one(kind: str) -> list[list[str]]:
    """What each of three steps is warned of, where rank 1 has another matrix and another vector."""
    params = [nn.Parameter(given("a", (8, 12))), nn.Parameter(given("v", (12,)))]
    groups = [{"params": [("a", params[0])]}, {"params": [("v", params[1])], "algorithm": "adamw"}]
    optimizer = ps.Muon(groups, lr=0.1, process_group=dist.group.WORLD)
    told = []
    for step in range(3):
        for p in params:
            p.grad = given("gradient", tuple(p.shape), step)
            if dist.get_rank() == 1:
                COPIES[kind](p)
        told.append(warned_of(optimizer.step))
    return told


@pytest.mark.parametrize("kind", COPIES)
def test_copies_that_differ_are_told_of(kind, four) -> None:
    """As without DDP, or after a backward pass in no_sync(): all ranks say so at the next step."""
    told = same_on_all(four(other_copies_on_one, kind))
    if kind in ("nothing", "rounding"):
        assert told == [[], [], []]
        return
    first, (second,), third = told
    assert (first, third) == ([], [])
    what = "values" if kind == "values" else "gradients"
    assert second.startswith(
        f"the {what} of a (8×12 torch.float64) in group 0 differ between ranks"
    )
    assert "Expected DistributedDataParallel(model), which sends the values of rank 0" in second


def later_drift(where: str) -> list[list[str]]:
    """What each step is warned of; at step 2 alone ranks 0 and 1 have other gradients than the rest."""
    names, grid = ("a", "b", "c"), mesh_of(2, 2)
    params = [
        nn.Parameter(given(name, (8, 12)))
        if where == "plain"
        else matrix(name, Replicate(), Shard(0), mesh=grid)
        for name in names
    ]
    group = dist.group.WORLD if where == "plain" else None
    optimizer = ps.Muon(list(zip(names, params, strict=True)), process_group=group)
    told = []
    for step in range(6):
        for p in params:
            p.grad = placed_as(p, given("gradient", (8, 12), step))
            if step == 2 and dist.get_rank() < 2:  # one copy of hsdp
                getattr(p.grad, "_local_tensor", p.grad).neg_()
        told.append(warned_of(optimizer.step))
    return told


@pytest.mark.parametrize("where", ["plain", "hsdp"])
def test_copies_that_drift_later_are_told_of(where, four) -> None:
    """As after one backward pass in no_sync(), later in a run."""
    told = same_on_all(four(later_drift, where))
    assert [bool(words) for words in told] == [False, False, False, True, False, False]
    assert "the gradients of c (8×12 torch.float64) in group 0 differ between ranks" in told[3][0]


# In the midst of a step


def broken_map(plan: str) -> list[str]:
    params, optimizer = rows("abcd", plan=plan, polar=Broken())
    return words_of(optimizer, params, 1)


def broken_map_beside_others(
    shape: tuple[int, ...], broken: str, plan: str
) -> tuple[list[str], float]:
    """How far a matrix ends from one process whose step another map's failure did not stop."""
    params = [matrix("broken", Shard(0), shape=shape), matrix("a", Shard(0))]
    groups: list[dict[str, Any]] = [
        {"params": params[:1], "polar": Broken(), "plan": broken},
        {"params": params[1:], "plan": plan},
    ]
    words = words_of(ps.Muon(groups, lr=0.1), params, 1)
    alone = nn.Parameter(given("a", (8, 12)))
    alone.grad = given("gradient 1", (8, 12))
    ps.Muon([alone], lr=0.1).step()
    return words, float((params[1].full_tensor() - alone).detach().abs().max())


@pytest.mark.parametrize(
    ("shape", "broken", "plan"),
    [((4, 9, 12), "local", "owner"), ((8, 13), "gather", "gather")],
    ids=["experts", "gathered"],
)
def test_the_other_matrices_of_a_step_that_fails_are_updated(shape, broken, plan, four) -> None:
    """Rank 1 owes others its parts of them; all ranks raise when the step ends."""
    for (word,), off in four(broken_map_beside_others, shape, broken, plan):
        assert "rank 1: ValueError: this map is broken" in word
        assert off < 1e-12


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


def broken_rule(at_steps: bool) -> list[str]:
    BrokenRule.at_steps = at_steps  # type: ignore[attr-defined]
    params = [matrix(name, Shard(0)) for name in "ab"]
    groups = [{"params": params[:1]}, {"params": params[1:], "algorithm": "broken rule"}]
    return words_of(ps.Muon(groups, lr=0.1, plan="owner"), params, 1)


def broken_hook() -> list[str]:
    """The matrices of two shapes are gathered, and the hook fails at the first."""
    params = [matrix(f"bad {i}", Shard(0), shape=(9, 12 + i)) for i in range(2)]
    optimizer = ps.Muon(params, lr=0.1, plan="owner")

    def hook(bucket: object) -> None:
        if dist.get_rank() == 0:
            raise OSError("the disk is full")

    optimizer.register_polar_hook(hook)
    return words_of(optimizer, params, 1)


# Where a rank may run out of memory, or a map's own function may fail: a function, and the options with
# which a step calls it.
SKETCHED = ps.LowRank(3, 1, 0, always_sketch=True)
PLACES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "choosing a plan": (distribution, "chosen_plan", {}),
    "pricing the map": (ps.NewtonSchulz, "flops", {}),
    "what a map leaves": (carries, "after_zeros", {"polar": WARM}),
    "its first numbers": (ps.LowRank, "numbers", {"polar": WARM}),
    "numbers of a step": (ps.LowRank, "numbers", {"polar": SKETCHED}),
    "finding a NaN": (gradients, "_are_finite", {"nonfinite": "skip"}),
    "stale momentum": (stale_momentum, "_parts_of_C", {}),
    "stopping it": (stale_momentum, "_reset_stale", {}),
    "comparing copies": (agree, "_sums_of", {}),
    "packing": (ParameterUpdate, "local_momentum", {}),
    "receiving": (OverRanks, "_received_back", {}),
    "updating": (ParameterUpdate, "take_parts", {}),
}


def fails_on_one(place: str, plan: str) -> list[str]:
    """What a step raises in which rank 1 fails, and the next step, in which no rank does."""
    its, name, options = PLACES[place]
    carries._SHAPES.clear()
    params, optimizer = shared(plan, **{"polar": ps.NewtonSchulz(1)} | options)
    if its is stale_momentum:
        optimizer.param_groups[0]["step"] = stale_momentum.EVERY - 1
        words_of(optimizer, params, 1)

    def failing(*arguments: Any, **options: Any) -> Any:
        raise MemoryError(place)

    known = getattr(its, name)
    if dist.get_rank() == 1:
        setattr(its, name, failing)
    try:
        words = words_of(optimizer, params, 1)
    finally:
        setattr(its, name, known)
    return words + words_of(optimizer, params, 1)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("place", "plan"),
    [
        *((place, "replicated") for place in PLACES),
        *((place, "owner") for place in PLACES if place != "comparing copies"),
        *((place, "gather") for place in ("packing", "finding a NaN", "stale momentum")),
    ],
)
def test_a_rank_that_fails_outside_the_map(ranks, place, plan, ranks_of) -> None:
    """Where memory runs out, say: the others waited for it, or found it at another step."""
    first, second = same_on_all(ranks_of(ranks)(fails_on_one, place, plan))
    assert f"rank 1: MemoryError: {place}" in first
    assert second == "nothing"


def measuring_fails() -> list[str]:
    """The first step measures the entries of an embedding."""
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=mesh_of())
    optimizer, known = ps.muon_for(model), rates._sum_of_squares

    def failing(X: Tensor) -> float:
        raise MemoryError("measuring")

    rates._sum_of_squares = failing if dist.get_rank() == 1 else known
    try:
        return words_of(optimizer, list(model.parameters()), 1)
    finally:
        rates._sum_of_squares = known


# Where a rank cannot send what others wait for: it cannot know what, or has not even zeros.
ALONE: list[tuple[Any, str]] = [
    (distribution, "computing_ranks"),
    (torch, "zeros"),
]


def fails_alone(number: int) -> tuple[str, float]:
    """What a step raises in which rank 1 cannot go on, and after how many seconds."""
    its, name = ALONE[number]
    params, optimizer = rows(polar=Broken())
    words_of(rows()[1], params, 1)

    def failing(*arguments: Any, **options: Any) -> Any:
        raise MemoryError(name)

    if dist.get_rank() == 1:
        setattr(its, name, failing)
    start = time.monotonic()
    (word,) = words_of(optimizer, params, 1)
    return word, time.monotonic() - start


@pytest.mark.parametrize("number", range(len(ALONE)))
def test_a_rank_that_ends_its_step_alone_tells_the_others_why(number, fresh) -> None:
    """They wait for the user's timeout."""
    timeout = timedelta(seconds=collectives.NOTED_AFTER + 2)
    told = fresh(3, timeout=timeout)(fails_alone, number)
    for rank, (word, seconds) in enumerate(told):
        assert "MemoryError" in word
        assert ALONE[number][1] in word
        assert ("did not come to the end of step 0" in word) == (rank != 1)
        assert seconds < 20


def scale_that_fails(m: int, n: int) -> float:
    """A user's function for shape_scale."""
    if dist.get_rank() == 1:
        raise OSError("no such table")
    return 1.0


def broken_scale() -> list[str]:
    params, optimizer = rows(shape_scale=scale_that_fails)
    return words_of(optimizer, params, 1)


STEPS = ("from 0 to 3: expected the same step on all ranks", "load one checkpoint on all")
COMMON = "parameters in common with ranks (0, 1, 2, 3)"
CLEARED = ("in group 0 lacks on rank 1 what", "clear the state on all")
REPLACED = ("0.weight and 3 more have been replaced in the model", "after the last of these calls")
# What the last step of a case raises on all of so many ranks.
CASES: list[tuple[Any, tuple[Any, ...], int, tuple[str, ...]]] = [
    (
        parts_of_another_shape,
        (),
        4,
        ("failed on 2 of 4 ranks", "rank 3: ValueError: a parameter of"),
    ),
    (uneven_strided, (), 4, ("that both axes cut evenly",)),
    (sharded_after_muon_for, (False,), 2, REPLACED),
    (sharded_after_muon_for, (True,), 2, REPLACED),
    (out_of_step, (), 4, STEPS),
    (out_of_step_on_two_meshes, (), 4, STEPS),
    (loaded_on_one, (), 4, STEPS),
    (
        other_parameters_on_one,
        (),
        4,
        (f"rank 0: 3 {COMMON}, from number 3 on: 8×12 torch.float64", f"rank 1: 2 {COMMON}"),
    ),
    (
        other_order_on_one,
        (),
        4,
        (f"rank 0: 3 {COMMON}, from number 2 on: b", f"rank 1: 3 {COMMON}, from number 2 on: c"),
    ),
    (
        a_group_added_on_one,
        (),
        4,
        (f"rank 0: 1 {COMMON}; rank 1: 2 {COMMON}, from number 2 on", "added, on all of them"),
    ),
    (
        other_option_on_a_later_axis,
        (),
        4,
        ("weight_decay of group 'muon-2' is 0.0 on rank 1 and 0.1 on rank 3",),
    ),
    (a_sum_and_no_gradient, (), 4, ("gradient of b (8×12 torch.float64) in group 0 is placed",)),
    (a_monitor_on_one, (), 4, ("make a Monitor on every rank",)),
    (cleared_on_one, ("owner",), 2, ("the optimizer's state of a (8×12 torch.float64)", *CLEARED)),
    (cleared_on_one, ("replicated",), 2, ("the optimizer's state of 8×12 torch.float64", *CLEARED)),
    (
        broken_map,
        ("owner",),
        4,
        ("failed on 1 of 4 ranks", "rank 1: ValueError: this map is broken"),
    ),
    (
        broken_map,
        ("gather",),
        4,
        ("failed on 1 of 4 ranks", "rank 1: ValueError: this map is broken"),
    ),
    (broken_rule, (False,), 2, ("rank 1: OSError: no memory",)),
    (broken_rule, (True,), 2, ("rank 1: OSError: no memory",)),
    (broken_hook, (), 4, ("failed on 1 of 4 ranks", "rank 0: OSError: the disk is full")),
    (broken_scale, (), 2, ("rank 1: OSError: no such table",)),
    (measuring_fails, (), 2, ("rank 1: MemoryError: measuring",)),
]


@pytest.mark.parametrize(("case", "arguments", "ranks", "told"), CASES)
def test_all_ranks_raise(case, arguments, ranks, told, ranks_of) -> None:
    for *before, word in ranks_of(ranks)(case, *arguments):
        assert set(before) <= {"nothing"}
        assert all(each in word for each in told)


# Ranks that wait in vain, and groups


LATE, SKIPPED = 1, 3  # the step for which rank 1 takes long, and the step that rank 2 skips


def skipping() -> list[str]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(12, 8, bias=False))
    optimizer = ps.Muon(model.parameters(), process_group=dist.group.WORLD)
    words = []
    for step in range(SKIPPED + 2):
        try:
            model(torch.randn(4, 12)).square().mean().backward()
            if (dist.get_rank(), step) == (1, LATE):
                time.sleep(collectives.NOTED_AFTER + 1)
            if (dist.get_rank(), step) != (2, SKIPPED):
                optimizer.step()
        except Exception as error:
            words.append(f"{type(error).__name__}: {error}")
            break
        words.append("nothing")
    return words


def test_a_rank_that_skips_a_step_is_named(fresh) -> None:
    """It goes on to a backward pass, whose reduction met the others' exchange and ended the process."""
    timeout = timedelta(seconds=collectives.NOTED_AFTER + 3)
    first, second, skips = fresh(3, timeout=timeout)(skipping)
    for words in (first, second):
        assert words[:-1] == ["nothing"] * SKIPPED  # also where rank 1 came late
        assert f"RuntimeError: rank 2 did not come to step {SKIPPED}" in words[-1]
        assert "expected step() equally often" in words[-1]
    assert skips[: SKIPPED + 1] == ["nothing"] * (SKIPPED + 1)


def on_other_ranks() -> list[str]:
    """A matrix on the first two ranks, in the optimizers of all."""
    p = distributed(given("elsewhere", (8, 12)), DeviceMesh("cpu", [0, 1]), [Shard(0)])
    params = [nn.Parameter(p)]
    return words_of(ps.Muon(params, lr=0.1, plan="owner"), params, 1)


def unequal_numbers_of_groups() -> list[str]:
    """torch names a group that only its members make by how many groups a rank is in."""
    params = [matrix("a", Shard(0), mesh=mesh_of(2, 2)["tp"])]
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    return words_of(ps.Muon(params, lr=0.1, plan="owner"), params, 1)


def group_of_an_exchange() -> list[str]:
    """Ranks that gather a copy of HSDP, and have met in larger sets alone, meet by themselves."""
    grid = mesh_of(2, 2)
    copies = [matrix("a", Replicate(), Shard(0), mesh=grid)]
    words = words_of(ps.Muon(copies, plan="gather"), copies, 1)
    params = [matrix("a", Shard(0), mesh=grid["tp"])]
    return words + words_of(ps.Muon(params), params, 1)


@pytest.mark.parametrize("case", [unequal_numbers_of_groups, group_of_an_exchange])
def test_groups_of_some_ranks(case, fresh) -> None:
    for words in fresh(4, timeout=timedelta(seconds=10))(case):
        assert set(words) == {"nothing"}


def test_parameters_on_other_ranks(four) -> None:
    for rank, (word,) in enumerate(four(on_other_ranks)):
        assert word == "nothing" if rank < 2 else f"and this is rank {rank}: expected" in word


def one_does_not_come() -> tuple[str, float]:
    """What a rank of a mesh's axis is told in the end, and after how many seconds."""
    params = [matrix("a", Shard(0), mesh=mesh_of(2, 2)["tp"])]
    optimizer = ps.Muon(params)
    words_of(optimizer, params, 1)
    if dist.get_rank() == 0:
        return "nothing", 0.0
    start = time.monotonic()
    return words_of(optimizer, params, 1)[0], time.monotonic() - start


def test_ranks_of_a_mesh_wait_for_as_long_as_the_user_said(fresh) -> None:
    """torch gives the groups of a mesh 30 minutes, whatever init_process_group was told."""
    _, (words, seconds), *others = fresh(4, timeout=timedelta(seconds=4))(one_does_not_come)
    assert "rank 0 did not come to step 1" in words
    assert seconds < 4 + collectives.LOOKED_FOR + 5
    assert [word for word, _ in others] == ["nothing"] * 2


def backends_of_offloaded() -> set[str]:
    """The backends by which parameters on the host are exchanged, where the main one is NCCL."""
    main, swap, used = dist.group.WORLD, dist.all_to_all_single, set()
    backend = dist.get_backend

    def noted(*arguments: Any, group: Any, **options: Any) -> Any:
        used.add("nccl" if group is main else backend(group))
        return swap(*arguments, group=group, **options)

    dist.all_to_all_single = noted
    try:
        params, optimizer = rows("a")
        words_of(optimizer, params)
    finally:
        dist.all_to_all_single = swap
    return used


def test_what_is_on_the_host_does_not_go_by_nccl(two) -> None:
    """FSDP2 with CPUOffloadPolicy, after init_process_group("nccl")."""
    assert two(backends_of_offloaded) == [{"gloo"}] * 2
