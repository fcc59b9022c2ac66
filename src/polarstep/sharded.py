"""Sharded parameters (``DTensor``, as FSDP2 leaves them): whole matrices from shards, and back.

A polar factor is a function of the whole matrix. So every rank gathers M, computes all of T and
keeps its own part. T is the same on every rank, as sketches are keyed by seed, shape and step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_sharded", "local", "placed_like", "whole", "whole_of_local"]


# Types that are never sharded; hasattr would take a microsecond to say so.
_PLAIN = (Tensor, nn.Parameter)


def is_sharded(X: object) -> TypeGuard[DTensor]:
    """Whether ``X`` is a ``DTensor``, without importing DTensor, which takes a second."""
    return type(X) not in _PLAIN and hasattr(X, "full_tensor")


def whole(X: Tensor) -> Tensor:
    """``X`` itself if it is not sharded, else the whole tensor, gathered from all ranks."""
    return X.full_tensor() if is_sharded(X) else X


def local(X: Tensor) -> Tensor:
    """This rank's part of ``X``, not copied, for elementwise operations in place."""
    return X.to_local() if is_sharded(X) else X


def placed_like(X: Tensor, p: Tensor) -> Tensor:
    """``X`` placed as ``p`` is; each rank keeps its part of a whole ``X``, and nothing is sent."""
    if not is_sharded(p):
        return X
    from torch.distributed.tensor import DTensor, Replicate

    if not is_sharded(X):
        everywhere = [Replicate()] * p.device_mesh.ndim
        X = DTensor.from_local(X, p.device_mesh, everywhere, run_check=False)
    return X if X.placements == p.placements else X.redistribute(placements=p.placements)


def whole_of_local(X: Tensor, p: Tensor) -> Tensor:
    """The whole tensor of which ``X`` is this rank's part, where shards are laid out as in ``p``.

    Elementwise work is done on local parts, because operations between two sharded tensors may lose
    the layout of their rows (``_StridedShard`` in torch 2.9).
    """
    if not is_sharded(p):
        return X
    from torch.distributed.tensor import DTensor

    sharded = DTensor.from_local(
        X, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return sharded.full_tensor()
