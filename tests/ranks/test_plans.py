"""Bytes and FLOPs of real steps are those of the ledger's formulas."""

from __future__ import annotations

from unittest import mock

import pytest
from tests.ranks import counts
from tests.ranks.launch import needs_gloo

from polarstep import LowRank, Warm
from polarstep.ranks import plans

RANKS = (2, 4)
MIB = 2**20


@pytest.fixture(scope="module")
def found(ranks_of, tmp_path_factory):
    """What every rank counted, by the number of ranks."""
    folder = tmp_path_factory.mktemp("counts")
    return {ranks: ranks_of(ranks).main(counts.__name__, folder / str(ranks)) for ranks in RANKS}


def sent(received) -> float:
    """Bytes of all that a rank received, without what ranks agree on."""
    return received["all-to-all"] + received["all-gather"] + received["maximum"]


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


@needs_gloo
@pytest.mark.parametrize(
    ("ranks", "plan", "name", "shape"),
    [(ranks, *case) for ranks in RANKS for case in counts.cases(ranks)],
)
def test_a_step_costs_what_the_ledger_says(ranks, plan, name, shape, found) -> None:
    results = [there[plan, name, shape] for there in found[ranks]]
    agrees_with_the_ledger(results, plan, name, shape)


@needs_gloo
@pytest.mark.parametrize(("plan", "name", "shape"), counts.copied_cases())
def test_a_step_of_two_copies_costs_what_the_ledger_says(plan, name, shape, found) -> None:
    """A mesh of 2×2: two copies of every matrix, each in two parts (HSDP)."""
    results = [there["copied", plan, name, shape] for there in found[4]]
    agrees_with_the_ledger(results, plan, name, shape, copies=2)


@needs_gloo
@pytest.mark.parametrize(("plan", "name", "shape"), counts.carrying_cases())
def test_what_a_deflated_map_carries_is_counted(plan, name, shape, found) -> None:
    """A warm head's start and the vectors for the norm of the rest go to the owner and back."""
    count, m, n = counts.SHAPES[shape]
    for ranks in RANKS:
        results = [there[plan, name, shape] for there in found[ranks]]
        where = (plan, plans.SharedMatrices(m, n, count, ranks), counts.CARRYING[name])
        expected = plans.bytes_received(*where, itemsize=4)
        assert mean(sent(r[0]) for r in results) == expected


def agrees_with_the_ledger(results, plan, name, shape, copies=1) -> None:
    """The mean over ranks is what the ledger says; the routing table has the same bytes."""
    count, m, n = counts.SHAPES[shape]
    polar = counts.MAPS[name]
    where = (plan, plans.SharedMatrices(m, n, count, len(results), copies=copies), polar)
    expected = plans.bytes_received(*where, itemsize=4)
    assert mean(sent(r[0]) for r in results) == expected
    assert all(0 < r[0]["status"] < 400 for r in results)
    # torch counts no factorization, and polynomials in the form that runs.
    one = counts.flops_of_one(m, n, polar)
    counted = mock.patch.object(type(polar), "flops", return_value=one)
    with counted:
        expected_flops = plans.flops_per_rank(*where)
    assert mean(r[1] for r in results) == pytest.approx(expected_flops, rel=0.02)
    shared = plans.SharedMatrices(m, n, 1, len(results), copies=copies)
    one = plans.bytes_received(plan, shared, polar, itemsize=4)
    told = f"{plan} on {len(results)} ranks, {one / MIB:.3g} MiB: as asked"
    assert all(told in " ".join(r[2].split()) for r in results)


@needs_gloo
@pytest.mark.parametrize("plan", counts.PLANS)
def test_one_bucket_is_sent_while_another_is_computed(plan, found) -> None:
    """Both buckets are under way before the first is waited for, and when it is computed."""
    for there in found[2]:
        status, *events = there["order", plan]
        assert status == "meet"
        begun = events[: events.index("wait")].count("send")
        assert begun == (
            4 if plan == "gather" else 2
        )  # gather sends each of four matrices by itself
        under_way = [
            events[:i].count("send") - events[:i].count("wait") for i in range(len(events))
        ]
        assert events.count("send") == events.count("wait")
        computes = [i for i, event in enumerate(events) if event == "compute"]
        # M of copies is there already, so that nothing is sent before the first bucket computes.
        assert under_way[computes[plan == "replicated"]] >= 1


@needs_gloo
def test_buckets_wait_until_others_have_left_the_window(found) -> None:
    """Where no two of them fit, each matrix is sent, computed and sent back before the next."""
    for there in found[2]:
        status, *events = there["in a window"]
        assert status == "meet"
        under_way = [
            events[:i].count("send") - events[:i].count("wait") for i in range(len(events))
        ]
        assert max(under_way) == 1
        assert events.count("send") == 2 * 4
        assert events.count("compute") == 2


def test_one_rank_receives_nothing() -> None:
    for plan in plans.PLANS:
        shared = plans.SharedMatrices(64, 96, count=4, ranks=1)
        assert plans.bytes_received(plan, shared, LowRank(8, 4)) == 0


def test_copies_have_equally_many_ranks() -> None:
    with pytest.raises(ValueError, match="copies=3 with ranks=8: expected a divisor of the ranks"):
        plans.SharedMatrices(64, 96, count=4, ranks=8, copies=3)


@pytest.mark.parametrize("plan", plans.PLANS)
def test_rows_of_a_matrix_are_columns_of_its_transpose(plan) -> None:
    rows = plans.SharedMatrices(96, 64, 8, 8, "rows", 2)
    columns = plans.SharedMatrices(64, 96, 8, 8, "columns", 2)
    for polar in (LowRank(8, 4), LowRank(8, 4, power=0, sketch=Warm())):
        of_rows, of_columns = (
            (plans.bytes_received(plan, each, polar), plans.flops_per_rank(plan, each, polar))
            for each in (rows, columns)
        )
        assert of_rows == of_columns
