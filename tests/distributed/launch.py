"""Run a function in several processes that talk by gloo.

An interpreter takes seconds to import torch. One interpreter, the server, therefore starts at the
first call of ``launched`` in a process of pytest, and forks the ranks of every call from then on.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import PATIENCE, start
from torch import multiprocessing

__all__ = ["launched", "needs_gloo"]

needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)

# What ranks would otherwise import each for itself. The first step of any optimizer imports
# torch._dynamo, which takes two seconds.
IMPORTED_ONCE = (
    "polarstep",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
)


def launched(module: str, ranks: int, folder: Path) -> list[Any]:
    """What ``module.main(rank, ranks, folder)`` returned on each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps([module, ranks, str(folder)]), file=server.stdin, flush=True)
    if not select.select([server.stdout], [], [], PATIENCE)[0]:
        os.killpg(server.pid, signal.SIGKILL)
        raise TimeoutError(f"{module} on {ranks} ranks: nothing for {PATIENCE:g} s")
    status = server.stdout.readline()
    assert status == "0\n", (folder / "errors.txt").read_text(encoding="utf-8")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks. It ends when this process does, which closes its standard input."""
    return start(
        "-m",
        "tests.distributed.launch",
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _rank(rank: int, module: str, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    result = importlib.import_module(module).main(rank, ranks, Path(folder))
    torch.save(result, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def _fork_ranks(module: str, ranks: int, folder: str) -> int:
    """The exit status of all ranks together; what they write goes to ``errors.txt``."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        written = os.open(f"{folder}/errors.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(written, 1)  # the answer of the server is all that its reader may see
        os.dup2(written, 2)
        importlib.import_module(module)
        multiprocessing.start_processes(
            _rank, (module, ranks, folder), nprocs=ranks, start_method="fork"
        )
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _serve() -> None:
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    for line in sys.stdin:
        print(_fork_ranks(*json.loads(line)), flush=True)


if __name__ == "__main__":
    _serve()
