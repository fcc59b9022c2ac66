"""Every plan, on every mesh, with every map that it can change, takes the trajectory of one process."""

from __future__ import annotations

import pytest
import torch
from tests.ranks import trajectories
from tests.ranks.launch import needs_gloo

pytestmark = needs_gloo
RANKS = (2, 4)
CASES = [
    (ranks, *case, name)
    for ranks in RANKS
    for case in trajectories.cases(ranks)
    for name in trajectories.maps_of(ranks, *case)
]


@pytest.fixture(scope="module")
def reference():
    """The parameters after all steps of one process."""
    return trajectories.reference()


@pytest.fixture(scope="module")
def found(ranks_of, tmp_path_factory, reference):
    """What every rank ended with, by the number of ranks."""
    folder = tmp_path_factory.mktemp("trajectories")
    torch.save(reference, folder / "reference.pt")
    module = trajectories.__name__
    return {ranks: ranks_of(ranks).main(module, folder / str(ranks)) for ranks in RANKS}


@pytest.mark.parametrize(("ranks", "way", "plan", "name"), CASES)
def test_the_trajectory_of_one_process(ranks, way, plan, name, found) -> None:
    for there in found[ranks]:
        assert max(there[way, plan]["off"][name]) < 1e-10


def test_every_plan_meets_every_map_and_every_mesh_all_that_it_can_change() -> None:
    met = {(plan, name) for _, _, plan, name in CASES}
    assert met == {(p, name) for p in ("auto", *trajectories.PLANS) for name in trajectories.MAPS}


def test_the_networks_move_and_the_maps_differ(reference) -> None:
    start = [p.detach() for p in trajectories.Networks().parameters()]
    end = reference
    assert min((p - q).abs().max() for p, q in zip(start, end, strict=True)) > 1e-3
    firsts = end[:: len(end) // len(trajectories.MAPS)]
    for i, p in enumerate(firsts):
        for q in firsts[:i]:
            assert (p - q).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("ranks", "way", "asked", "name", "taken"),
    [
        (4, "ddp", "replicated", "full space", {"replicated"}),
        (2, "ddp", "local", "h=1", {"local"}),
        (2, "fsdp", "gather", "warm", {"gather"}),
        (4, "fsdp", "owner", "full space", {"owner"}),
        (4, "fsdp, columns", "owner", "warm", {"owner"}),
        (4, "hsdp", "owner", "warm", {"owner"}),
        (4, "tp+fsdp", "owner", "warm", {"owner"}),  # two sides of a matrix are cut
        (2, "tp", "owner", "deflated", {"owner", "none"}),
    ],
)
def test_the_plan_that_was_asked_for_is_taken(ranks, way, asked, name, taken, found) -> None:
    texts = found[ranks][0][way, asked]["routes"][name]
    plans = {
        next((plan for plan in trajectories.PLANS if f"; {plan} on {ranks}" in text), "none")
        if way != "tp+fsdp"
        else next(plan for plan in trajectories.PLANS if f"; {plan} on" in text)
        for text in texts
    }
    assert plans == taken, texts


def test_the_parts_are_even_uneven_and_empty() -> None:
    rows = [len(part) for size in trajectories.SIZES[1:] for part in torch.arange(size).chunk(4)]
    counts = {size: len(torch.arange(size).chunk(4)) for size in trajectories.SIZES[1:]}
    assert counts[9] == 3  # of four ranks the last has nothing
    assert {5, 3} <= set(rows)
