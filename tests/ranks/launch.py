"""Run a function in several processes that talk by gloo."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forking import fork
from tests.processes import PATIENCE
from torch import multiprocessing

__all__ = ["launched", "needs_gloo"]

needs_gloo = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


def launched(module: str, ranks: int, folder: Path) -> list[Any]:
    """What ``module.main(rank, ranks, folder)`` returned on each rank.

    A module may have a ``TIMEOUT`` for what ranks exchange.
    """
    folder.mkdir(parents=True, exist_ok=True)
    process = fork("-m", __name__, module, str(ranks), str(folder))
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def _rank(rank: int, module: str, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    its = importlib.import_module(module)
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=getattr(its, "TIMEOUT", None),
    )
    result = its.main(rank, ranks, Path(folder))
    torch.save(result, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def _main(module: str, ranks: str, folder: str) -> None:
    importlib.import_module(module)
    count = int(ranks)
    multiprocessing.start_processes(
        _rank,
        (module, count, folder),
        nprocs=count,
        start_method="spawn" if torch.cuda.is_available() else "fork",
    )


if __name__ == "__main__":
    _main(*sys.argv[1:])
