"""Runs on the workers of a Ray cluster: ``compare``, ``ablate`` and ``tune`` with ``--on ray``.

Ray starts by itself on this machine, or ``RAY_ADDRESS`` names a cluster. A worker is a process with one
GPU, where the cluster has GPUs, or one core. This process, the head, hands out the runs and keeps the
study of a tuning. It holds a conversation with each worker: the worker says how its job goes, or asks
a question, and the head answers.

**Records.** A worker that sees the head's file system trains in the run directory itself. A worker
that does not trains in a folder of its own: the head sends it the directory of a run that goes on, and
gets the whole directory back when the run ends.

**Deaths.** The job of a worker that died is given to a new worker, which goes on from the last
checkpoint that the head's file system has.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from polarstep.storage import write_atomically
from polarstep_lab.config import ConfigError
from polarstep_lab.records.directory import RunLock, check_directory, claim_directory, state_of
from polarstep_lab.suites.parallel import EXPLAINED, Event, Messenger
from polarstep_lab.suites.sending import packed, unpack
from polarstep_lab.suites.suite import PlannedRun
from polarstep_lab.training.train import StopTraining, train

if TYPE_CHECKING:
    from polarstep_lab.tune import Objective, Progress, StudySpec

__all__ = ["OnRay"]

ATTEMPTS = 3
"""How many workers may die of a job before the job counts as failed."""

PARTING = 20.0
"""Seconds that workers have after a Ctrl-C to write their checkpoints, as at home."""


# --- a conversation -----------------------------------------------------------------------------


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
        """Take one thread, as a run at home with several workers does."""
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


# --- a run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """How a worker recognizes the head's file system: a file with a content of its own."""

    path: Path
    content: str
    folder: Path
    """The working directory of the head, to which paths of data are relative."""

    @classmethod
    def below(cls, folder: Path) -> Head:
        """Write the file into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        content = uuid.uuid4().hex
        path = folder.absolute() / f".polarstep-head-{content}"
        write_atomically(path, lambda file: file.write(content.encode()))
        return cls(path, content, Path.cwd())

    def is_here(self) -> bool:
        """Whether this process sees the file."""
        try:
            return self.path.read_text() == self.content
        except OSError:
            return False


@dataclass(frozen=True)
class Apart:
    """A worker says that it does not see the head's file system, and asks for the run's files."""


@dataclass(frozen=True)
class Refusal:
    """The head's answer if nothing may be written into the run directory."""

    reason: str


@dataclass(frozen=True)
class Returned:
    """How a run ended, and its directory where the worker has a folder of its own."""

    event: Event
    directory: bytes | None = None


@dataclass(frozen=True)
class Training:
    """The job of making a run."""

    run: PlannedRun
    force: bool
    head: Head

    def __call__(self, talk: Talk) -> Returned:
        """Train, in the run directory or in a folder of the worker's own."""
        if self.head.is_here():
            os.chdir(self.head.folder)
            return Returned(self._train(self.run.directory, talk, self.force))
        with tempfile.TemporaryDirectory(prefix="polarstep-run-") as folder:
            directory = Path(folder) / "run"
            sent = talk.ask(Apart())
            if isinstance(sent, Refusal):
                return Returned(Event(self.run.label, error=sent.reason))
            if sent is not None:
                unpack(sent, directory)
            event = self._train(directory, talk, force=False)
            return Returned(event, packed(directory) if directory.exists() else None)

    def _train(self, directory: Path, talk: Talk, force: bool) -> Event:
        """Train as a worker process at home does; the last event says how the run ended."""
        messenger = _Stoppable(self.run.label, talk)
        try:
            result = train(
                self.run.config,
                directory,
                identity=self.run.identity,
                resume=True,
                force=force,
                observers=[messenger],
                tell=messenger.tell,
            )
            return Event(self.run.label, result=result)
        except EXPLAINED as error:
            return Event(self.run.label, error=str(error))
        except Exception as error:
            traceback.print_exc()
            return Event(self.run.label, error=f"{type(error).__name__}: {error}")


class _Stoppable(Messenger):
    """A messenger that ends the run, with a checkpoint, when the head asks for it."""

    def __init__(self, label: str, talk: Talk) -> None:
        super().__init__(label, talk.tell)
        self._stopping = talk.stopping

    def advance(self, step: int) -> None:
        """Pass a step on, and stop if this was asked for."""
        super().advance(step)
        if self._stopping.is_set():
            raise StopTraining("the command that made this run was interrupted")


