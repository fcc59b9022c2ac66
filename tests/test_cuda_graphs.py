"""Capturing a CUDA graph: what it asks torch for, and that the garbage collector stands still.

Then the rules by which steps are launched, captured and replayed.
"""

import contextlib
import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from polarstep.context import in_a_graph
from polarstep.engines import graphs as capture
from polarstep.engines.graphs import Kind, Replays, captured


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

    def replay(self) -> None:
        self.calls.append(("replay",))

    def reset(self) -> None:
        self.calls.append(("reset",))


class Stream:
    def wait_stream(self, other: object) -> None:
        assert other == "the stream that was current"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(capture, "_make_room", lambda: None)
    monkeypatch.setattr(capture, "_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the stream that was current")
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(capture, "_FAILED", [])
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
    assert in_a_graph() is (initialized and capturing)


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


GPU, OTHER_GPU = torch.device("cuda", 0), torch.device("cuda", 1)


class Steps:
    """Steps on a GPU, and which of them were launched, inside a capture too."""

    def __init__(self, *devices: torch.device) -> None:
        self.replays, self.launched = Replays(), list[torch.device]()
        self.devices = devices or (GPU,)
        self.error: Exception | None = None

    def go(self, kind: Kind = (True,), places: object = 0, **options: object) -> list[int]:
        """One step: how often each graph of its kind has been replayed."""

        def launch(device: torch.device) -> None:
            self.launched.append(device)
            # The first step is one launch; the second launch is that inside the capture.
            if self.error is not None and len(self.launched) == 2:
                raise self.error

        self.replays.count(kind, places)
        self.replays.run(kind, launch, self.devices, **options)  # type: ignore[arg-type]
        graphs = self.replays.graphs.get(kind, [])
        return [graph.calls.count(("replay",)) for graph in graphs]  # type: ignore[attr-defined]


def test_the_second_step_is_captured_and_replayed_and_later_ones_are_replayed() -> None:
    steps = Steps()
    assert [steps.go() for _ in range(4)] == [[], [1], [2], [3]]
    assert steps.launched == [GPU, GPU]
    (graph,) = steps.replays.graphs[(True,)]
    assert graph.calls[:3] == [(None, "thread_local"), ("end",), ("replay",)]  # type: ignore[attr-defined]


def test_every_device_has_a_graph() -> None:
    steps = Steps(GPU, OTHER_GPU)
    assert [steps.go() for _ in range(3)] == [[], [1, 1], [2, 2]]
    assert steps.launched == [GPU, OTHER_GPU] * 2


@pytest.mark.parametrize("devices", [(torch.device("cpu"),), (GPU, torch.device("cpu"))], ids=str)
def test_nothing_is_captured_where_a_device_is_no_gpu(devices: tuple[torch.device, ...]) -> None:
    steps = Steps(*devices)
    assert [steps.go() for _ in range(3)] == [[]] * 3
    assert steps.launched == [*devices] * 3


def test_a_step_that_does_not_repeat_is_launched() -> None:
    steps = Steps()
    assert [steps.go(repeats=False) for _ in range(3)] == [[]] * 3
    assert steps.go() == [1]


def test_graphs_are_dropped_when_a_tensor_has_moved() -> None:
    steps = Steps()
    assert [steps.go(places=place) for place in (0, 0, 1, 1, 1, 0)] == [[], [1], [], [1], [2], []]


def test_a_kind_that_draws_less_has_its_kernels_compiled() -> None:
    both, first, second, neither = (True, True), (True, False), (False, True), (False, False)
    steps = Steps()
    assert [steps.go(kind) for kind in (both, both, first, neither)] == [[], [1], [1], [1]]
    steps = Steps()
    assert [steps.go(kind) for kind in (first, first, second, both)] == [[], [1], [], []]


def test_kinds_share_memory_and_so_do_neighbours() -> None:
    steps, others = Steps(), Steps()
    for kind in ((True,), (True,), (False,)):
        steps.go(kind)
    (first,), (second,) = steps.replays.graphs.values()
    assert (first.calls[0][0], second.calls[0][0]) == (None, "its memory")  # type: ignore[attr-defined]
    for _ in range(2):
        others.go(beside=first)
    ((neighbour,),) = others.replays.graphs.values()
    assert neighbour.calls[0] == ("its memory", "thread_local")  # type: ignore[attr-defined]


def test_a_step_that_cannot_be_captured_is_told_once_and_launched() -> None:
    steps = Steps()
    steps.error = ValueError("a map of mine")
    assert steps.go() == []
    with pytest.warns(
        UserWarning, match=r"\(ValueError: a map of mine\), so its kernels are launched"
    ) as told:
        assert steps.go() == []
    assert told[0].filename == __file__  # the line that led to the step, outside the package
    (failed,) = capture._FAILED
    assert failed.calls == [(None, "thread_local"), ("end",), ("reset",)]  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [steps.go() for _ in range(3)] == [[]] * 3
    assert steps.launched == [GPU] * 6  # the second step was launched twice, once in its capture


def test_an_error_of_a_launch_is_raised() -> None:
    def launch(device: torch.device) -> None:
        raise ValueError("inside")

    replays = Replays()
    replays.count((True,), 0)
    with pytest.raises(ValueError, match="inside"):
        replays.run((True,), launch, [GPU])


@pytest.mark.parametrize("read", [Tensor.item, Tensor.nonzero, Tensor.__bool__, Tensor.__int__])
def test_a_number_on_the_device_is_not_read_in_a_capture(read) -> None:
    with capture._NoWaiting():  # type: ignore[no-untyped-call]
        assert read(torch.ones(1)) is not None  # a number of the host's is known
        with pytest.raises(RuntimeError, match="waits for the device"):
            read(torch.ones(1, device="meta"))
