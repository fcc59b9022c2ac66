"""A conversation between the head and a worker of a cluster.

A worker does job after job. The head starts a job and fetches its messages one by one: something told,
a question that the head answers, and the end of the job.
"""

from __future__ import annotations

import queue
import threading
import traceback
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from polarstep_lab.config import ConfigError
from polarstep_lab.suites.parallel import EXPLAINED

__all__ = ["Job", "Said", "Talk", "Worker"]


@dataclass(frozen=True)
class Said:
    """A message of a worker: something told, a question, or the end of its job."""

    what: Any = None
    asks: bool = False
    ended: bool = False
    error: BaseException | None = None


class Talk:
    """The worker's end of a conversation, in the thread of its job."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Said] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stopping = threading.Event()

    def tell(self, what: Any) -> None:
        """Say something to the head, and go on."""
        self.messages.put(Said(what))

    def ask(self, what: Any) -> Any:
        """The head's answer to ``what``."""
        self.messages.put(Said(what, asks=True))
        return self.replies.get()


class Job(Protocol):
    """Work for one worker; it is sent there, and its return value is sent back."""

    def __call__(self, talk: Talk) -> Any:
        """Do the work."""


class Worker:
    """The actor: job after job, each in a thread, while its messages are fetched one by one."""

    def __init__(self) -> None:
        """Compute with one thread, as worker processes on one machine do."""
        torch.set_num_threads(1)
        self._talk = Talk()

    def begin(self, job: Job) -> Said:
        """Start a job, and return its first message."""
        self._talk = talk = Talk()
        threading.Thread(target=self._do, args=(job, talk), daemon=True).start()
        return talk.messages.get()

    def _do(self, job: Job, talk: Talk) -> None:
        try:
            talk.messages.put(Said(job(talk), ended=True))
        except EXPLAINED as error:
            talk.messages.put(Said(ended=True, error=ConfigError(str(error))))
        except BaseException as error:
            traceback.print_exc()
            told = RuntimeError(f"{type(error).__name__}: {error}")
            talk.messages.put(Said(ended=True, error=told))

    def next(self, reply: Any = None, answers: bool = False) -> Said:
        """The next message, after handing in the ``reply`` if it ``answers`` a question."""
        if answers:
            self._talk.replies.put(reply)
        return self._talk.messages.get()

    def stop(self) -> None:
        """Ask the job to end soon."""
        self._talk.stopping.set()
