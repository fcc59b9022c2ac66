"""Run a function in several processes that talk by gloo: one interpreter starts, and forks the ranks."""

from __future__ import annotations

import importlib
import subprocess
import sys
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


def launched(module: str, ranks: int, folder: Path) -> list[Any]:
    """What ``module.main(rank, ranks, folder)`` returned on each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    run = start("-m", "tests.distributed.launch", module, str(ranks), str(folder))
    try:
        _, errors = run.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        run.kill()
        raise
    assert run.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _rank(rank: int, module: str, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    result = importlib.import_module(module).main(rank, ranks, Path(folder))
    torch.save(result, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    module, ranks, folder = sys.argv[1:]
    importlib.import_module(module)
    # The first step of any optimizer imports torch._dynamo, for two seconds: here once for all ranks.
    importlib.import_module("torch._dynamo")
    multiprocessing.start_processes(
        _rank, (module, int(ranks), folder), nprocs=int(ranks), start_method="fork"
    )
