"""A tensor as a batch of matrices, and the arithmetic one may do on it.

Two questions are answered here and nowhere else. *Which matrices is this parameter?* A convolution
filter is one matrix ``out × in·kh·kw``; stacked experts are a batch; a fused projection is several
matrices on top of each other (:class:`MatrixView`). *In which precision and at which scale may its
products run?* (:func:`product_dtype`, :func:`unit_scaled`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from polarstep import kernels
from polarstep.torch_compile import constant

__all__ = [
    "Layout",
    "MatrixView",
    "normalized",
    "product_dtype",
    "product_like",
    "sketch_dtype",
    "unit_scaled",
    "workable",
]

Layout = Literal["auto", "conv", "stack"]

# A CPU's tiles multiply smaller matrices no faster, with the casts.
TILES_FROM = 512


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

        ``layout="conv"`` flattens everything behind the first dimension; ``"stack"`` takes the
        last two dimensions as the matrix and the leading ones as a batch. ``"auto"`` does what the
        number of dimensions suggests: 4 and 5 are a 2-d or 3-d convolution, 3 is a stack. (A 1-d
        convolution has 3 as well: say ``"conv"``; :func:`polarstep.muon_for` knows it by its module.)
        """
        if layout not in get_args(Layout):
            raise ValueError(f"layout={layout!r}: expected one of {', '.join(get_args(Layout))}")
        if len(shape) < 2:
            raise ValueError(
                f"{name} has shape {tuple(shape)}: Muon updates matrices, and this has fewer than "
                'two dimensions; give it to AdamW or SGD in a group with algorithm="adamw" or '
                '"sgd", or let polarstep.muon_for(model) route it'
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


def product_dtype(X: Tensor) -> torch.dtype:
    """The fastest precision in which this device really multiplies matrices like ``X``.

    float64 stays float64: who asks for it wants it. On CUDA from Ampere on that is bfloat16 with
    float32 accumulation. On a CPU it is float32: without bf16 arithmetic (most CPUs) a bf16
    product is emulated, hundreds of times slower than float32, and with it float32 is fast enough
    not to give up its digits; but see :func:`sketch_dtype`.
    """
    if X.dtype == torch.float64:
        return torch.float64
    if X.is_cuda and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float32


def sketch_dtype(m: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The precision of products that are to find directions of an m×n matrix, not digits of it.

    That of the matrix, ``dtype``, but for float32 on a CPU with matrix tiles (AMX): bfloat16, which
    those multiply several times as fast. A basis of Y is as good a basis when Y has been rounded, if
    only it is made orthonormal to more digits than that.
    """
    fast = dtype == torch.float32 and device.type == "cpu" and min(m, n) >= TILES_FROM
    return torch.bfloat16 if fast and has_tiles() else dtype


@constant
def has_tiles() -> bool:
    """Whether this CPU has tiles for bfloat16 products, and torch's library that uses them is on."""
    # torch has no public name for the first question.
    supported = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    mkldnn = torch.backends.mkldnn
    available = mkldnn.is_available()  # type: ignore[no-untyped-call]
    return bool(available and mkldnn.enabled and supported())


def workable(X: Tensor) -> Tensor:
    """``X`` in float32 at least, or in bfloat16 where the device multiplies in it."""
    if X.dtype.itemsize >= 4 or (X.dtype == torch.bfloat16 and product_dtype(X) == torch.bfloat16):
        return X
    return X.float()


def normalized(X: Tensor, dtype: torch.dtype) -> Tensor:
    """``X/‖X‖_F`` for each matrix, in ``dtype``, of norm at most one; a zero matrix stays zero.

    The norm is accumulated in float64: the squares of entries like 1e-30 or 1e30 leave the range
    of float32. In 16 bits rounding could lift a norm of one above one, where the polynomials that
    act on it are steepest, so there it is made a little smaller.
    """
    shrink = 1 - torch.finfo(dtype).eps / 2 if dtype.itemsize < 4 else 1.0
    if dtype.itemsize == 2 and kernels.available(X.device):
        from polarstep.kernels.normalize import normalized as by_kernel

        return by_kernel(X, shrink, dtype)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    small = torch.promote_types(X.dtype, torch.float32)
    norm = norm.to(small).clamp_min(torch.finfo(small).tiny)
    return (X.to(small) / (norm / shrink)).to(dtype)


def product_like(X: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """``AB`` in the memory layout of ``X``, which has its shape.

    Tall matrices come as transposed views. What is made of one goes back to where it came from, and
    adding a matrix to another across its memory takes a CPU ten times as long.
    """
    return (B.mT @ A.mT).mT if X.mT.is_contiguous() else A @ B


def unit_scaled(X: Tensor) -> tuple[Tensor, Tensor]:
    """``(sX, s)`` with one power of two ``s`` per matrix that puts its largest entry in [½, 1).

    Squares of entries like 1e-30 or 1e30 leave the range of float32, and with them every norm and
    Gram matrix. A power of two loses no bit, so T(cM) = T(M) is kept by construction. A zero matrix
    has s = 1.
    """
    # Not a norm of order inf: on a CPU that takes twenty times as long.
    largest = torch.maximum(X.amax((-2, -1), keepdim=True), -X.amin((-2, -1), keepdim=True))
    _, exponent = torch.frexp(largest)
    limit = math.frexp(torch.finfo(X.dtype).max)[1] - 2  # keeps s itself finite
    s = torch.ldexp(torch.ones_like(largest), -exponent.clamp(-limit, limit))
    return X * s, s
