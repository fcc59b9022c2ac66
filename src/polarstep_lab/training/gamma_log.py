"""γ and ν of sampled steps beside the metrics of a run, with a monitor that survives a resume."""

from __future__ import annotations

from pathlib import Path

from torch.optim import Optimizer

import polarstep as ps
from polarstep.diagnostics.monitor import Monitor
from polarstep.storage import JsonLines

__all__ = ["GammaLog"]


class GammaLog:
    """``gamma.jsonl``: what :class:`polarstep.diagnostics.monitor.Monitor` sees of Muon's matrices.

    Tail indices are left out: they look at two steps in a row, and a run may be resumed between
    them.
    """

    def __init__(self, path: Path, length: int, every: int, optimizer: ps.Muon) -> None:
        """Watch ``optimizer`` and go on after the first ``length`` bytes of the log."""
        JsonLines(path, length).close()  # cut off what was seen after the checkpoint
        self._path = path
        muon = {
            name
            for group in optimizer.param_groups
            if group["algorithm"] == "muon"
            for name in group["param_names"]
        }
        self._monitor = Monitor(optimizer, every, jsonl=path, select=muon.__contains__, tail=False)

    @classmethod
    def attach(
        cls, path: Path, length: int, every: int | None, optimizer: Optimizer
    ) -> GammaLog | None:
        """A log, where one was asked for and there is a polar map to look at."""
        if every is None or not isinstance(optimizer, ps.Muon):
            return None
        return cls(path, length, every, optimizer)

    @property
    def length(self) -> int:
        """The length of the log in bytes; its lines are flushed as they are written."""
        return self._path.stat().st_size

    def close(self) -> None:
        """Stop looking and close the log."""
        self._monitor.close()
