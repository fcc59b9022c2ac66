"""Ctrl-C and SIGTERM as a request to stop at the next step, so that a checkpoint can be written.

And Ctrl-C while a command or its worker processes start: a terminal sends it to all of them, and a
process that still imports torch would answer with a traceback.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = [
    "Interrupt",
    "Interrupted",
    "ctrl_c_blocked",
    "ctrl_c_ends_the_process",
]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(Exception):
    """The run was stopped by a signal, after writing its checkpoint.

    With ``ended`` the signal came too late to stop this run: its result is written, and whoever makes
    several runs must not begin another.
    """

    def __init__(self, directory: Path, step: int, steps: int, ended: bool = False) -> None:
        left = "the run had ended, its result" if ended else "the checkpoint"
        super().__init__(f"stopped after step {step} of {steps}; {left} is in {directory}")
        self.directory, self.step, self.steps, self.ended = directory, step, steps, ended


class Interrupt:
    """A context in which the first signal sets ``pending``, and a second acts as it did before.

    With ``patient=True`` further signals have no effect: torchrun passes a Ctrl-C on to processes
    that the terminal has already sent it to, and kills them if they have not ended after 30 seconds.
    Outside the main thread, where Python handles no signals, entering it has no effect.
    """

    def __init__(self, patient: bool = False) -> None:
        self.pending = False
        self._patient = patient
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.pending = True
        if not self._patient:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def __exit__(self, *_: object) -> None:
        self._restore()


@contextmanager
def ctrl_c_blocked() -> Iterator[None]:
    """A context that holds Ctrl-C back from this process, and for good from processes that it starts.

    This process sees a Ctrl-C when the context ends.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def ctrl_c_ends_the_process() -> Iterator[None]:
    """A context in which Ctrl-C ends this process at once and prints nothing, for imports.

    A KeyboardInterrupt inside an import is a traceback. torch even catches the KeyboardInterrupt that
    comes while it imports NumPy, and the next import of NumPy then fails. Where SIGINT is ignored or has
    a handler other than Python's own, entering this context has no effect.
    """
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
