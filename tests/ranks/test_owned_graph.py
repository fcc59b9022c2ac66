"""What an owner computes is replayed as a graph, with the numbers of launches one by one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.ranks import owned_graph
from tests.ranks.launch import needs_gloo

import polarstep as ps
from polarstep import kernels
from polarstep.ranks.owned_graph import is_worth_a_graph

pytestmark = needs_gloo
RANKS = 2
STEPS, BUCKETS = owned_graph.STEPS, owned_graph.BUCKETS
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="captures nothing without a GPU")
# Steps that are launched: one of each kind, and the first step of a map with state.
LAUNCHED = {"full space": 1, "fresh": 1, "warm": 2, "deflated": 1, "rows, with flags": 2}


@pytest.fixture(scope="module")
def found(ranks_of, tmp_path_factory):
    """What every rank found."""
    return ranks_of(RANKS).main(owned_graph.__name__, tmp_path_factory.mktemp("owned"))


def test_the_numbers_are_those_of_launches_one_by_one(found) -> None:
    for there in found:
        assert {key: each["differ"] for key, each in there.items() if each["differ"]} == {}
        assert all(each["finite"] for each in there.values())


@pytest.mark.parametrize("name", owned_graph.MAPS)
def test_all_steps_are_replayed_but_the_first(name, found) -> None:
    for there in found:
        replays, without = there["owner", name, "nothing"]["replays"]
        assert replays == BUCKETS * (STEPS - LAUNCHED[name])
        assert without == 0


@pytest.mark.parametrize("name", ["full space", "warm"])
def test_copies_have_owners_whose_work_is_replayed(name, found) -> None:
    for there in found:
        replays, _ = there["replicated", name, "nothing"]["replays"]
        assert replays == BUCKETS * (STEPS - LAUNCHED[name])


# Steps in all, and those that are launched. Other matrices, a new optimizer, another map and flags need
# new graphs. A loaded checkpoint, another learning rate and a bad gradient do not.
@pytest.mark.parametrize(
    ("name", "event", "steps", "launched"),
    [
        ("fresh", "without_a_gradient", STEPS + 2, 3),
        ("fresh", "rewound", STEPS + 2, 1),
        ("fresh", "retuned", STEPS, 2),
        ("warm", "without_a_gradient", STEPS + 2, 4),
        ("warm", "rewound", STEPS + 2, 2),
        ("warm", "resumed", STEPS, 3),
        ("warm", "other_flags", STEPS, 3),
        ("rows, with flags", "with_a_bad_gradient", STEPS + 1, 2),
        ("rows, with flags", "other_flags", STEPS, 3),
    ],
)
def test_what_needs_a_new_graph(name, event, steps, launched, found) -> None:
    for there in found:
        replays, without = there["owner", name, event]["replays"]
        assert replays == BUCKETS * (steps - launched)
        assert without == 0


def test_routes_say_what_is_a_graph(found) -> None:
    for there in found:
        for (plan, _, _), each in there.items():
            with_graphs, without = each["routes"]
            assert all(f"; {plan} on {RANKS} ranks" in route for route in (*with_graphs, *without))
            assert all(", map as a CUDA graph" in route for route in with_graphs)
            assert not any("graph" in route for route in without)


@ON_GPU
def test_a_map_that_waits_for_the_device_is_launched(found) -> None:
    for there in found:
        waiting = there["owner", "waiting", "nothing"]
        assert waiting["replays"] == (0, 0)
        assert len(waiting["told"]) == BUCKETS
        assert all("waits for the device" in each for each in waiting["told"])


FULL, WARM = ps.NewtonSchulz(3, "quintic"), ps.LowRank(4, 2, sketch=ps.Warm())


@pytest.mark.parametrize(
    ("different", "captured"),
    [
        ({}, True),
        ({"polar": WARM}, True),
        ({"fused": (True, False)}, False),
        ({"device": "cpu"}, False),
        ({"polar": ps.Exact()}, False),
        ({"m": 2**14, "n": 2**13}, True),  # two matrices of 256 MB in bfloat16
        ({"m": 2**14, "n": 2**13 + 1}, False),
    ],
    ids=str,
)
def test_what_is_captured(different, captured, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda device: True)
    its = {"polar": FULL, "m": 32, "n": 48, "device": "cuda", "fused": (True,)}
    key = SimpleNamespace(**its | different)
    key.device = torch.device(key.device)
    groups = [{"fused": fused, "polar": key.polar} for fused in key.fused]
    members = [SimpleNamespace(group=group) for group in groups]
    assert is_worth_a_graph(SimpleNamespace(key=key, members=members), 2) is captured
