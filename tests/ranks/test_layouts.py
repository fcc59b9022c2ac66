"""Steps on ranks are those of one process, whatever lies where and whatever happens between them."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks.launch import needs_gloo
from tests.ranks.twins import (
    WARM,
    Twins,
    distributed,
    given,
    matrix,
    mesh_of,
    placed_as,
    raised,
    whole,
)
from tests.routing.sample_models import SmallGPT
from tests.spectra import gaussian, with_singular_values
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import polarstep as ps

pytestmark = needs_gloo
on_2_and_4 = pytest.mark.parametrize("ranks", [2, 4])
SHARED = pytest.mark.parametrize("plan", ["owner", "gather"])
EXPERTS = (5, 9, 12)  # on four ranks: two, two, one, none
ROWS = (9, 12)
SKETCHED = ps.LowRank(4, 2, always_sketch=True, inner=ps.NewtonSchulz(3, "quintic"))
WITH_STATE: dict[str, dict[str, Any]] = {
    "warm": {"polar": WARM, "nonfinite": "skip"},
    "deflated": {"polar": ps.Deflated(SKETCHED), "nonfinite": "skip"},
    "rows": {"transform": ps.NormalizedRows(), "nonfinite": "skip"},
}
with_state = pytest.mark.parametrize("name", WITH_STATE)


def placement(plan: str) -> tuple[Any, ...]:
    """Rows on the ranks; copies for the plan that needs them."""
    return () if plan == "replicated" else (Shard(0),)


# Experts, which lie on their ranks as whole matrices


def refused_shard() -> str:
    return raised(lambda: ps.NewtonSchulz()(matrix("W", Shard(0)).detach()))


def test_a_polar_map_refuses_shards(two) -> None:
    """Some of its operations would be lost on them without a word."""
    for message in two(refused_shard):
        assert "expected a whole matrix, got a DTensor; call M.full_tensor()" in message


def experts(plan: str, missing: bool, options: dict[str, Any]) -> tuple[float, str]:
    twins = Twins([EXPERTS], Shard(0), plan=plan, **options)
    first = -(-EXPERTS[0] // dist.get_world_size())  # the first rank's experts

    def zeros(i: int, G: Tensor) -> None:
        G[:first] = 0

    for step in range(3):
        if missing and step == 1:
            twins.step(zeros, missing={0} if dist.get_rank() == 0 else ())
        else:
            twins.step()
    assert all(isinstance(X, DTensor) for X in twins.ours.state[twins.params[0]].values())
    return twins.off(), str(twins.ours.routes)


@on_2_and_4
@pytest.mark.parametrize("options", [{}, {"polar": WARM}], ids=["full", "warm"])
@pytest.mark.parametrize("plan", ["auto", "local", "owner", "gather"])
@pytest.mark.parametrize("missing", [False, True])
def test_experts_on_their_own_ranks(ranks, options, plan, missing, ranks_of) -> None:
    """Uneven on two ranks; on four the last has no expert. A missing gradient counts as zero."""
    for off, routes in ranks_of(ranks)(experts, plan, missing, options):
        assert off < 1e-12
        assert ("owner on" if plan == "owner" else f"local on {ranks} ranks") in routes


def other_plan(name: str, plan: str) -> float:
    twins = Twins([EXPERTS], Shard(0), **WITH_STATE[name])
    for its in ("local", plan, "local", plan, "local"):
        twins.ours.param_groups[0]["plan"] = its
        twins.step()
    return twins.off()


@on_2_and_4
@SHARED
@with_state
def test_experts_go_on_where_another_plan_stopped(ranks, plan, name, ranks_of) -> None:
    """The other plan leaves a carry in other parts; taken for no carry, the map would start anew."""
    assert max(ranks_of(ranks)(other_plan, name, plan)) < 1e-12


# How other code may have left a carry: in other parts, or whole.
ELSEWHERE: dict[str, Any] = {
    "rows": lambda X: X.redistribute(placements=[Shard(1)]),
    "columns": lambda X: X.redistribute(placements=[Shard(2)]),
    "copies": lambda X: X.redistribute(placements=[Replicate()]),
    "whole": lambda X: X.full_tensor(),
}


def carry_elsewhere(where: str) -> float:
    twins = Twins([EXPERTS, EXPERTS], Shard(0), polar=WARM)
    twins.step()
    its = twins.ours.state[twins.params[0]]
    its["basis"] = ELSEWHERE[where](its["basis"])
    twins.step(absent={1})
    twins.step()
    assert isinstance(its["basis"], DTensor)
    assert its["basis"].placements == (Shard(0),)
    return twins.off()


@on_2_and_4
@pytest.mark.parametrize("where", ELSEWHERE)
def test_experts_take_their_parts_of_a_carry_that_lies_elsewhere(ranks, where, ranks_of) -> None:
    """A whole tensor of which each rank goes on with its own rows would be right on no rank."""
    assert max(ranks_of(ranks)(carry_elsewhere, where)) < 1e-12


def other_plan_at_a_first_step() -> float:
    """Another plan for the first stack, at the very step that makes the state of the second."""
    stack = [(5, 9, 12)]
    params = [matrix(name, Shard(0), shape=EXPERTS) for name in "ab"]
    alone = [nn.Parameter(given(name, EXPERTS)) for name in "ab"]
    ours, one = (ps.Muon([{"params": [p]} for p in its], polar=WARM) for its in (params, alone))
    for step, (plan, has) in enumerate((("local", 1), ("owner", 2), ("owner", 2), ("local", 2))):
        ours.param_groups[0]["plan"] = plan
        for i, (p, q) in enumerate(zip(params, alone, strict=True)):
            q.grad = given(f"gradient {i}", stack[0], step) if i < has else None
            p.grad = None if q.grad is None else placed_as(p, q.grad)
        ours.step()
        one.step()
    return max(float((whole(p) - q).abs().max()) for p, q in zip(params, alone, strict=True))


def test_another_plan_beside_a_first_step(four) -> None:
    """Its results were replaced by those of the last local step, and ranks hung."""
    assert max(four(other_plan_at_a_first_step)) < 1e-12


def through_checkpoints(shape: tuple[int, ...], matrices: int, polar: Any, where: Any) -> float:
    """A checkpoint of whole tensors after each step."""
    mesh = None if where is None else init_device_mesh("cpu", where[0])
    twins = Twins([shape], *([Shard(1)] if where is None else where[1]), mesh=mesh, polar=polar)
    model, options = nn.Module(), StateDictOptions(full_state_dict=True)
    model.p = twins.params[0]
    for _ in range(4):
        twins.step()
        its = get_optimizer_state_dict(model, twins.ours, options=options)
        assert its["state"]["p"]["peak"].shape == (matrices,)
        assert its["state"]["p"]["basis"].shape == twins.one.state[twins.twins[0]]["basis"].shape
        set_optimizer_state_dict(model, twins.ours, its, options=options)
    return twins.off_of_values()


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_experts_on_a_mesh_with_an_axis_of_one_rank(cut, first, four) -> None:
    """The axis cuts a dimension that a peak and a carry do not have."""
    where = ((4, 1), [Shard(0), Shard(cut)]) if first else ((1, 4), [Shard(cut), Shard(0)])
    assert max(four(through_checkpoints, EXPERTS, 5, WARM, where)) < 1e-12


def test_filters_that_are_cut_by_input_channels(four) -> None:
    """Their columns are cut elsewhere than a carry of as many columns would be."""
    polar = ps.LowRank(2, 1, 0, sketch=ps.Warm(), always_sketch=True)
    assert max(four(through_checkpoints, (4, 6, 3, 3), 1, polar, None)) < 1e-12


# Gradients that some ranks lack, or that are not finite


def missing_on_others(plan: str, algorithm: str) -> float:
    """The gradient of the middle of three matrices is there on the first rank alone."""
    options = {} if algorithm == "muon" else {"algorithm": algorithm}
    twins = Twins([ROWS] * 3, Shard(0), plan=plan)
    if options:
        groups = [{"params": its, "lr": 0.1, **options} for its in (twins.params, twins.twins)]
        twins.ours, twins.one = (ps.Muon([group]) for group in groups)
    first = -(-ROWS[0] // dist.get_world_size())

    def alone(i: int, G: Tensor) -> None:
        if i == 1:
            G[first:] = 0

    for _ in range(3):
        twins.step(alone, missing={1} if dist.get_rank() else ())
    return twins.off()


@on_2_and_4
@SHARED
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_gradient_that_one_rank_has_alone(ranks, plan, algorithm, ranks_of) -> None:
    assert max(ranks_of(ranks)(missing_on_others, plan, algorithm)) < 1e-12


def nonfinite_on_one(plan: str, value: float) -> tuple[float, bool]:
    """A bad entry on the last rank that has rows."""
    twins = Twins([ROWS] * 3, Shard(0), plan=plan, nonfinite="skip", polar=WARM)
    before = [q.detach().clone() for q in twins.twins]

    def bad(i: int, G: Tensor) -> None:
        if i == 1:
            G[-1, -1] = value

    twins.step(bad)
    moved = [float((whole(p) - q).abs().max()) for p, q in zip(twins.params, before, strict=True)]
    return moved[1], min(moved[0], moved[2]) > 1e-3


@on_2_and_4
@SHARED
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_on_one_rank_skips_the_parameter_on_all(
    ranks, plan, value, ranks_of
) -> None:
    assert ranks_of(ranks)(nonfinite_on_one, plan, value) == [(0.0, True)] * ranks


def kept_gradients(plan: str) -> int:
    """How many of two gradients are still in memory after a step and zero_grad()."""
    twins = Twins([ROWS] * 2, Shard(0), plan=plan)
    twins.step()
    parts = [weakref.ref(p.grad._local_tensor) for p in twins.params]
    twins.ours.zero_grad()
    return sum(part() is not None for part in parts)


@SHARED
def test_gradients_are_not_kept_after_the_step(plan, two) -> None:
    assert two(kept_gradients, plan) == [0, 0]


# Hooks and monitors, for which all ranks gather what they share otherwise


def looked_at(name: str, plan: str, every: int, skipped: int) -> float:
    """A step is skipped: one that is sampled, or one that follows it and finds a whole carry."""
    twins = Twins([ROWS], Shard(0), plan=plan, **WITH_STATE[name])
    ps.certificate.Monitor(twins.ours, every=every)
    for step in range(8):
        twins.step(lambda i, G, step=step: G[0].fill_(math.nan) if step == skipped else None)
    return twins.off_of_values()


@on_2_and_4
@SHARED
@with_state
@pytest.mark.parametrize(("every", "skipped"), [(3, 6), (2, 3)])
def test_a_monitor_looks_at_some_steps(ranks, plan, name, every, skipped, ranks_of) -> None:
    assert max(ranks_of(ranks)(looked_at, name, plan, every, skipped)) < 1e-12


def monitored() -> tuple[int, float]:
    """How many values two monitors have in common, and how far those of the ranks are off."""
    twins = Twins([(8, 12)], Shard(0))
    monitors = [ps.certificate.Monitor(each, every=2) for each in (twins.ours, twins.one)]

    def zeros(i: int, G: Tensor) -> None:
        G[2:4] = 0

    for step in range(6):
        if step in (0, 3, 4):
            twins.step(zeros, missing={0} if dist.get_rank() == 1 else ())
        else:
            twins.step(absent={0} if step == 5 else ())
    mine, theirs = (each.rows for each in monitors)
    assert [sorted(row) for row in mine] == [sorted(row) for row in theirs]
    pairs = [
        (row[key], its[key])
        for row, its in zip(mine, theirs, strict=True)
        for key in row
        if isinstance(row[key], float)
    ]
    return len(pairs), max(abs(a - b) for a, b in pairs)


def test_a_monitor_where_a_gradient_is_missing_on_one_rank(four) -> None:
    for count, off in four(monitored):
        assert count == 18
        assert off < 1e-8


def hooked(plan: str) -> tuple[int, float]:
    """How many buckets the hook of rank 0 saw."""
    polar, seen = ps.LowRank(4, 2, always_sketch=True), []
    twins = Twins([ROWS] * 3, *placement(plan), plan=plan, polar=polar)
    if dist.get_rank() == 0:
        twins.ours.register_polar_hook(lambda bucket: seen.append(bucket.M.shape))
    twins.step()
    twins.step()
    return len(seen), twins.off()


@pytest.mark.parametrize("plan", ["owner", "replicated", "gather"])
def test_a_hook_on_one_rank_sees_whole_matrices(plan, four) -> None:
    """As where rank 0 alone writes a log; the others took another plan and waited for it."""
    for rank, (seen, off) in enumerate(four(hooked, plan)):
        assert seen == (2 if rank == 0 else 0)
        assert off < 1e-12


def copies_of(count: int) -> tuple[int, float]:
    """How many broadcasts two steps of so many matrices make, and how far they are off."""
    made, known = [], dist.broadcast

    def noted(*arguments: Any, **options: Any) -> Any:
        made.append(known(*arguments, **options))
        return made[-1]

    twins = Twins([ROWS] * count, plan="replicated", polar=WARM)
    dist.broadcast = noted
    try:
        twins.step()
        twins.step()
    finally:
        dist.broadcast = known
    return len(made), twins.off()


@pytest.mark.parametrize(("count", "broadcasts"), [(1, 2), (2, 0), (5, 0)])
def test_copies_of_which_few_ranks_compute_some(count, broadcasts, four) -> None:
    """Each rank sends its own where an all-gather would send more than twice as much."""
    for made, off in four(copies_of, count):
        assert made == broadcasts
        assert off < 1e-12


# Precision and memory


def eight_bits(plan: str) -> float:
    """A matrix, whose rows are cut between ranks, and experts."""
    shapes = [(9, 128), (5, 4, 256)]
    twins = Twins(shapes, Shard(0), plan=plan, momentum_dtype=torch.int8, polar=WARM)
    for _ in range(3):
        twins.step()
    return twins.off()


@on_2_and_4
@pytest.mark.parametrize("plan", ["auto", "owner", "gather"])
def test_momentum_in_eight_bits(ranks, plan, ranks_of) -> None:
    assert max(ranks_of(ranks)(eight_bits, plan)) < 1e-12


def eight_bits_in_part(shape: tuple[int, ...], dim: int) -> str:
    twins = Twins([shape], Shard(dim), momentum_dtype=torch.int8)
    return raised(twins.step)


@pytest.mark.parametrize(("shape", "dim"), [((9, 12), 0), ((8, 256), 1), ((4, 6, 20), 0)])
def test_momentum_in_eight_bits_needs_whole_blocks(shape, dim, two) -> None:
    """Rows that are no whole blocks, and rows that are cut."""
    for words in two(eight_bits_in_part, shape, dim):
        assert "expected rows of a multiple of 128 entries that are not cut" in words


def narrow(dtype: torch.dtype, plan: str, cut: int | None) -> list[dict[str, Tensor]]:
    """Parameters and states on ranks after three steps, each beside those of one process."""
    transform = ps.NormalizedRows(0.999)
    polar = ps.NewtonSchulz(5, "quintic")
    shapes = [(9, 16), (16, 9), (9, 16)]
    placements = () if cut is None else (Shard(cut),)
    twins = Twins(
        shapes, *placements, plan=plan, dtype=dtype, lr=0.01, polar=polar, transform=transform
    )
    for k in range(3):
        twins.step(lambda i, G: G.mul_(1e-4))
        for its in (*twins.ours.state.values(), *twins.one.state.values()) if k == 0 else ():
            getattr(its["rows"], "_local_tensor", its["rows"]).fill_(1)  # 0.999 is 1 in bfloat16
    return [
        {"value": torch.stack([whole(p), q.detach()])}
        | {
            name: torch.stack([whole(X), twins.one.state[q][name]])
            for name, X in twins.ours.state[p].items()
        }
        for p, q in zip(twins.params, twins.twins, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("plan", "cut"), [("owner", 0), ("owner", 1), ("gather", 0), ("replicated", None)]
)
def test_what_narrow_parameters_keep_in_float32_is_not_rounded_on_the_way(plan, cut, dtype, two):
    """9 rows are uneven on two ranks, so a number of v does not always begin at four bytes."""
    for its in (each for there in two(narrow, dtype, plan, cut) for each in there):
        for ours, theirs in its.values():
            # 16-bit products, and T after them, may differ in last digits with the size of the batch.
            torch.testing.assert_close(ours, theirs, rtol=0.01, atol=0.01)
        low, v = 0.999**2, its["rows"]
        assert v.dtype == torch.float32
        assert torch.all((v > low) & (v < low + 5e-4))  # a mean of T² is below 1/4 here


def peaks() -> list[tuple[torch.dtype, torch.dtype]]:
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    params = [nn.Parameter(matrix("peak", Shard(0)).detach().to(dtype)) for dtype in kinds]
    optimizer = ps.Muon(params, lr=0.1, plan="owner", polar=ps.NewtonSchulz(1, "quintic"))
    for _ in range(66):  # momentum is looked at after 64 of them
        for p in params:
            p.grad = p.detach()
        optimizer.step()
    states = [optimizer.state[p] for p in params]
    return [(its["momentum_buffer"].dtype, its["peak"].dtype) for its in states]


def test_a_peak_has_the_precision_of_its_momentum(two) -> None:
    """As in one process, and in the placeholders of a checkpoint."""
    for found in two(peaks):
        assert all(momentum == peak for momentum, peak in found)


def in_channels_last(X: Tensor) -> Any:
    part = X.chunk(dist.get_world_size())[dist.get_rank()]
    part = part.contiguous(memory_format=torch.channels_last)
    return DTensor.from_local(part, mesh_of(), [Shard(0)], run_check=False)


def copied_in_channels_last(X: Tensor) -> Tensor:
    return X.contiguous(memory_format=torch.channels_last)


def channels_last(plan: str) -> float:
    """Without a gradient the momentum has faded when it is looked at, and is set to zero."""
    place = copied_in_channels_last if plan == "replicated" else in_channels_last
    polar = ps.NewtonSchulz(3, "quintic")
    twins = Twins([(8, 4, 3, 3)], place=place, plan=plan, momentum=0.1, polar=polar)
    for step in range(66):
        twins.step(lambda i, G, step=step: G.mul_(step < 3))
    return twins.off_of_values()


@pytest.mark.parametrize("plan", ["owner", "replicated", "gather"])
def test_filters_in_channels_last(plan, four) -> None:
    assert max(four(channels_last, plan)) < 1e-12


# Numbers that depend on the whole


SHAPES = ((18, 40), (40, 18), (20, 20))
HEAD = ps.LowRank(10, 2, 0, inner=ps.NewtonSchulz(5, "quintic"), always_sketch=True)
BY_NORM: dict[str, ps.PolarMap] = {
    "sketched": HEAD,
    "warm": ps.LowRank(10, 2, 0, sketch=ps.Warm(), always_sketch=True),
    "rest lifted": ps.Deflated(HEAD, ps.NewtonSchulz(1, "flat")),
}
# How many directions are there, and how far the first four tower over the others.
SPECTRA = {"four of 100": (18, 100.0), "rank one": (1, 1.0), "rank two": (2, 1.0), "zero": (0, 1.0)}
CASES = list(product(SHAPES, SPECTRA))


def of_spectrum(i: int, G: Tensor) -> None:
    shape, spectrum = CASES[i]
    there, leading = SPECTRA[spectrum]
    sigma = torch.zeros(min(shape), dtype=torch.float64)
    sigma[:there] = 1
    sigma[:4] *= leading
    G.copy_(with_singular_values(sigma, *shape, seed=len(spectrum)))


def by_norm(name: str, plan: str, cut: int | None) -> float:
    placements = () if cut is None else (Shard(cut),)
    options = {"polar": BY_NORM[name], "shape_scale": "rms", "lr": 1.0}
    twins = Twins([shape for shape, _ in CASES], *placements, plan=plan, **options)
    twins.step(of_spectrum)
    twins.step(of_spectrum)
    return twins.off_of_values()


@pytest.mark.parametrize("name", BY_NORM)
@pytest.mark.parametrize(
    ("plan", "cut"), [("owner", 0), ("owner", 1), ("gather", 0), ("replicated", None)]
)
def test_steps_by_their_norm_have_one_norm(name, plan, cut, two) -> None:
    """``shape_scale="rms"`` divides by ‖T‖_F, also where it is bounded by ℓ/9."""
    assert max(two(by_norm, name, plan, cut)) < 1e-9


def measured(
    net: nn.Module, place: Callable[[Any, Tensor], Tensor] = lambda p, G: G
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """The factors of all groups that muon_for measures, and the parameters, after two steps."""
    optimizer = ps.muon_for(net)
    for step in range(2):
        for i, p in enumerate(net.parameters()):
            p.grad = place(p, gaussian(*p.shape, seed=100 * step + i))
        optimizer.step()
    factors = {group["name"]: group["lr_factor"] for group in optimizer.param_groups}
    return factors, {name: whole(p) for name, p in net.named_parameters()}


def gpt() -> nn.Module:
    """A GPT of float64 with 50 rows in the embedding, which four ranks do not share evenly."""
    net = SmallGPT("untied").double()
    for i, p in enumerate(net.parameters()):
        p.data = gaussian(*p.shape, seed=i) / (3 + i)
    return net


def measured_on_ranks(way: str) -> tuple[dict[str, float], dict[str, Tensor]]:
    net = gpt()
    if way == "columns of the head":
        placements = [Replicate(), Shard(1)]
        head = distributed(net.head.weight.detach(), mesh_of(2, 2), placements)
        net.head.weight = nn.Parameter(head)
    else:
        fully_shard(net, mesh=mesh_of() if way == "fully_shard" else mesh_of(2, 2))
    return measured(net, placed_as)


@pytest.mark.parametrize("way", ["fully_shard", "HSDP", "columns of the head"])
def test_a_rate_that_is_measured_is_the_same_number(way, four) -> None:
    factors, params = measured(gpt())
    assert len({factors["embedding"], factors["embedding-2"], factors["head"], 0.15, 1.0}) == 5
    for its_factors, its_params in four(measured_on_ranks, way):
        assert its_factors == factors
        torch.testing.assert_close(its_params, params, atol=1e-9, rtol=0)
