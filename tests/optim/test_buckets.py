"""Which matrices of a step go through the polar map together."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from polarstep.bucket import in_parts


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 8))
def test_parts_are_as_few_as_their_order_allows(counts, most):
    parts = list(in_parts(counts, lambda count: count, most))
    assert [count for part in parts for count in part] == counts
    for part, following in pairwise(parts):
        assert sum(part) + following[0] > most  # it would not have had room
    assert all(sum(part) <= most or len(part) == 1 for part in parts)
