"""Parameters that FSDP2 has sharded over one rank take the step of plain ones, at the same cost."""

from __future__ import annotations

import pytest
from tests.ranks import world_of_one
from tests.ranks.launch import launched, needs_gloo

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launched(world_of_one.__name__, 1, tmp_path_factory.mktemp("one"))[0]


@pytest.mark.parametrize("name", world_of_one.MAPS)
def test_the_trajectory_of_plain_parameters(name, found) -> None:
    assert found["off", name] == 0


@pytest.mark.parametrize("name", world_of_one.MAPS)
def test_a_step_asks_nothing_of_a_dtensor(name, found) -> None:
    """Every operation on a DTensor takes some ten microseconds of Python."""
    assert found["asked", name] == []


@pytest.mark.parametrize("what", world_of_one.CHANGES)
def test_a_state_that_was_changed_from_outside_is_taken_over(what, found) -> None:
    off, is_sharded = found["replaced", what]
    assert off == 0
    assert is_sharded
