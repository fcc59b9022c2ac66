"""γ and ν of sampled steps, parameter by parameter, beside the metrics of a run.

The paper's Assumption on inexactness, measured: ⟨M, T⟩ ≥ (1 − γ)‖M‖_* and ‖T‖_op ≤ 1 + ν. Looking
changes nothing: the weights of a monitored run are those of an unmonitored one, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

from torch.optim import Optimizer

import polarstep as ps
from polarstep.diagnostics import certify
from polarstep.optim.phases import Bucket
from polarstep.storage import JsonLines

__all__ = ["GammaLog"]


class GammaLog:
    """Writes ``gamma.jsonl``: one line per matrix at every ``every``-th step, and at the first."""

    def __init__(self, path: Path, length: int, every: int, optimizer: ps.Muon) -> None:
        """Watch ``optimizer`` and go on with a log of ``length`` bytes."""
        self._log = JsonLines(path, length)
        self._every = every
        self._step = 0
        self._handle = optimizer.register_polar_hook(self._look)

    @classmethod
    def attach(
        cls, path: Path, length: int, every: int | None, optimizer: Optimizer
    ) -> GammaLog | None:
        """A log, where one was asked for and there is a polar map to look at."""
        if every is None or not isinstance(optimizer, ps.Muon):
            return None
        return cls(path, length, every, optimizer)

    def before_step(self, step: int) -> None:
        """The optimizer is about to make its ``step``-th step, counted from one."""
        self._step = step

    def _look(self, bucket: Bucket) -> None:
        if self._step != 1 and self._step % self._every:
            return
        found = certify(bucket.M, bucket.T)
        for name, gamma, nu in zip(
            bucket.names, found.gamma.tolist(), found.nu.tolist(), strict=True
        ):
            self._log.write({"step": self._step, "parameter": name, "gamma": gamma, "nu": nu})

    def sync(self) -> int:
        """Force all lines to disk and return the length of the log."""
        return self._log.sync()

    def close(self) -> None:
        """Stop looking and close the log."""
        self._handle.remove()
        self._log.close()