@dataclass
class _Conversation:
    """The head's end: a run, its worker, and how many workers have died of it."""

    run: PlannedRun
    force: bool
    worker: Any
    deaths: int = 0
    held: ExitStack = field(default_factory=ExitStack)
    """The lock of the run directory, while the worker trains in a folder of its own."""


# --- a trial ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trying:
    """The job of a trial: the objective, with reports that the head answers."""

    objective: Objective
    overrides: Mapping[str, float]

    def __call__(self, talk: Talk) -> float | None:
        """The objective's value; None where the head has pruned the trial."""
        from polarstep_lab.tune import Pruned

        def report(number: int, loss: float) -> None:
            if (reason := talk.ask((number, loss))) is not None:
                raise Pruned(reason)

        try:
            return self.objective(self.overrides, report)
        except Pruned:
            return None


# --- the place ----------------------------------------------------------------------------------


class OnRay:
    """Runs are made by workers of a Ray cluster."""

    def __init__(self, workers: int | None = None, device: str = "auto") -> None:
        """Connect to ``RAY_ADDRESS``, or start Ray on this machine.

        ``workers`` is how many runs are made at a time, by default as many as the cluster has GPUs
        or cores. Runs on the ``device`` cpu take no GPU.
        """
        try:
            import ray
        except ModuleNotFoundError:
            raise ConfigError(
                '--on ray needs Ray, which is not installed: pip install "polarstep[ray]"'
            ) from None
        if device.startswith("cuda:"):
            raise ConfigError(
                f"runtime.device={device!r} with --on ray: expected auto, cpu or cuda, as Ray gives "
                "each run a GPU of its own"
            )
        self._ray = ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get("RAY_ADDRESS", "local")
        own = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, logging_level="ERROR", log_to_driver=False, **own)
        resources = ray.cluster_resources()
        gpus = 0 if device == "cpu" else int(resources.get("GPU", 0))
        self._share = {"num_cpus": 1, "num_gpus": 1 if gpus else 0}
        self.workers = workers or gpus or max(1, int(resources.get("CPU", 1)))
        self._stopping = threading.Event()
        self._idle: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def close(self) -> None:
        """Leave the cluster; a Ray that was started here ends."""
        self._ray.shutdown()

    def _rested(self) -> Any:
        """A worker without a job; a new one starts when the cluster has room for it."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            options = self._share | {"max_concurrency": 2}
            return self._ray.remote(Worker).options(**options).remote()

    # --- suites ---

    def make(self, runs: Sequence[PlannedRun], force: bool = False) -> Iterator[Event]:
        """Make all ``runs``, resuming those under way, and yield what they report as it comes."""
        if not runs:
            return
        runs = [_absolute(run) for run in runs]
        head = Head.below(Path(os.path.commonpath([run.directory.parent for run in runs])))
        waiting = list(reversed(runs))
        under_way: dict[Any, _Conversation] = {}

        def begin(talk: _Conversation) -> None:
            job = Training(talk.run, talk.force, head)
            under_way[talk.worker.begin.remote(job)] = talk

        try:
            for _ in range(min(self.workers, len(runs))):
                begin(_Conversation(waiting.pop(), force, self._rested()))
            while under_way:
                ready, _ = self._ray.wait(list(under_way), num_returns=1)
                talk = under_way.pop(ready[0])
                try:
                    said = self._ray.get(ready[0])
                except self._ray.exceptions.RayActorError as death:
                    talk.deaths += 1
                    talk.held.close()
                    talk.worker = self._rested()
                    yield _mourned(talk.run.label, death, talk.deaths)
                    if talk.deaths < ATTEMPTS:
                        begin(talk)
                        continue
                else:
                    if not said.ended:
                        reply, events = _heard(said, talk)
                        under_way[talk.worker.next.remote(reply, said.asks)] = talk
                        yield from events
                        continue
                    yield _concluded(said, talk)
                if waiting:
                    begin(_Conversation(waiting.pop(), force, talk.worker))
                else:
                    self._idle.put(talk.worker)
        finally:
            self._part(under_way)
            head.path.unlink(missing_ok=True)

    def _part(self, under_way: dict[Any, _Conversation]) -> None:
        """Stop what is still under way after an interruption, and keep what comes back."""
        for talk in under_way.values():
            talk.worker.stop.remote()
        while under_way:
            ready, _ = self._ray.wait(list(under_way), num_returns=1, timeout=PARTING)
            if not ready:
                break
            talk = under_way.pop(ready[0])
            try:
                said = self._ray.get(ready[0])
            except self._ray.exceptions.RayActorError:
                talk.held.close()
                continue
            if said.ended:
                _concluded(said, talk)
                self._idle.put(talk.worker)
            else:
                under_way[talk.worker.next.remote(None, said.asks)] = talk
        for talk in under_way.values():
            self._ray.kill(talk.worker)
            talk.held.close()

    # --- studies ---

    def tune(
        self,
        spec: StudySpec,
        objective: Objective,
        trials: int,
        on_progress: Callable[[Progress], object],
    ) -> Progress:
        """Bring the study to ``trials`` trials; workers train, and the study stays here."""
        from polarstep_lab.tune import tune

        self._stopping.clear()

        def remote(overrides: Mapping[str, float], report: Callable[[int, float], None]) -> float:
            return self._tried(Trying(objective, overrides), report)

        return tune(spec, remote, trials, self.workers, on_progress, stop=self._stopping.set)

    def _tried(self, job: Trying, report: Callable[[int, float], None]) -> float:
        """The value of a trial that a worker makes, and another worker again if the first dies."""
        deaths, seen = 0, -1
        pruned: Exception | None = None
        while True:
            worker = self._rested()
            coming = worker.begin.remote(job)
            try:
                while not (said := self._awaited(coming, worker)).ended:
                    (number, loss), reply = said.what, None
                    if number > seen:  # a trial that is made again reports the same once more
                        seen = number
                        try:
                            report(number, loss)
                        except Exception as reason:
                            pruned, reply = reason, str(reason)
                    coming = worker.next.remote(reply, said.asks)
            except self._ray.exceptions.RayActorError as death:
                deaths += 1
                if deaths == ATTEMPTS:
                    raise ConfigError(
                        f"{_cause(death)}: {deaths} workers died of a trial"
                    ) from death
                continue
            self._idle.put(worker)
            if pruned is not None:
                raise pruned
            if said.error is not None:
                raise said.error
            return float(said.what)

    def _awaited(self, coming: Any, worker: Any) -> Said:
        """The message that is ``coming`` from a worker, unless the study is being stopped."""
        while not self._stopping.is_set():
            try:
                said: Said = self._ray.get(coming, timeout=0.5)
                return said
            except self._ray.exceptions.GetTimeoutError:
                continue
        self._ray.kill(worker)
        raise KeyboardInterrupt


def _absolute(run: PlannedRun) -> PlannedRun:
    """``run`` with a directory that does not depend on where a process is started."""
    return replace(run, directory=run.directory.absolute())


def _cause(death: BaseException) -> str:
    """The first line of Ray's account of a worker's end."""
    return str(death).strip().partition("\n")[0].rstrip(".")


def _mourned(label: str, death: BaseException, deaths: int) -> Event:
    """What the head says of a worker that died."""
    if deaths < ATTEMPTS:
        return Event(label, notice=f"its worker died ({_cause(death)}); the run is made again")
    return Event(label, error=f"{deaths} workers died of this run ({_cause(death)})")


def _heard(said: Said, talk: _Conversation) -> tuple[Any, list[Event]]:
    """The answer to a message that is not the last, and what to pass on."""
    if isinstance(said.what, Apart):
        notices: list[Event] = []
        try:
            return _lent(talk, notices), notices
        except (*EXPLAINED, OSError) as error:
            return Refusal(str(error)), notices
    # The first step comes after the worker has replaced the run that was there.
    talk.force = talk.force and not said.what.steps
    return None, [said.what]


def _lent(talk: _Conversation, notices: list[Event]) -> bytes | None:
    """The files of a run that goes on elsewhere; its directory is locked until the run is back."""
    run = talk.run
    talk.held.enter_context(RunLock(run.directory, run.identity.label))
    check_directory(run.directory, run.identity, resume=True, force=talk.force)
    if talk.force:
        claim_directory(
            run.directory,
            run.identity,
            force=True,
            tell=lambda text: notices.append(Event(run.label, notice=text)),
        )
        talk.force = False
        return None
    return None if state_of(run.directory) == "empty" else packed(run.directory)


def _concluded(said: Said, talk: _Conversation) -> Event:
    """The last event of a run, after its files are in the run directory."""
    with talk.held:
        if said.error is not None:
            return Event(talk.run.label, error=str(said.error))
        returned: Returned = said.what
        if returned.directory is not None:
            try:
                unpack(returned.directory, talk.run.directory)
            except (*EXPLAINED, OSError) as error:
                return Event(talk.run.label, error=str(error))
        return returned.event
