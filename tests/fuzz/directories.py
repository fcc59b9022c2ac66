"""Run directories: killed at random moments and resumed, or with one file damaged.

Commands run in a forked process, so that a kill is a real SIGKILL and nothing has to be imported again.
A kill comes at a given event of Python's audit hooks (files opened, renamed and removed among them), so
that the same case kills at the same moment.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.fuzz.cases import Choices, Outcome, Violation
from tests.lab.experiments.small import SMALLEST_GPT

from polarstep_lab.cli import app
from polarstep_lab.methods import METHODS
from polarstep_lab.records import record
from polarstep_lab.records.directory import state_of
from polarstep_lab.records.record import TIME_FIELDS, Result

__all__ = ["Damage", "after_damage", "after_kills", "damages_tried", "kills_tried"]

SLUGS = tuple(method.slug for method in METHODS)
SETTINGS = SMALLEST_GPT | {"runtime.checkpoint_seconds": 0.0, "runtime.device": "cpu"}
IN_DIRECTORY = ("open", "os.rename", "os.remove", "os.mkdir", "os.truncate", "os.link")
RAISED = 70  # the status of a command that ended in a traceback
EXPLAINED = (0, 1, 3)  # success, an error in words, a loss that is no longer finite


# --- commands in a process of their own ---------------------------------------------------------


def command(
    arguments: list[str], to: Path, kill_at: int | None = None, near: Path | None = None
) -> int:
    """The exit status of ``polarstep arguments``, negative for a signal; its output is in ``to``.

    ``kill_at`` is the number of an audit event, of those about files in ``near`` if it is given. Without
    it, the file ``to`` ends with the number of events there were.
    """
    child = os.fork()
    if child == 0:
        os._exit(_in_child(arguments, to, kill_at, near))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _in_child(arguments: list[str], to: Path, kill_at: int | None, near: Path | None) -> int:
    status, events = RAISED, [0]
    output = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if near is not None and not (event in IN_DIRECTORY and str(near) in str(given[0])):
            return
        events[0] += 1
        if events[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.argv = ["polarstep", *arguments]
        sys.addaudithook(hook)
        app()
    except SystemExit as stopped:
        status = stopped.code if isinstance(stopped.code, int) else 0 if stopped.code is None else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(output, f"\n{events[0]}".encode())
    return status


def _run(method: str, directory: Path, *more: str) -> list[str]:
    settings = [f"--set={name}={json.dumps(value)}" for name, value in SETTINGS.items()]
    return ["run", "nanogpt-toy", "-m", method, *settings, "--out", str(directory), *more]


def _folder() -> Path:
    """A folder that is removed when this process ends; a forked child, which ends at once, leaves it."""
    folder = Path(tempfile.mkdtemp(prefix="polarstep-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def whole_run(method: str) -> tuple[Path, dict[bool, int]]:
    """A run that was not interrupted, and its number of audit events, all and those in its folder."""
    folder = _folder()
    events = {}
    for near in (True, False):
        shutil.rmtree(folder / "run", ignore_errors=True)
        log = folder / "log.txt"
        status = command(_run(method, folder / "run"), log, near=folder / "run" if near else None)
        assert status == 0, log.read_text()
        events[near] = int(log.read_text().rsplit("\n", 1)[1])
    return folder / "run", events


def _records(directory: Path) -> dict[str, Any]:
    """All of a finished run that must not depend on when it was interrupted."""
    lines = (directory / record.METRICS).read_text().splitlines()
    rows = [{k: v for k, v in json.loads(x).items() if k not in TIME_FIELDS} for x in lines]
    state = torch.load(directory / record.CHECKPOINT, weights_only=True)
    result = Result.load(directory)
    assert result is not None
    return {
        "rows": rows,
        "value": (result.status, result.steps, result.value),
        "weights": {name: tensor.tolist() for name, tensor in state["model"].items()},
        "momentum": [
            {name: X.tolist() for name, X in each.items() if isinstance(X, torch.Tensor)}
            for each in state["optimizer"]["state"].values()
        ],
    }


# --- kills --------------------------------------------------------------------------------------


def after_kills(method: str, kills: tuple[tuple[float, bool], ...]) -> str | None:
    """What is wrong with a run that was killed and resumed; ``None`` if nothing is.

    A kill is a part of the run, as a number in [0, 1], of all audit events or of those in its folder.
    """
    expected, events = whole_run(method)
    with tempfile.TemporaryDirectory(prefix="polarstep-fuzz-") as folder:
        directory, log = Path(folder) / "run", Path(folder) / "log.txt"
        for part, near in (*kills, (None, False)):
            if _has_ended(directory):
                break
            more = [] if state_of(directory) == "empty" else ["--resume"]
            at = None if part is None else 1 + int(part * events[near])
            status = command(_run(method, directory, *more), log, at, directory if near else None)
            if status not in (0, -signal.SIGKILL):
                return f"status {status} after a kill:\n{log.read_text()}"
        found, whole = _records(directory), _records(expected)
        wrong = [name for name in whole if found[name] != whole[name]]
        return f"{', '.join(wrong)} differ from the run without kills" if wrong else None


def _has_ended(directory: Path) -> bool:
    result = Result.load(directory) if directory.exists() else None
    return result is not None and result.status == "finished"


def kills_tried(choose: Choices) -> Outcome:
    """One run with up to three kills."""
    method = choose.random.choice(SLUGS)
    count = choose.random.randint(1, 3)
    kills = tuple((choose.random.random(), choose.whether(0.7)) for _ in range(count))
    outcome = Outcome()
    outcome.tried["kills"] += len(kills)
    found = after_kills(method, kills)
    for fewer in (kills[:1], kills[:2]):
        if found and len(fewer) < len(kills) and after_kills(method, fewer):
            kills = fewer
            break
    if found:
        code = "from tests.fuzz.directories import after_kills\n\n"
        code += f"print(after_kills({method!r}, {kills!r}))"
        outcome.violations.append(Violation("a kill leaves no trace", found, code))
    return outcome


# --- damaged files ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """A change of one file: ``kind`` says which, ``at`` where as a part of its length."""

    file: str
    kind: str
    at: float = 0.0
    value: str = ""

    def to(self, directory: Path) -> None:
        """Do it."""
        path = directory / self.file
        content = path.read_bytes() if path.exists() else b""
        place = min(int(self.at * len(content)), max(0, len(content) - 1))
        if self.kind == "removed":
            path.unlink(missing_ok=True)
        elif self.kind == "a folder":
            path.unlink(missing_ok=True)
            path.mkdir()
        elif self.kind == "cut":
            path.write_bytes(content[:place])
        elif self.kind == "flipped" and content:
            changed = bytearray(content)
            changed[place] ^= 1 << int(self.at * 8e6) % 8
            path.write_bytes(bytes(changed))
        elif self.kind == "appended":
            path.write_bytes(content + self.value.encode())
        elif self.kind == "written over":
            path.write_bytes(self.value.encode())
        elif self.kind == "one value":
            path.write_bytes(self._with_other_value(content))

    def _with_other_value(self, content: bytes) -> bytes:
        """JSON, or lines of JSON, with one value replaced."""
        lines = content.split(b"\n") if self.file.endswith(".jsonl") else [content]
        number = min(int(self.at * len(lines)), len(lines) - 1)
        try:
            tree = json.loads(lines[number])
        except ValueError:
            return content
        places = list(_places(tree))
        if places:
            holder, key = places[int(self.at * 1e6) % len(places)]
            holder[key] = json.loads(self.value)
        lines[number] = json.dumps(tree).encode()
        return b"\n".join(lines)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


@cache
def _unfinished(method: str) -> Path:
    """A run that was killed in its second half."""
    _, events = whole_run(method)
    folder = _folder()
    at = events[True] * 7 // 10
    command(_run(method, folder / "run"), folder / "log.txt", at, folder / "run")
    assert not _has_ended(folder / "run")
    return folder / "run"


def after_damage(method: str, finished: bool, damage: Damage, what: str) -> str | None:
    """What is wrong with ``polarstep what`` on a damaged run; ``None`` if it explains itself."""
    whole, _ = whole_run(method)
    with tempfile.TemporaryDirectory(prefix="polarstep-fuzz-") as folder:
        directory, log, out = (Path(folder) / name for name in ("run", "log.txt", "out"))
        shutil.copytree(whole if finished else _unfinished(method), directory)
        damage.to(directory)
        arguments = {
            "resume": _run(method, directory, "--resume"),
            "pack": ["pack", str(directory), "--out", str(out)],
            "report": ["report", str(directory), "--out", str(out)],
            "list": ["list", str(directory)],
        }[what]
        status = command(arguments, log)
        text = log.read_text().rsplit("\n", 1)[0].strip()
        if status not in EXPLAINED:
            return f"status {status}:\n{text[-2000:]}"
        if status == 1 and not text:
            return "status 1 without a word"
        if what == "resume" and status == 0 and damage.file.startswith("checkpoint"):
            found, expected = _records(directory), _records(whole)
            wrong = [name for name in expected if found[name] != expected[name]]
            if wrong:
                return f"{', '.join(wrong)} differ from the run without damage"
        return None


VALUES = ("null", "-1", "1e400", "NaN", '""', '"x"', "[]", "{}", "true", "[[]]", '{"a": 1}', "0")
TEXTS = ("", "null", "[]", "{}", "[1", '{"step": 1', "\x00\x01", "\n\n", "ÿ", '"text"')


def damages_tried(choose: Choices) -> Outcome:
    """One file of a run, damaged."""
    method, finished = choose.one_of("rand-muon", "adamw"), choose.whether(0.4)
    source = whole_run(method)[0] if finished else _unfinished(method)
    files = sorted(path.name for path in source.iterdir() if path.is_file())
    kind = choose.one_of(
        "one value",
        "one value",
        "one value",
        "flipped",
        "cut",
        "appended",
        "written over",
        "removed",
        "a folder",
    )
    value = choose.one_of(*VALUES) if kind == "one value" else choose.one_of(*TEXTS)
    names = [name for name in files if ".json" in name] if kind == "one value" else files
    damage = Damage(choose.random.choice(names), kind, choose.random.random(), value)
    what = (
        choose.one_of("list", "pack", "report")
        if finished
        else choose.one_of("resume", "resume", "list")
    )
    outcome = Outcome()
    outcome.tried["damaged files"] += 1
    found = after_damage(method, finished, damage, what)
    if found:
        code = (
            "from tests.fuzz.directories import Damage, after_damage\n\n"
            f"print(after_damage({method!r}, {finished}, {damage!r}, {what!r}))"
        )
        outcome.violations.append(Violation("a damaged file is explained", found, code))
    return outcome
