"""Cheap objectives for the tests of tuning, importable by worker processes."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.processes import wait_until


@dataclass(frozen=True)
class Bowl:
    """A loss that is lowest at lr = 0.03, falls with every validation and diverges above 1.

    Each trial writes its process and its lr to ``log``, and waits until as many processes as
    ``workers`` have begun one.
    """

    log: Path | None = None
    seconds: float = 0.0
    workers: int = 1
    interrupt_at: int | None = None

    def __call__(
        self, overrides: Mapping[str, float], report: Callable[[int, float], None]
    ) -> float:
        lr = overrides["optimizer.lr"]
        if self.log:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()} {lr!r}\n")
            if self.interrupt_at == len(self.log.read_text().splitlines()):
                raise KeyboardInterrupt
            wait_until(lambda: self._begun() >= self.workers)
        final = 1.0 + math.log10(lr / 0.03) ** 2
        for number in range(5):
            time.sleep(self.seconds)
            report(number, math.nan if lr > 1.0 and number == 2 else final + 4 - number)
        return final

    def _begun(self) -> int:
        """How many processes have written to the log."""
        assert self.log is not None
        return len({line.split()[0] for line in self.log.read_text().splitlines()})


@dataclass(frozen=True)
class Arrives(Bowl):
    """An objective that keeps a worker from starting until SIGTERM ends it.

    SIGTERM is taken when it comes, so that a Ctrl-C that came before has its effect.
    """

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self.log.write_text("a worker is starting\n")
        signal.sigwait({signal.SIGTERM})
        raise SystemExit


@dataclass(frozen=True)
class Dies:
    """An objective whose process is killed in the middle of its first trial."""

    marker: Path

    def __call__(
        self, overrides: Mapping[str, float], report: Callable[[int, float], None]
    ) -> float:
        report(0, 5.0)
        if not self.marker.exists():
            self.marker.write_text(repr(overrides["optimizer.lr"]))
            os._exit(9)
        return 1.0
