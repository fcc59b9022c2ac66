"""``gamma.jsonl``: γ and ν of sampled steps of a run, continued when the run is resumed."""

from __future__ import annotations

from pathlib import Path

from torch.optim import Optimizer

import polarstep as ps
from polarstep.certificate import Monitor
from polarstep_lab.storage import JsonLines

__all__ = ["GammaLog"]


class GammaLog:
    """A :class:`polarstep.certificate.Monitor` of Muon's matrices that writes to a file.

    Tail indices are left out: each compares two consecutive steps, and a run may be interrupted
    between them.
    """

    def __init__(self, path: Path | None, length: int, every: int, optimizer: ps.Muon) -> None:
        """Watch ``optimizer`` and continue the log after its first ``length`` bytes.

        Without a ``path`` the steps are measured and nothing is written: all ranks must watch, as
        the optimizer of a rank that is watched may take another path through its step.
        """
        if path is not None:
            JsonLines(path, length).close()  # drop rows written after the checkpoint
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
        cls, path: Path | None, length: int, every: int | None, optimizer: Optimizer
    ) -> GammaLog | None:
        """A log if ``every`` is given and the optimizer is Muon, else None."""
        if every is None or not isinstance(optimizer, ps.Muon):
            return None
        return cls(path, length, every, optimizer)

    @property
    def length(self) -> int:
        """The length of the log in bytes; its lines are flushed as they are written."""
        return 0 if self._path is None else self._path.stat().st_size

    def close(self) -> None:
        """Detach the monitor and close the log."""
        self._monitor.close()
