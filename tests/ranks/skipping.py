"""Rank 2 skips a step, and others wait for it in vain; main returns what each of three ranks saw."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

import polarstep as ps
from polarstep.ranks import collectives

TIMEOUT = timedelta(seconds=collectives.NOTED_AFTER + 3)
LATE = 1  # the step for which rank 1 takes long
SKIPPED = 3


def main(rank: int, ranks: int, folder: Path) -> list[str]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(12, 8, bias=False))
    optimizer = ps.Muon(model.parameters(), process_group=torch.distributed.group.WORLD)
    words = []
    for step in range(SKIPPED + 2):
        try:
            model(torch.randn(4, 12)).square().mean().backward()
            if rank == 1 and step == LATE:
                time.sleep(collectives.NOTED_AFTER + 1)
            if (rank, step) != (2, SKIPPED):
                optimizer.step()
        except Exception as error:
            words.append(f"{type(error).__name__}: {error}")
            break
        words.append("nothing")
    return words
