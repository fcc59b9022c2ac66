from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

import polarstep as ps


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: empty, so that a script's ``runs/…`` are its own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def own_randomness() -> Iterator[None]:
    """The scripts seed torch's global generator; other tests find it as it was."""
    with torch.random.fork_rng():
        yield


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No library asks a hub for anything."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def steps() -> Iterator[list[Optimizer]]:
    """The optimizer of every step that polarstep's Muon makes during the test, in order."""
    made: list[Optimizer] = []

    def note(optimizer: Optimizer, *_: object) -> None:
        if isinstance(optimizer, ps.Muon):
            made.append(optimizer)

    handle = register_optimizer_step_post_hook(note)
    yield made
    handle.remove()
