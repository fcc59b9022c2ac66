"""The garbage collector stands still while a CUDA graph is captured."""

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from polarstep.capture import captured


class Cycle:
    """Freed by the collector alone, and says so."""

    def __init__(self, freed: list[str], name: str) -> None:
        self.itself, self.freed, self.name = self, freed, name

    def __del__(self) -> None:
        self.freed.append(self.name)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    @contextlib.contextmanager
    def graph(_: object, pool: object, capture_error_mode: str) -> Iterator[None]:
        assert pool is None
        assert capture_error_mode == "thread_local"
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    enabled = gc.isenabled()
    yield
    gc.enable() if enabled else gc.disable()


def test_garbage_stays_while_something_is_captured() -> None:
    freed: list[str] = []
    gc.enable()
    with captured(None):  # type: ignore[arg-type]
        Cycle(freed, "old graph")
        for _ in range(20_000):  # far more than what starts a collection
            _cycle: list[object] = []
            _cycle.append(_cycle)
        assert not freed
    assert gc.isenabled()
    gc.collect()
    assert freed == ["old graph"]


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was_even_after_an_error(enabled: bool) -> None:
    gc.enable() if enabled else gc.disable()
    with pytest.raises(ValueError, match="inside"), captured(None):  # type: ignore[arg-type]
        raise ValueError("inside")
    assert gc.isenabled() is enabled
