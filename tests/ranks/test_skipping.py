"""Ranks that wait for one that skips a step end with its number, after the timeout of the user."""

from __future__ import annotations

from tests.ranks import skipping
from tests.ranks.launch import launched, needs_gloo


@needs_gloo
def test_a_rank_that_skips_a_step_is_named(tmp_path) -> None:
    """It goes on to a backward pass, whose reduction met the others' exchange and ended the process."""
    first, second, skips = launched(skipping.__name__, 3, tmp_path)
    for words in (first, second):
        assert words[:-1] == ["nothing"] * skipping.SKIPPED  # also where rank 1 came late
        assert f"RuntimeError: rank 2 did not come to step {skipping.SKIPPED}" in words[-1]
        assert "expected step() equally often" in words[-1]
    assert skips[: skipping.SKIPPED + 1] == ["nothing"] * (skipping.SKIPPED + 1)
