from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.ranks.launch import Ranks


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """The ranks of a number: processes that all tests of the session share."""
    known: dict[int, Ranks] = {}
    yield lambda count: known.setdefault(count, Ranks(count))
    for ranks in known.values():
        ranks.stop()


@pytest.fixture(scope="session")
def four(ranks_of: Callable[[int], Ranks]) -> Ranks:
    """Four ranks."""
    return ranks_of(4)


@pytest.fixture(scope="session")
def two(ranks_of: Callable[[int], Ranks]) -> Ranks:
    """Two ranks."""
    return ranks_of(2)


@pytest.fixture
def fresh() -> Iterator[Callable[..., Ranks]]:
    """Makes ranks for a single test, which leaves them unfit for others."""
    made: list[Ranks] = []

    def make(*arguments: int, **options: object) -> Ranks:
        made.append(Ranks(*arguments, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for ranks in made:
        ranks.stop()
