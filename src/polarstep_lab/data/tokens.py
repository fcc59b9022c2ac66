"""Batches of token windows as a pure function of (seed, position).

The shards are cut into windows of equal length. Each epoch visits all windows once, in an order and
with an offset of the cuts that are drawn from the seed and the epoch. The loader has no state: the
training loop asks for the windows at a position, so a resumed run needs only its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor

from polarstep.rng import key_to_seed
from polarstep_lab.data.shards import ShardError

__all__ = ["TokenWindows", "halves"]

Tokens = NDArray[np.uint16]


def halves(shards: Sequence[Tokens]) -> tuple[list[Tokens], list[Tokens]]:
    """The first and the second half of all tokens, in order; one shard may be cut in two.

    >>> [[len(part) for part in half] for half in halves([np.zeros(6), np.zeros(3)])]
    [[4], [2, 3]]
    """
    left = sum(map(len, shards)) // 2
    first, second = [], []
    for shard in shards:
        first.append(shard[:left])
        second.append(shard[left:])
        left = max(0, left - len(shard))
    return [part for part in first if len(part)], [part for part in second if len(part)]


@dataclass(frozen=True, eq=False)
class TokenWindows:
    """Windows of ``length`` tokens, and the token after each, over one or several token arrays."""

    shards: tuple[Tokens, ...]
    length: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ValueError(f"length={self.length}: expected at least one token, as 1024")
        if self.count == 0:
            longest = max((len(shard) for shard in self.shards), default=0)
            raise ShardError(
                f"the longest shard has {longest:,} tokens, but a window of {self.length:,} needs "
                f"{self.length + 1:,}: use more text or shorter sequences"
            )

    @property
    def per_shard(self) -> tuple[int, ...]:
        """The number of windows in each shard; a window also reads the token after it, as a target."""
        return tuple(max(0, (len(shard) - 1) // self.length) for shard in self.shards)

    @property
    def count(self) -> int:
        """The number of windows in one epoch."""
        return sum(self.per_shard)

    def train(self, seed: int, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the ``count`` windows from ``position`` on in the shuffled order.

        Positions continue over epochs: position ``self.count`` is the first window of epoch 1.
        """
        epochs, index = np.divmod(np.arange(position, position + count), self.count)
        starts = np.empty((count, 2), dtype=np.int64)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            starts[here] = self._locate(self._order(seed, epoch)[index[here]])
            offsets = self._offsets(seed, epoch)
            starts[here, 1] += offsets[starts[here, 0]]
        return self._read(starts)

    def one_pass(self, seed: int, total: int, position: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of ``count`` windows of the first ``total`` in torch's order."""
        if total > self.count:
            raise ShardError(
                f"data.draws=plain and {total:,} windows of {self.length:,} tokens to read, but the "
                f"data has {self.count:,}: use more text, fewer steps, or data.draws=keyed"
            )
        order = _torch_permutation(seed, total)[position : position + count]
        return self._read(self._locate(order))

    def in_order(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of windows ``first`` to ``first + count - 1`` in file order."""
        return self._read(self._locate(np.arange(first, first + count)))

    def _locate(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Shard and first token of each window, for cuts that begin at a shard's first token."""
        ends = np.cumsum(self.per_shard, dtype=np.int64)
        shards = np.searchsorted(ends, windows, side="right")
        before = np.concatenate([[0], ends])[shards]
        return np.stack([shards, (windows - before) * self.length], axis=1)

    def _offsets(self, seed: int, epoch: int) -> NDArray[np.int64]:
        """The token of each shard at which this epoch begins its cuts.

        Cutting a shard leaves fewer than ``length`` tokens over. The offset divides them between the
        two ends of the shard, so that epochs see different windows.
        """
        slack = np.array([(len(shard) - 1) % self.length for shard in self.shards])
        drawn = [key_to_seed(seed, "offset", epoch, shard) for shard in range(len(self.shards))]
        offsets: NDArray[np.int64] = np.array(drawn, dtype=np.int64) % (slack + 1)
        return offsets

    def _order(self, seed: int, epoch: int) -> NDArray[np.int64]:
        return _permutation(key_to_seed(seed, "windows", epoch), self.count)

    def _read(self, starts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        batch = np.empty((len(starts), self.length + 1), dtype=np.uint16)
        for shard in np.unique(starts[:, 0]):
            here = starts[:, 0] == shard
            # A strided view of all windows of the shard; indexing its rows copies whole windows.
            windows = sliding_window_view(self.shards[shard], self.length + 1)
            batch[here] = windows[starts[here, 1]]
        return self._pair(batch)

    def _pair(self, batch: Tokens) -> tuple[Tensor, Tensor]:
        # On a GPU a token beyond the embedding aborts the process with an unrelated message.
        largest = int(batch.max())
        if largest >= self.vocab_size:
            raise ShardError(
                f"the data holds token {largest}, but the model has a vocabulary of "
                f"{self.vocab_size}: set model.vocab_size to the tokenizer's (50257 for GPT-2)"
            )
        tokens = torch.from_numpy(batch.astype(np.int64))
        return tokens[:, :-1], tokens[:, 1:]


@lru_cache(maxsize=4)
def _torch_permutation(seed: int, count: int) -> NDArray[np.int64]:
    """The order of the windows of a run of one pass."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).numpy()


@lru_cache(maxsize=4)
def _permutation(seed: int, count: int) -> NDArray[np.int64]:
    """The order of an epoch, cached because it has five million entries at 10B tokens."""
    return np.random.Generator(np.random.PCG64(seed)).permutation(count)
