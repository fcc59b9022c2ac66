"""A run goes on from its checkpoint at another number of ranks, with every option that torch has."""

from __future__ import annotations

import pytest
from tests.ranks import checkpoints
from tests.ranks.launch import needs_gloo

pytestmark = needs_gloo
# Numbers of ranks: where the second half runs, and where the first half was saved.
CHAIN = ((4, 4), (2, 4), (1, 2), (4, 1))


@pytest.fixture(scope="module")
def found(ranks_of, tmp_path_factory):
    """How far each rank ended from one process that was not interrupted."""
    folder = tmp_path_factory.mktemp("checkpoints")
    results = {}
    for number, (ranks, source) in enumerate(CHAIN):
        here = folder / str(number)
        here.mkdir()
        (here / "source").write_text(str(source), encoding="utf-8")
        results[ranks, source] = ranks_of(ranks).main(checkpoints.__name__, here)
    return results


@pytest.mark.parametrize(
    ("ranks", "source", "name", "plan"),
    [(*numbers, *run) for numbers in CHAIN for run in checkpoints.loaded(*numbers)],
)
def test_the_run_goes_on(ranks, source, name, plan, found) -> None:
    if name == "rank 0" and not found[ranks, source][0]["gathers in order"]:
        pytest.skip("broadcast_from_rank0 of this version of torch loads uneven parts wrongly")
    for there in found[ranks, source]:
        assert there[name, plan] < 1e-10


@pytest.mark.parametrize(("ranks", "source"), CHAIN)
def test_momentum_that_fades_rests_as_if_it_had_not_been_saved(ranks, source, found) -> None:
    for there in found[ranks, source]:
        assert there["resting"]["off"] < 1e-10
        assert there["resting"]["moved"] == 0
