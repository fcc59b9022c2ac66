"""What tests do in place of the package because it takes long: render figures, start workers."""

from __future__ import annotations

import io
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.forking import IMPORTED_ONCE

BLANK = {
    "svg": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg" width="1" height="1"></svg>',
    "png": b"\x89PNG\r\n",
}


@pytest.fixture(autouse=True)
def blank_figures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write blank files instead of figures, unless the test is marked as ``rendered``.

    A report takes a second or more for each of its figures, nine tenths of it to render what was
    painted. Fixtures of a whole file are made before this one, and render.
    """
    if request.node.get_closest_marker("rendered") is not None:
        return
    figure = pytest.importorskip("matplotlib.figure")

    def savefig(self: Any, file: io.BytesIO | Path | str, *, format: str, **options: Any) -> None:
        if isinstance(file, str | Path):
            Path(file).write_bytes(BLANK[format])
        else:
            file.write(BLANK[format])

    monkeypatch.setattr(figure.Figure, "savefig", savefig)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one thread, as worker processes do: sums over threads round differently."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the workers of suites and studies from an interpreter that has torch imported.

    The package starts an interpreter for each, which imports torch for four seconds. What a forked
    worker writes to standard error is lost.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED_ONCE))
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: context)
