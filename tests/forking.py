"""Processes forked from an interpreter that has torch and the package imported already.

An interpreter takes four seconds of a core to import torch and what a training run imports besides. One
interpreter, the server, therefore starts at the first call of :func:`fork` in a process of pytest, and
forks every process that is asked for from then on. What such a process inherits is imported modules
alone; its environment, folder, arguments and output are its own, as if :func:`tests.processes.start`
had started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import IO

from tests.processes import PATIENCE, environment, start

__all__ = ["Forked", "fork"]

# What a process would otherwise import for itself. The first step of any optimizer imports
# torch._dynamo, which takes two seconds.
IMPORTED_ONCE = (
    "polarstep",
    "pytest",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "polarstep_lab.cli",
    "polarstep_lab.jobs.local",
    "polarstep_lab.tune",
)


def fork(
    *arguments: str, env: dict[str, str] | None = None, imported: tuple[str, ...] = IMPORTED_ONCE
) -> Forked:
    """Run Python with ``arguments``, which begin with ``-m``, ``-c`` or the path of a script.

    The process has a session of its own, in which SIGINT has its effect. Of the modules ``imported``,
    and of what they import, the process has copies in memory.
    """
    request = {"arguments": arguments, "environment": environment(env), "folder": os.getcwd()}
    reply, answer = socket.socketpair()
    written = tempfile.TemporaryFile("a+"), tempfile.TemporaryFile("a+")  # noqa: SIM115
    with answer:
        descriptors = [answer.fileno(), *(file.fileno() for file in written)]
        socket.send_fds(_server(imported), [json.dumps(request).encode() + b"\n"], descriptors)
    return Forked(arguments, reply, written)


class Forked:
    """A forked process, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(
        self, arguments: tuple[str, ...], reply: socket.socket, written: tuple[IO[str], IO[str]]
    ) -> None:
        self.arguments, self._reply, self._written = arguments, reply, written
        self.returncode: int | None = None
        self._reply.settimeout(PATIENCE)
        self.pid = self._number()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, negative where a signal ended the process."""
        if self.returncode is None:
            self._reply.settimeout(timeout)
            try:
                self.returncode = self._number()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.arguments, timeout or 0.0) from None
        return self.returncode

    def poll(self) -> int | None:
        """The exit status, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What the process has written when it ends: to standard output, and to standard error."""
        self.wait(timeout)
        out, errors = self._written
        out.seek(0)
        errors.seek(0)
        return out.read(), errors.read()

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _number(self) -> int:
        """The next number that the server says of this process: its id, then its exit status."""
        message = self._reply.recv(8)
        assert message, f"the server of forked processes has ended, and {self.arguments} with it"
        return int.from_bytes(message, "little", signed=True)


@functools.cache
def _server(imported: tuple[str, ...]) -> socket.socket:
    """The way to a server, which ends when this process does and the way is closed."""
    ours, theirs = socket.socketpair()
    with theirs:
        start("-m", __name__, *imported, stdin=theirs.fileno(), stderr=subprocess.DEVNULL)
    return ours


def _serve(requests: socket.socket) -> dict[str, object] | None:
    """Fork for every request. Returns the request in a forked process, and None when all is done."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 2**20, 3)
        with contextlib.suppress(ChildProcessError):  # there is none
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        if not message:
            return None
        while not message.endswith(b"\n"):
            more = requests.recv(2**20)
            if not more:  # who asked has ended in the middle of a request
                return None
            message += more
        if os.fork() == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), requests.detach())
            _watch_or_become(*descriptors)
            return json.loads(message)
        for descriptor in descriptors:
            os.close(descriptor)


def _watch_or_become(answer: int, out: int, errors: int) -> None:
    """Fork again. The parent tells the id and the end of its child, which alone returns."""
    child = os.fork()
    if child:
        os.write(answer, child.to_bytes(8, "little", signed=True))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with contextlib.suppress(BrokenPipeError):  # nobody has waited for it
            os.write(answer, status.to_bytes(8, "little", signed=True))
        os._exit(0)
    os.setsid()
    os.dup2(out, 1)
    os.dup2(errors, 2)
    for descriptor in (answer, out, errors):
        os.close(descriptor)


def _run(arguments: list[str], environment: dict[str, str], folder: str) -> None:
    """Do what ``python arguments`` does in ``folder``."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")


def _leave(ended: list[int]) -> None:
    """End without taking the interpreter down, if the exit status is known.

    To free what is in memory means to write to every page that is shared, and so to copy it. Where an
    error ends the process the interpreter has to find the status; nobody is then to read what Triton's
    bindings write of leaks.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # there is none, or it is closed
            stream.flush()
    if ended:
        os._exit(ended[0])
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _main(*imported: str) -> None:
    ended: list[int] = []
    atexit.register(_leave, ended)  # before all others, and so called after them and all threads
    for name in imported:
        # A machine may lack what the laboratory needs. Who needs it fails with its own message.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the collector would otherwise write to, and so copy, every page that is shared
    request = _serve(socket.socket(fileno=0))
    try:
        if request is not None:
            _run(**request)
        ended.append(0)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            ended.append((leaving.code or 0) & 0xFF)
        raise


if __name__ == "__main__":
    _main(*sys.argv[1:])
