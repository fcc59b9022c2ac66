"""Accidents on some ranks only: all ranks go on alike, or all raise the same clear error."""

from __future__ import annotations

import math

import pytest
from tests.ranks import faults
from tests.ranks.launch import launched, needs_gloo

pytestmark = needs_gloo
RANKS = (2, 4)
over_ranks = pytest.mark.parametrize("ranks", RANKS)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank saw, by the number of ranks."""
    folder = tmp_path_factory.mktemp("faults")
    return {ranks: launched(faults.__name__, ranks, folder / str(ranks)) for ranks in RANKS}


@over_ranks
@pytest.mark.parametrize("name", faults.MAPS)
@pytest.mark.parametrize("plan", ["auto", "local", "owner", "gather"])
@pytest.mark.parametrize("missing", [False, True])
def test_experts_on_their_own_ranks(ranks, name, plan, missing, found) -> None:
    """Uneven on two ranks; on four the last has no expert. A missing gradient counts as zero."""
    for there in found[ranks]:
        off, routes = there["experts", name, plan, missing]
        assert off < 1e-10
        assert ("owner on" if plan == "owner" else f"local on {ranks} ranks") in routes


@over_ranks
@pytest.mark.parametrize("plan", ["owner", "gather"])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_a_gradient_that_one_rank_has_alone(ranks, plan, algorithm, found) -> None:
    for there in found[ranks]:
        assert there["missing", plan, algorithm] < 1e-10


@over_ranks
@pytest.mark.parametrize("plan", ["owner", "gather"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_on_one_rank_skips_the_parameter_on_all(ranks, plan, value, found) -> None:
    for there in found[ranks]:
        (stayed, moved), *_ = [
            result
            for key, result in there.items()
            if key[:2] == ("nonfinite", plan) and math.isnan(key[2]) == math.isnan(value)
        ]
        assert stayed == 0
        assert moved


@over_ranks
@pytest.mark.parametrize("plan", ["owner", "gather"])
@pytest.mark.parametrize("name", faults.WITH_STATE)
def test_a_monitor_looks_at_some_steps_of_a_map_with_state(ranks, plan, name, found) -> None:
    for there in found[ranks]:
        assert there["looked at", name, plan] < 1e-10
        assert there["after a look", name, plan] < 1e-10


@over_ranks
@pytest.mark.parametrize("plan", ["owner", "gather"])
@pytest.mark.parametrize("name", faults.WITH_STATE)
def test_experts_go_on_where_another_plan_stopped(ranks, plan, name, found) -> None:
    """The other plan leaves a carry in other parts; taken for no carry, the map would start anew."""
    for there in found[ranks]:
        assert there["other plan", name, plan] < 1e-10


@over_ranks
def test_experts_take_their_parts_of_a_whole_state_and_leave_parts(ranks, found) -> None:
    """A whole tensor of which each rank goes on with its own rows would be right on no rank."""
    for there in found[ranks]:
        assert there["whole state"] < 1e-10


@over_ranks
@pytest.mark.parametrize("plan", ["owner", "gather"])
def test_gradients_are_not_kept_after_the_step(ranks, plan, found) -> None:
    for there in found[ranks]:
        assert there["gradients kept", plan] == 0


@over_ranks
@pytest.mark.parametrize("plan", ["auto", "owner", "gather"])
def test_momentum_in_eight_bits(ranks, plan, found) -> None:
    for there in found[ranks]:
        assert there["eight bits", plan] < 1e-10


@over_ranks
def test_momentum_in_eight_bits_needs_whole_blocks(ranks, found) -> None:
    for there in found[ranks]:
        for word in there["eight bits in part"]:
            assert "expected rows of a multiple of 128 entries that are not cut" in word


@over_ranks
def test_a_rank_that_raises_before_the_step(ranks, found) -> None:
    words = [there["bad option"] for there in found[ranks]]
    assert all(each == words[0] for each in words)
    first, unchanged, after = words[0]
    assert f"failed on 1 of {ranks} ranks" in first
    assert "rank 1: ValueError: momentum=7: expected 0 ≤ momentum < 1" in first
    assert (unchanged, after) == ("True", "nothing")


@over_ranks
def test_a_map_that_fails_on_one_rank(ranks, found) -> None:
    words = [there["broken map"] for there in found[ranks]]
    assert all(each == words[0] for each in words)
    assert f"failed on 1 of {ranks} ranks" in words[0][0]
    assert "rank 1: ValueError: this map is broken" in words[0][0]


@over_ranks
@pytest.mark.parametrize(("place", "plan"), faults.FAILING)
def test_a_rank_that_fails_outside_the_map(ranks, place, plan, found) -> None:
    """Where memory runs out, say: the others waited for it, or found it at another step."""
    words = [there["fails", place, plan] for there in found[ranks]]
    assert all(each == words[0] for each in words)
    first, second = words[0]
    assert f"rank 1: MemoryError: {place}" in first
    assert second == "nothing"


@over_ranks
@pytest.mark.parametrize("plan", ["owner", "replicated"])
def test_a_state_that_one_rank_has_cleared(ranks, plan, found) -> None:
    for there in found[ranks]:
        first, second = there["cleared", plan]
        assert first == "nothing"
        assert (
            "the optimizer's state of 9×12 torch.float64 in group 0 lacks on rank 1 what" in second
        )
        assert "clear the state on all" in second


@over_ranks
def test_ranks_at_different_steps(ranks, found) -> None:
    for there in found[ranks]:
        assert f"from 0 to {ranks - 1}: expected the same step on all ranks" in there["out of step"]


@over_ranks
@pytest.mark.parametrize("case", ["before sharding", "after a step"])
def test_fully_shard_after_muon_for_is_refused(ranks, case, found) -> None:
    for there in found[ranks]:
        assert "0.weight and 5 more have been replaced in the model" in there[case][0]
        assert "made after the last of these calls" in there[case][0]


@over_ranks
def test_zero_redundancy_optimizer(ranks, found) -> None:
    for there in found[ranks]:
        assert there["zero redundancy"] < 1e-10


@over_ranks
@pytest.mark.parametrize("name", ["warm", "rows"])
def test_zero_redundancy_optimizer_goes_on_with_layers_that_had_no_gradient(
    ranks, name, found
) -> None:
    """It fills the state itself: carries that stand for nothing made layers NaN, or stopped them."""
    for there in found[ranks]:
        assert there["resumed", name] == 0


@over_ranks
@pytest.mark.parametrize("plan", ["auto", "owner", "gather"])
def test_rounding_errors_are_in_the_state_of_ranks_without_rows(ranks, plan, found) -> None:
    """Otherwise ranks gather different tensors, and the process is aborted."""
    for there in found[ranks]:
        keys = there["compensated", plan]["keys"]
        assert all(each == keys[0] for each in keys)
        for name in ("matrix", "experts", "table"):
            assert "rounding_error" in keys[0][name]


@over_ranks
@pytest.mark.parametrize("plan", ["auto", "owner", "gather"])
def test_a_checkpoint_has_rounding_errors_of_parameters_without_a_gradient(
    ranks, plan, found
) -> None:
    for there in found[ranks]:
        its = there["compensated", plan]
        for name in ("matrix", "experts", "table"):
            assert "rounding_error" in its["gathered"][f"late_{name}"]
        assert its["loaded"] == 0


def test_uneven_strided_shards_are_refused(found) -> None:
    for there in found[4]:
        assert "that both axes cut evenly" in there["strided"] or "torch:" in there["strided"]
