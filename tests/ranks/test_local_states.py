"""Parts that another plan left in the state of experts are looked for when the state has changed."""

from __future__ import annotations

import pytest
from tests.ranks import local_states
from tests.ranks.launch import launched, needs_gloo

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launched(local_states.__name__, 4, tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("what", ["steps alike", "without a gradient"])
def test_a_step_like_the_last_one_does_not_look(what, found) -> None:
    """To read the placements of every tensor of a thousand experts takes longer than a small step."""
    for there in found:
        assert set(there[what]) == {0}


@pytest.mark.parametrize("placed", local_states.PLACED)
def test_a_state_that_was_placed_otherwise_is_looked_at_once(placed, found) -> None:
    for there in found:
        first, *_, last = there[placed]
        assert first > 0
        assert last == 0


@pytest.mark.parametrize("what", ["off", "beside another plan", "loaded", "added"])
def test_the_steps_are_those_of_one_process(what, found) -> None:
    """Beside another plan: its results were replaced by those of the last local step, and ranks hung."""
    for there in found:
        assert there[what] < 1e-10


def test_the_steps_after_another_plan_do_not_look(found) -> None:
    for there in found:
        assert there["alike after another plan"] == 0
