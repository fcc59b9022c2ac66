"""Processes that talk by gloo: they start once, and run the functions of many tests together."""

from __future__ import annotations

import functools
import importlib
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forking import Forked, fork
from tests.processes import PATIENCE
from torch import multiprocessing

__all__ = ["Ranks", "launched", "needs_gloo"]

needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)
# A rank that waits in vain fails after this, and the ranks are then started anew.
TIMEOUT = timedelta(seconds=60)


class Ranks:
    """``count`` processes, which start at the first call.

    Call it with a function of a module: every process runs the function with the same arguments, and
    what each of them returned is in the list that comes back, by rank.
    """

    def __init__(self, count: int, timeout: timedelta = TIMEOUT) -> None:
        self.count, self._timeout = count, timeout
        self._process: Forked | None = None
        self._ways: list[Connection] = []

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        if self._process is None:
            self._start()
        name = function.__module__, function.__qualname__
        for way in self._ways:
            way.send_bytes(pickle.dumps((name, arguments, options)))
        answers = [self._answer(rank, way, name) for rank, way in enumerate(self._ways)]
        errors = [error for _, error in answers if error is not None]
        if errors:  # others may be waiting for a rank that failed
            self.stop()
            pytest.fail("\n".join(errors))
        return [result for result, _ in answers]

    def main(self, module: str, folder: Path) -> list[Any]:
        """What ``module.main(rank, count, folder)`` returned on each rank."""
        folder.mkdir(parents=True, exist_ok=True)
        return self(_main_of, module, self.count, folder)

    def _answer(self, rank: int, way: Connection, name: tuple[str, str]) -> tuple[Any, str | None]:
        """What a rank returned, or its error in words."""
        try:
            if not way.poll(PATIENCE):
                return None, f"rank {rank} hangs in {name}"
            result, error = pickle.loads(way.recv_bytes())
        except (EOFError, ConnectionError):
            return None, f"rank {rank} has ended in {name}"
        return result, None if error is None else f"rank {rank}: {error}"

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/parent"
        with Listener(address, "AF_UNIX", backlog=self.count) as listener:
            seconds = str(self._timeout.total_seconds())
            self._process = fork("-m", __name__, str(self.count), self._folder.name, seconds)
            ways = [listener.accept() for _ in range(self.count)]
        self._ways = [way for _, way in sorted((way.recv(), way) for way in ways)]

    def stop(self) -> None:
        """End the processes; a later call starts others."""
        for way in self._ways:
            way.close()
        if self._process is not None:
            self._process.kill()
            self._folder.cleanup()
        self._process, self._ways = None, []


def launched(module: str, count: int, folder: Path) -> list[Any]:
    """What ``module.main(rank, count, folder)`` returned on each of ``count`` ranks of its own."""
    ranks = Ranks(count)
    try:
        return ranks.main(module, folder)
    finally:
        ranks.stop()


def _main_of(module: str, count: int, folder: Path) -> Any:
    return importlib.import_module(module).main(torch.distributed.get_rank(), count, folder)


def _serve(rank: int, count: int, folder: str, seconds: float) -> None:
    """Run what the parent sends, until it closes the way."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=seconds),
    )
    way = Client(f"{folder}/parent", "AF_UNIX")
    way.send(rank)
    while True:
        try:
            (module, name), arguments, options = pickle.loads(way.recv_bytes())
        except EOFError:
            return
        try:
            function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
            answer = function(*arguments, **options), None
        except BaseException:
            answer = None, traceback.format_exc()
        way.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    multiprocessing.start_processes(
        _serve,
        (int(sys.argv[1]), sys.argv[2], float(sys.argv[3])),
        nprocs=int(sys.argv[1]),
        start_method="spawn" if torch.cuda.is_available() else "fork",
    )
