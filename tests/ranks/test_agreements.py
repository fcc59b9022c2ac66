"""Whatever decides which collectives a step makes is agreed on: no rank waits for others in vain."""

from __future__ import annotations

import pytest
from tests.ranks import agreements
from tests.ranks.launch import launched, needs_gloo

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


@pytest.mark.parametrize("where", ["plain", "hsdp"])
def test_copies_that_drift_later_are_told_of(where, found) -> None:
    """As after one backward pass in no_sync(), later in a run."""
    told = found[0][f"later {where}"]
    assert all(there[f"later {where}"] == told for there in found)
    shown = [bool(words) for words in told]
    assert shown == [False, False, False, True, False, False]
    assert "the gradients of c (8×12 torch.float64) in group 0 differ between ranks" in told[3][0]


def test_ranks_with_other_parameters_are_told(found) -> None:
    words = [there["other parameters"] for there in found]
    assert all(each == words[0] for each in words)
    told = "rank 0: 3 parameters in common with ranks (0, 1, 2, 3), from number 3 on: 8×12 torch.float64"
    assert told in words[0][0]
    assert "rank 1: 2 parameters in common" in words[0][0]


@pytest.mark.parametrize("kind", agreements.COPIES)
def test_copies_that_differ_are_told_of(kind, found) -> None:
    """As without DDP, or after a backward pass in no_sync(): all ranks say so at the next step."""
    told = found[0]["copies"][kind]
    assert all(there["copies"][kind] == told for there in found)
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


def test_ranks_with_parameters_in_another_order_are_told(found) -> None:
    """They would mix the rows of two matrices of one shape."""
    for there in found:
        (word,) = there["order"]
        assert "rank 0: 3 parameters in common with ranks (0, 1, 2, 3), from number 2 on: b" in word
        assert "rank 1: 3 parameters in common with ranks (0, 1, 2, 3), from number 2 on: c" in word


def test_a_group_that_one_rank_has_added(found) -> None:
    for there in found:
        first, second = there["added"]
        assert first == "nothing"
        assert "rank 0: 1 parameters in common with ranks (0, 1, 2, 3); rank 1" in second
        assert "rank 1: 2 parameters in common with ranks (0, 1, 2, 3), from number 2 on" in second
        assert "a group that is added, on all of them" in second


@pytest.mark.parametrize("option", agreements.OPTIONS)
def test_ranks_with_other_options_are_told(option, found) -> None:
    """Nothing has changed then, and the run goes on when they have been put right."""
    words = [there["options"][option] for there in found]
    assert all(each == words[0] for each in words)
    first, unchanged, after = words[0]
    assert f"{option} of group 'muon-2' is" in first
    assert "on ranks 0, 2, 3 and" in first
    assert "expected the same options on all ranks" in first
    assert (unchanged, after) == ("True", "nothing")


def test_rates_may_differ_in_their_last_digit(found) -> None:
    for there in found:
        assert there["last digit"] == ["nothing"]


def test_a_failure_on_a_later_axis_reaches_ranks_of_the_earlier(found) -> None:
    for there in found:
        (word,) = there["later axis"]
        assert "weight_decay of group 'muon-2' is 0.0 on rank 1 and 0.1 on rank 3" in word


def test_a_sum_that_some_ranks_lack(found) -> None:
    """The ranks that have it would wait for the others to sum."""
    for there in found:
        first, second = there["a sum"]
        assert first == "nothing"
        assert "the gradient of b (8×12 torch.float64) in group 0 is placed otherwise" in second


def test_parts_of_another_shape_on_some_ranks(found) -> None:
    for there in found:
        assert "failed on 2 of 4 ranks" in there["parts"]
        assert "rank 3: ValueError: a parameter of shape (10, 6)" in there["parts"]


def test_a_map_that_fails_on_one_rank_while_all_gather(found) -> None:
    """The other matrices of the step are gathered and updated, and all ranks raise when it ends."""
    for there in found:
        (word,), off = there["bad map, gathered"]
        assert "rank 1: ValueError: this map is broken" in word
        assert off < 1e-10


def test_a_rule_that_fails_on_one_rank(found) -> None:
    for there in found:
        words = there["bad start of a rule"]
        assert all("rank 1: OSError: no memory" in word for word in words)
        words = there["bad step of a rule"]
        assert all("rank 1: OSError: no memory" in word for word in words)


def test_a_monitor_on_one_rank_is_refused(found) -> None:
    for there in found:
        assert "make a Monitor on every rank" in there["monitor on one"][0]


def test_a_monitor_where_a_gradient_is_missing_on_one_rank(found) -> None:
    for there in found:
        count, off = there["monitor"]
        assert count == 18
        assert off < 1e-8


@pytest.mark.parametrize("cut", [1, 2, -1, -2])
def test_experts_on_a_mesh_with_an_axis_of_one_rank(cut, found) -> None:
    """The axis cuts a dimension that a peak and a carry do not have."""
    for there in found:
        assert there["axis of one", cut] < 1e-10


def test_filters_that_are_cut_by_input_channels(found) -> None:
    """Their columns are cut elsewhere than a carry of as many columns would be."""
    for there in found:
        assert there["channels"] < 1e-10


def test_a_checkpoint_that_one_rank_has_loaded(found) -> None:
    for there in found:
        first, second = there["loaded on one"]
        assert first == "nothing"
        assert "from 0 to 2: expected the same step on all ranks" in second
        assert "load one checkpoint on all" in second


def test_a_state_of_another_sharding_is_refused_with_a_remedy(found) -> None:
    for there in found:
        into_sharded, into_plain = there["plain state"]
        assert "is a plain tensor, and the parameter is sharded" in into_sharded
        assert "is a sharded tensor, and the parameter is not sharded" in into_plain
        for word in (into_sharded, into_plain):
            assert "StateDictOptions(full_state_dict=True)" in word


def test_ranks_with_unequal_numbers_of_groups(found) -> None:
    for there in found:
        assert there["unequal groups"] == ["nothing"]


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


@pytest.mark.parametrize("plan", ["owner", "replicated", "gather"])
def test_a_hook_on_one_rank_sees_whole_matrices(plan, found) -> None:
    """As where rank 0 alone writes a log; the others took another plan and waited for it."""
    for rank, there in enumerate(found):
        words, seen, off = there["hook", plan]
        assert words == ["nothing"] * 2
        assert seen == (2 if rank == 0 else 0)
        assert off < 1e-10


def test_a_hook_that_fails_on_one_rank_stops_all_when_the_step_ends(found) -> None:
    for there in found:
        for word in there["bad hook"]:
            assert "failed on 1 of 4 ranks" in word
            assert "rank 0: OSError: the disk is full" in word


def test_a_map_that_fails_on_the_experts_of_one_rank(found) -> None:
    """The other matrices of the step are updated, and all ranks raise when it ends."""
    for there in found:
        (word,), off = there["bad map"]
        assert "rank 1: ValueError: this map is broken" in word
        assert off < 1e-10


@pytest.mark.parametrize("plan", ["owner", "replicated", "gather"])
def test_filters_in_channels_last(plan, found) -> None:
    for there in found:
        assert there["channels last", plan] < 1e-10


def test_a_peak_has_the_precision_of_its_momentum(found) -> None:
    """As in one process, and in the placeholders of a checkpoint."""
    for there in found:
        assert all(momentum == peak for momentum, peak in there["peaks"])
