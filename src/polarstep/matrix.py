"""A tensor as a batch of matrices: which matrices is this parameter?

A convolution filter is one matrix ``out × in·kh·kw``; stacked experts are a batch; a fused projection is
several matrices on top of each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["Layout", "MatrixView"]

Layout = Literal["auto", "conv", "stack"]


@dataclass(frozen=True)
class MatrixView:
    """How a tensor is read as ``batch`` matrices of ``rows × cols``, cut along the rows into blocks.

    >>> MatrixView.of((64, 24, 3, 3))                                  # a convolution
    MatrixView(batch=1, rows=64, cols=216, split=(64,))
    >>> MatrixView.of((8, 512, 256))                                   # eight experts
    MatrixView(batch=8, rows=512, cols=256, split=(512,))
    >>> MatrixView.of((1280, 768), split_sizes=(768, 256, 256)).shapes # a fused q, k, v
    ((1, 768, 768), (1, 256, 768), (1, 256, 768))
    """

    batch: int
    rows: int
    cols: int
    split: tuple[int, ...]

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        *,
        layout: Layout = "auto",
        split_sizes: Sequence[int] | None = None,
        name: str = "the parameter",
    ) -> MatrixView:
        """Read a tensor of ``shape`` as matrices.

        ``layout="conv"`` flattens all dimensions after the first; ``"stack"`` takes the last two
        dimensions as the matrix and the leading dimensions as a batch. ``"auto"`` goes by their
        number: 4 and 5 are a 2-d or 3-d convolution, 3 is a stack. (A 1-d convolution has 3 as well
        and needs ``"conv"``, which :func:`polarstep.muon_for` chooses by its module.)
        """
        if layout not in get_args(Layout):
            raise ValueError(f"layout={layout!r}: expected one of {', '.join(get_args(Layout))}")
        if len(shape) < 2:
            raise ValueError(
                f"{name} has shape {tuple(shape)}: Muon updates matrices, but this parameter has "
                "fewer than two dimensions; give it to AdamW or SGD in a group with "
                'algorithm="adamw" or "sgd", or let polarstep.muon_for(model) route it'
            )
        if layout == "auto":
            layout = "conv" if len(shape) in (4, 5) else "stack"
        if layout == "conv":
            batch, rows, cols = 1, shape[0], math.prod(shape[1:])
        else:
            batch, rows, cols = math.prod(shape[:-2]), shape[-2], shape[-1]
        if split_sizes is None:
            return cls(batch, rows, cols, (rows,))
        split = tuple(split_sizes)
        if any(size < 1 for size in split) or sum(split) != rows:
            raise ValueError(
                f"{name} has split_sizes={split}, which sum to {sum(split)}, but the weight has "
                f"{rows} rows; give positive sizes along the rows that sum to {rows}"
            )
        return cls(batch, rows, cols, split)

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """``(batch, m, n)`` of every block; equal blocks are one batch."""
        if len(set(self.split)) == 1:
            return ((self.batch * len(self.split), self.split[0], self.cols),)
        return tuple((self.batch, rows, self.cols) for rows in self.split)

    def blocks(self, X: Tensor) -> list[Tensor]:
        """The blocks of ``X``, in the order of :attr:`shapes`; views wherever strides allow."""
        X = X.reshape(self.batch, self.rows, self.cols)
        if len(set(self.split)) == 1:
            return [X.reshape(self.shapes[0])]
        return list(torch.split(X, list(self.split), dim=1))

    def assemble(self, blocks: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The inverse of :meth:`blocks`."""
        if len(blocks) == 1:
            return blocks[0].reshape(shape)
        return torch.cat(tuple(blocks), dim=1).reshape(shape)

    def __str__(self) -> str:
        parts = [f"{m}×{n}" if batch == 1 else f"{batch}·({m}×{n})" for batch, m, n in self.shapes]
        return " + ".join(parts)
