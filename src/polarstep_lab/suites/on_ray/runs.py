"""The runs of a suite, handed out to the workers of a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from polarstep_lab.records.directory import check_directory, claim_directory, state_of
from polarstep_lab.records.lock import RunLock
from polarstep_lab.suites.on_ray.cluster import ATTEMPTS, Cluster, cause
from polarstep_lab.suites.on_ray.conversation import Said
from polarstep_lab.suites.on_ray.run_job import Apart, HeadFiles, Refused, Returned, Training
from polarstep_lab.suites.parallel import EXPLAINED, Event
from polarstep_lab.suites.sending import archived, unpack
from polarstep_lab.suites.suite import PlannedRun

__all__ = ["make"]

PARTING = 20.0
"""Seconds that workers have after a Ctrl-C to write their checkpoints, as at home."""


@dataclass
class _Conversation:
    """The head's end: a run, its worker, and how many workers have died of it."""

    run: PlannedRun
    force: bool
    worker: Any
    deaths: int = 0
    held: ExitStack = field(default_factory=ExitStack)
    """The lock of the run directory, while the worker trains in a folder of its own."""


def make(cluster: Cluster, runs: Sequence[PlannedRun], force: bool) -> Iterator[Event]:
    """Make all ``runs``, resuming those under way, and yield what they report as it comes."""
    if not runs:
        return
    runs = [_absolute(run) for run in runs]
    head = HeadFiles.below(Path(os.path.commonpath([run.directory.parent for run in runs])))
    waiting = list(reversed(runs))
    under_way: dict[Any, _Conversation] = {}

    def begin(talk: _Conversation) -> None:
        job = Training(talk.run, talk.force, head)
        under_way[talk.worker.begin.remote(job)] = talk

    try:
        for _ in range(min(cluster.workers, len(runs))):
            begin(_Conversation(waiting.pop(), force, cluster.worker()))
        while under_way:
            ready, _ = cluster.ray.wait(list(under_way), num_returns=1)
            talk = under_way.pop(ready[0])
            try:
                said = cluster.ray.get(ready[0])
            except cluster.death as death:
                talk.deaths += 1
                talk.held.close()
                talk.worker = cluster.worker()
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
                cluster.rest(talk.worker)
    finally:
        _part(cluster, under_way)
        head.path.unlink(missing_ok=True)


def _part(cluster: Cluster, under_way: dict[Any, _Conversation]) -> None:
    """Stop the runs that are under way after an interruption, and keep what their workers return."""
    for talk in under_way.values():
        talk.worker.stop.remote()
    while under_way:
        ready, _ = cluster.ray.wait(list(under_way), num_returns=1, timeout=PARTING)
        if not ready:
            break
        talk = under_way.pop(ready[0])
        try:
            said = cluster.ray.get(ready[0])
        except cluster.death:
            talk.held.close()
            continue
        if said.ended:
            _concluded(said, talk)
            cluster.rest(talk.worker)
        else:
            under_way[talk.worker.next.remote(None, said.asks)] = talk
    for talk in under_way.values():
        cluster.ray.kill(talk.worker)
        talk.held.close()


def _absolute(run: PlannedRun) -> PlannedRun:
    """``run`` with a directory that does not depend on where a process is started."""
    return replace(run, directory=run.directory.absolute())


def _mourned(label: str, death: BaseException, deaths: int) -> Event:
    """The event that reports the death of a worker."""
    if deaths < ATTEMPTS:
        return Event(label, notice=f"its worker died ({cause(death)}); the run is made again")
    return Event(label, error=f"{deaths} workers died of this run ({cause(death)})")


def _heard(said: Said, talk: _Conversation) -> tuple[Any, list[Event]]:
    """The answer to a worker's message that is not its last, and the events to pass on."""
    if isinstance(said.what, Apart):
        notices: list[Event] = []
        try:
            return _lent(talk, notices), notices
        except (*EXPLAINED, OSError) as error:
            return Refused(str(error)), notices
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
    return None if state_of(run.directory) == "empty" else archived(run.directory)


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
