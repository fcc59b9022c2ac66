"""Checks of what a map or a transform of a user's own returns, so that a slip is named.

A shape that broadcasts, or a carry under a name that is not in ``carries``, would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from polarstep.polar.result import Polar
from polarstep.products.scaled_rows import ScaledRows

__all__ = ["check_matrices", "pair_of"]

Found = TypeVar("Found")


def check_matrices(T: object, M: Tensor, method: str) -> None:
    """Raise if ``T``, which ``method`` returned, is not one matrix for each matrix of ``M``."""
    if not isinstance(T, Tensor):
        raise TypeError(
            f"{method} returned a {type(T).__name__}: expected T, a tensor (batch, m, n)"
        )
    if T.shape != M.shape:
        raise ValueError(
            f"{method} returned a T of shape {tuple(T.shape)} for matrices of shape "
            f"{tuple(M.shape)}: expected the same shape"
        )


def pair_of(found: Found, M: Tensor, carries: Sequence[str], method: str) -> Found:
    """``found``, if it is T of ``M`` and a carry under the names in ``carries``."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
        told = f"a {type(found).__name__}"
        if isinstance(found, tuple):
            told = f"({', '.join(type(each).__name__ for each in found)})"
        raise TypeError(
            f"{method} returned {told}: expected a pair, T and a Carry; Carry() is empty"
        )
    T, left = found
    if isinstance(T, Polar):
        T = M if T.T is None or not isinstance(T.T, Tensor) else T.T  # others know their shape
    if not isinstance(T, ScaledRows):
        check_matrices(T, M, method)
    _check_carry(left.items(), len(M), carries, method)
    return found


def _check_carry(
    left: Iterable[tuple[str, Any]], batch: int, carries: Sequence[str], method: str
) -> None:
    for name, tensor in left:
        if isinstance(carries, str) or name not in carries:
            raise ValueError(
                f"{method} left {name!r} in its carry, and carries={carries!r}: expected a tuple with "
                f"this name, as carries = ({name!r},), since the next step would not find it"
            )
        if not isinstance(tensor, Tensor) or tensor.shape[:1] != (batch,):
            what = f"shape {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor)
            raise ValueError(
                f"{method} left {name!r} of {what} in its carry: expected a tensor whose first "
                f"dimension is the batch, {batch} here"
            )
