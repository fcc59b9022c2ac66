"""A tensor as a batch of matrices: which matrices is this parameter?

A convolution filter is one matrix ``out × in·kh·kw``; stacked experts are a batch; a fused projection is
several matrices on top of each other; and some layers store ``inputs × outputs``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, get_args

import torch
from torch import Tensor

__all__ = ["Layout", "MatrixView"]

Layout = Literal["auto", "conv", "stack", "transposed"]


@dataclass(frozen=True)
class MatrixView:
    """How a tensor is read as ``batch`` matrices of ``rows × cols``, and how these are cut into blocks.

    ``rows`` and ``cols`` are those of the tensor as it is stored. Outputs are along the rows, or along
    the columns if the matrix is stored ``transposed``. ``split`` has the outputs of each part,
    ``columns`` the inputs of each part. With ``repeats`` the parts of ``split`` come that many times in
    turn (q, k and v of the first head, then of the second, …), and all pieces of a part are one matrix.

    >>> MatrixView.of((64, 24, 3, 3)).shapes                           # a convolution
    ((1, 64, 216),)
    >>> MatrixView.of((8, 512, 256)).shapes                            # eight experts
    ((8, 512, 256),)
    >>> MatrixView.of((1280, 768), split_sizes=(768, 256, 256)).shapes # a fused q, k, v
    ((1, 768, 768), (1, 256, 768), (1, 256, 768))
    >>> print(MatrixView.of((768, 2304), layout="transposed", split_sizes=(768, 768, 768)))
    3·(768×768), stored transposed
    """

    batch: int
    rows: int
    cols: int
    split: tuple[int, ...]
    columns: tuple[int, ...]
    repeats: int = 1
    transposed: bool = False

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        *,
        layout: Layout = "auto",
        split_sizes: Sequence[int] | None = None,
        split_columns: Sequence[int] | None = None,
        split_repeats: int = 1,
        name: str = "the parameter",
    ) -> MatrixView:
        """Read a tensor of ``shape`` as matrices.

        ``layout="conv"`` flattens all dimensions after the first; ``"stack"`` takes the last two
        dimensions as the matrix and the leading dimensions as a batch; ``"transposed"`` is a stack of
        matrices stored inputs × outputs. ``"auto"`` goes by the number of dimensions: 4 and 5 are a 2-d
        or 3-d convolution, 3 is a stack. (A 1-d convolution has 3 as well and needs ``"conv"``, which
        :func:`polarstep.muon_for` chooses by its module.)

        ``split_sizes`` are the outputs of each matrix, ``split_columns`` the inputs of each, and
        ``split_repeats`` is how often the sizes in ``split_sizes`` come in turn.
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
        transposed = layout == "transposed"
        outputs, inputs = (cols, rows) if transposed else (rows, cols)
        split = (outputs,) if split_sizes is None else tuple(split_sizes)
        columns = (inputs,) if split_columns is None else tuple(split_columns)
        side = "outputs (its columns, as it is stored transposed)" if transposed else "rows"
        if split_sizes is None and split_repeats > 1:
            raise ValueError(
                f"{name} has split_repeats={split_repeats} without split_sizes: expected the sizes of "
                "the parts that come in turn, as split_sizes=(64, 64, 64); 1 if there are none"
            )
        if outputs % split_repeats:
            raise ValueError(
                f"{name} has split_repeats={split_repeats}, which does not divide its {outputs} {side}: "
                "expected how often the parts of split_sizes come in turn, as the number of heads"
            )
        total = sum(split) * split_repeats
        if split_sizes is not None and (min(split, default=0) < 1 or total != outputs):
            turns = f" {split_repeats} times in turn" if split_repeats > 1 else ""
            raise ValueError(
                f"{name} has split_sizes={split}{turns}, which sum to {total}, but the weight has "
                f"{outputs} {side}; give positive sizes along the "
                f"{'outputs' if transposed else 'rows'} that sum to {outputs // split_repeats}"
            )
        if split_columns is not None and (min(columns, default=0) < 1 or sum(columns) != inputs):
            raise ValueError(
                f"{name} has split_columns={columns}, which sum to {sum(columns)}, but the weight has "
                f"{inputs} inputs; give positive sizes that sum to {inputs}"
            )
        return cls(batch, rows, cols, split, columns, split_repeats, transposed)

    @cached_property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """``(batch, m, n)`` of every block as it is stored; equal blocks are one batch."""
        return tuple((b, n, m) if self.transposed else (b, m, n) for b, m, n in self._maps)

    @cached_property
    def _maps(self) -> tuple[tuple[int, int, int], ...]:
        """``(batch, outputs, inputs)`` of every block."""
        sizes = [(self.repeats * m, n) for m in self.split for n in self.columns]
        if len(set(sizes)) == 1:
            return ((self.batch * len(sizes), *sizes[0]),)
        return tuple((self.batch, m, n) for m, n in sizes)

    @property
    def is_cut(self) -> bool:
        """Whether the matrices of the tensor are cut into parts, along either side."""
        return len(self.split) * len(self.columns) > 1

    @property
    def in_turn(self) -> bool:
        """Whether every matrix is a run of rows as stored, so that it lies in memory in one piece."""
        across = self.split if self.transposed else self.columns
        return len(across) == 1 and (self.repeats == 1 or len(self.split) == 1)

    @property
    def in_rectangles(self) -> bool:
        """Whether every matrix is a rectangle of a stored matrix, of some of its rows and columns."""
        return self.repeats == 1 or len(self.split) == 1

    def corners(self, block: int) -> tuple[int, ...]:
        """Where the matrices of a block begin, in entries from the first one (:attr:`in_rectangles`).

        >>> MatrixView.of((4, 6), layout="transposed", split_sizes=(2, 2, 2)).corners(0)
        (0, 2, 4)
        >>> MatrixView.of((2, 3, 6), split_sizes=(1, 2), split_columns=(4, 2)).corners(3)
        (10, 28)
        """
        return self._corners[block]

    @cached_property
    def _corners(self) -> tuple[tuple[int, ...], ...]:
        """:meth:`corners` of every block; a step needs them whenever gradients have moved."""
        assert self.in_rectangles
        outputs, inputs = ([0, *accumulate(sizes)][:-1] for sizes in (self.split, self.columns))
        pairs = [(j, i) if self.transposed else (i, j) for i in outputs for j in inputs]
        within = [row * self.cols + column for row, column in pairs]
        blocks = [within] if len(self.shapes) == 1 else [[first] for first in within]
        firsts = [b * self.rows * self.cols for b in range(self.batch)]
        return tuple(tuple(b + first for b in firsts for first in each) for each in blocks)

    @property
    def runs(self) -> tuple[int, ...]:
        """The rows as stored of each part, if every part is a run of rows (:attr:`in_turn`)."""
        assert self.in_turn
        if self.transposed:
            return self.columns
        return self.split if self.repeats == 1 else (self.rows,)

    def blocks(self, X: Tensor) -> list[Tensor]:
        """The blocks of ``X``, in the order of :attr:`shapes`; views wherever strides allow."""
        X = X.reshape(self.batch, self.rows, self.cols)
        X = X.mT if self.transposed else X
        if len(self._maps) == 1:
            X = X.reshape(self._even).permute(0, 2, 4, 1, 3, 5).reshape(self._maps[0])
            return [X.mT if self.transposed else X]
        parts = [X]
        if len(self.split) > 1:
            turns = X.reshape(self.batch, self.repeats, -1, X.shape[-1])
            each = torch.split(turns, list(self.split), dim=2)
            parts = [part.reshape(self.batch, -1, X.shape[-1]) for part in each]
        columns = list(self.columns)
        found = [block for part in parts for block in torch.split(part, columns, dim=2)]
        return [block.mT for block in found] if self.transposed else found

    def assemble(self, blocks: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The inverse of :meth:`blocks`."""
        blocks = [block.mT for block in blocks] if self.transposed else list(blocks)
        if len(blocks) == 1:
            batch, repeats, parts, m, across, n = self._even
            X = blocks[0].reshape(batch, parts, across, repeats, m, n).permute(0, 3, 1, 4, 2, 5)
        else:
            wide = len(self.columns)
            rows = [blocks[i : i + wide] for i in range(0, len(blocks), wide)]
            joined = [torch.cat(row, dim=2) if wide > 1 else row[0] for row in rows]
            inputs = sum(self.columns)
            parted = [part.reshape(self.batch, self.repeats, -1, inputs) for part in joined]
            X = torch.cat(parted, dim=2)
        if self.transposed:
            X = X.reshape(self.batch, self.cols, self.rows).mT
        return X.reshape(tuple(shape))

    @property
    def _even(self) -> tuple[int, int, int, int, int, int]:
        """Sizes (batch, repeats, parts, outputs of a part, parts across, inputs of a part)."""
        split, columns = self.split, self.columns
        return (self.batch, self.repeats, len(split), split[0], len(columns), columns[0])

    def __str__(self) -> str:
        """The matrices as outputs × inputs."""
        parts = [f"{m}×{n}" if batch == 1 else f"{batch}·({m}×{n})" for batch, m, n in self._maps]
        return " + ".join(parts) + (", stored transposed" if self.transposed else "")
