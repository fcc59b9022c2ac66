"""Capturing a CUDA graph: what it asks torch for, and that the garbage collector stands still."""

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch

from polarstep import cuda_graphs as capture
from polarstep.cuda_graphs import captured


class Cycle:
    """Freed by the collector alone, and says so."""

    def __init__(self, freed: list[str], name: str) -> None:
        self.itself, self.freed, self.name = self, freed, name

    def __del__(self) -> None:
        self.freed.append(self.name)


class Graph:
    """What is asked of a CUDA graph."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.calls.append((pool, capture_error_mode))

    def capture_end(self) -> None:
        self.calls.append(("end",))

    def pool(self) -> str:
        return "its memory"


class Stream:
    def wait_stream(self, other: object) -> None:
        assert other == "the stream that was current"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(capture, "_make_room", lambda: None)
    monkeypatch.setattr(capture, "_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream that was current")
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    enabled = gc.isenabled()
    yield
    gc.enable() if enabled else gc.disable()


def test_a_capture_begins_and_ends() -> None:
    alone, beside = Graph(), Graph()
    with captured(alone):  # type: ignore[arg-type]
        assert alone.calls == [(None, "thread_local")]  # other threads may use the GPU
    with captured(beside, beside=alone):  # type: ignore[arg-type]
        pass
    assert alone.calls[1:] == [("end",)]
    assert beside.calls == [("its memory", "thread_local"), ("end",)]


@pytest.mark.parametrize(("free", "emptied"), [(2**30, False), (2**29, False), (2**28, True)])
def test_cached_memory_is_given_back_where_there_is_less_than_that(
    monkeypatch: pytest.MonkeyPatch, free: int, emptied: bool
) -> None:
    monkeypatch.undo()
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2**33))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**31)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**31 - 2**29)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("waited"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("emptied"))
    capture._make_room()
    assert calls == (["waited", "emptied"] if emptied else [])


def test_garbage_stays_while_something_is_captured() -> None:
    freed: list[str] = []
    gc.enable()
    with captured(Graph()):  # type: ignore[arg-type]
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
    with pytest.raises(ValueError, match="inside"), captured(Graph()):  # type: ignore[arg-type]
        raise ValueError("inside")
    assert gc.isenabled() is enabled


@pytest.mark.parametrize("initialized", [False, True])
@pytest.mark.parametrize("capturing", [False, True])
def test_nothing_is_captured_before_cuda_is_initialized(
    monkeypatch: pytest.MonkeyPatch, initialized: bool, capturing: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert capture.in_a_graph() is (initialized and capturing)


def test_a_device_has_one_stream_for_all_its_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    device = [0]
    made: list[int] = []
    monkeypatch.setattr(capture, "_STREAMS", {})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: device[0])
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: made.append(index) or [index])
    first = capture._stream()
    assert capture._stream() is first
    device[0] = 1
    assert capture._stream() == [1]
    assert made == [0, 1]


def test_a_capture_waits_for_what_was_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: waited.append(other))
    with captured(Graph()):  # type: ignore[arg-type]
        assert waited == ["the stream that was current"]


def test_room_is_made_before_the_capture_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    monkeypatch.setattr(capture, "_make_room", lambda: graph.calls.append(("room",)))
    with captured(graph):  # type: ignore[arg-type]
        assert graph.calls == [("room",), (None, "thread_local")]
