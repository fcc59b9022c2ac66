"""Sharded parameters (``DTensor``, as FSDP2 leaves them): whole matrices from shards, and back.

A polar factor is a function of the whole matrix. So every rank gathers M and computes all of T,
the same everywhere, as sketches are keyed by seed, shape and step; of T it keeps its own part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_sharded", "local", "placed_like", "whole", "whole_of_local"]


# Of these there is no need to ask, which takes a microsecond where the answer is no.
_PLAIN = (Tensor, nn.Parameter)


def is_sharded(X: object) -> TypeGuard[DTensor]:
    """Whether ``X`` is a ``DTensor``, asked without the second that importing it takes."""
    return type(X) not in _PLAIN and hasattr(X, "full_tensor")


def whole(X: Tensor) -> Tensor:
    """``X`` itself or, gathered by all ranks together, the tensor whose part each of them has."""
    return X.full_tensor() if is_sharded(X) else X


def local(X: Tensor) -> Tensor:
    """This rank's part of ``X`` where it lies: for what is done entry by entry, and in place."""
    return X.to_local() if is_sharded(X) else X


def placed_like(X: Tensor, p: Tensor) -> Tensor:
    """``X`` with the placements of ``p``; of a whole ``X`` each rank keeps its part, nothing is sent."""
    if not is_sharded(p):
        return X
    from torch.distributed.tensor import DTensor, Replicate

    if not is_sharded(X):
        everywhere = [Replicate()] * p.device_mesh.ndim
        X = DTensor.from_local(X, p.device_mesh, everywhere, run_check=False)
    return X if X.placements == p.placements else X.redistribute(placements=p.placements)


def whole_of_local(X: Tensor, p: Tensor) -> Tensor:
    """The tensor of which ``X`` is this rank's part, laid out as ``p`` is.

    What is done entry by entry is done on local parts, since operations between two sharded tensors may
    lose how their rows are laid out (``_StridedShard`` in torch 2.9).
    """
    if not is_sharded(p):
        return X
    from torch.distributed.tensor import DTensor

    sharded = DTensor.from_local(
        X, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return sharded.full_tensor()
