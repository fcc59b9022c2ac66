"""Ctrl-C and SIGTERM as a request to stop at the next step, so that a checkpoint can be written."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Interrupt"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()
