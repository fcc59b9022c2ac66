"""Whatever decides which collectives a step makes is agreed on: no rank waits for others in vain."""

from __future__ import annotations

import pytest
from tests.distributed import agreements
from tests.distributed.launch import launched, needs_gloo

pytestmark = needs_gloo
RANKS = 4


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launched(agreements.__name__, RANKS, tmp_path_factory.mktemp("agreements"))


def test_an_error_reaches_ranks_that_have_another_mesh_in_common(found) -> None:
    """Tensor parallelism with FSDP2: some parameters are on an axis of the mesh, others on all of it."""
    words = [there["error"] for there in found]
    assert all(each == words[0] for each in words)
    assert "failed on 1 of 4 ranks" in words[0][0]
    assert "rank 0: ValueError: momentum=7" in words[0][0]
    assert words[0][1] == "nothing"


def test_ranks_at_different_steps_stop_on_all_axes_of_a_mesh(found) -> None:
    for there in found:
        assert "from 0 to 1: expected the same step on all ranks" in there["out of step"][0]


def test_ranks_with_other_parameters_are_told(found) -> None:
    words = [there["other parameters"] for there in found]
    assert all(each == words[0] for each in words)
    assert (
        "rank 0: 3 parameters in common with ranks (0, 1, 2, 3): 8×12 torch.float64" in words[0][0]
    )
    assert "rank 1: 2 parameters in common" in words[0][0]


def test_a_rank_may_have_parameters_of_its_own(found) -> None:
    """The steps of its own groups do not count where ranks compare their steps."""
    for there in found:
        assert there["more parameters"] == ["nothing"] * 3


def test_a_rank_without_a_part_is_told_to_leave_the_parameter_out(found) -> None:
    for rank, there in enumerate(found):
        (word,) = there["elsewhere"]
        assert word == "nothing" if rank < 2 else f"and this is rank {rank}: expected" in word


def test_what_is_on_the_host_does_not_go_by_nccl(found) -> None:
    """FSDP2 with CPUOffloadPolicy, after init_process_group("nccl")."""
    for there in found:
        assert there["offloaded"] == {"gloo"}


@pytest.mark.parametrize("plan", ["owner", "sharded", "replicated", "gather"])
def test_a_hook_on_one_rank_sees_whole_matrices(plan, found) -> None:
    """As where rank 0 alone writes a log; the others took another plan and waited for it."""
    for rank, there in enumerate(found):
        words, seen, off = there["hook", plan]
        assert words == ["nothing"] * 2
        assert seen == (2 if rank == 0 else 0)
        assert off < 1e-10


def test_a_hook_that_fails_on_one_rank_stops_all_at_the_next_step(found) -> None:
    for there in found:
        first, second = there["bad hook"]
        assert first == "nothing"
        assert "failed on 1 of 4 ranks" in second
        assert "rank 0: OSError: the disk is full" in second


def test_a_map_that_fails_on_the_experts_of_one_rank(found) -> None:
    """The other matrices of the step are updated, and all ranks raise at the next."""
    for there in found:
        (first, second), off = there["bad map"]
        assert first == "nothing"
        assert "rank 1: ValueError: this map is broken" in second
        assert off < 1e-10


@pytest.mark.parametrize("change", agreements.CHANGES)
def test_a_kept_basis_is_gathered_again_on_all_ranks_or_none(change, found) -> None:
    """A rank without a part of the basis does not see that the others have loaded theirs."""
    for there in found:
        assert there["kept", change] < 1e-10


@pytest.mark.parametrize("plan", ["owner", "replicated", "gather"])
def test_filters_in_channels_last(plan, found) -> None:
    for there in found:
        assert there["channels last", plan] < 1e-10


def test_a_peak_has_the_precision_of_its_momentum(found) -> None:
    """As in one process, and in the placeholders of a checkpoint."""
    for there in found:
        assert all(momentum == peak for momentum, peak in there["peaks"])
