"""What a step may return, checked for maps and transforms of a user's own.

An error here names a slip in user code. A shape that broadcasts, or a state under a name that is not in
``carries``, would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from polarstep.maps.base import Factors, MapState, Polar, PolarMap
from polarstep.ops.lazy import RowProduct, ScaledRows

__all__ = ["check_first", "pair_of"]

# Maps whose step was found to return what it should, with the shape, and whether there was a carry.
_CHECKED: set[tuple[PolarMap, torch.Size, bool]] = set()


def check_first(polar: PolarMap, found: object, M: Tensor, carry: MapState) -> None:
    """Raise if the first step of ``polar`` on a shape returned something else than T and a state."""
    if torch.compiler.is_compiling() or (polar, M.shape, bool(carry)) in _CHECKED:
        return
    checked_polar(found, M, polar.traits.carries, f"{type(polar).__name__}.step")
    if len(_CHECKED) >= 1024:
        _CHECKED.clear()
    _CHECKED.add((polar, M.shape, bool(carry)))


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
    """``found``, if it is T of ``M`` and a carry under ``carries``: what a transform's step returns."""
    if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], dict):
        told = f"a {type(found).__name__}"
        if isinstance(found, tuple):
            told = f"({', '.join(type(each).__name__ for each in found)})"
        raise TypeError(
            f"{method} returned {told}: expected a pair, T and a MapState; MapState() is empty"
        )
    T, left = found
    if not isinstance(T, ScaledRows):
        check_matrices(T, M, method)
    _check_carry(left.items(), len(M), carries, method)
    return found


def checked_polar(found: Found, M: Tensor, carries: Sequence[str], method: str) -> Found:
    """``found``, if it is a :class:`Polar` of ``M`` and a carry: what a polar map's step returns."""
    match found:
        case tuple((Polar() as polar, dict() as left)):
            _check_polar(polar, M, method)
            _check_carry(left.items(), len(M), carries, method)
            return found
        case tuple((T, dict())):
            check_matrices(T, M, method)
            raise TypeError(
                f"{method} returned T as a {type(T).__name__}: expected polarstep.maps.Polar(M, T)"
            )
    return pair_of(found, M, carries, method)  # raises


def _check_polar(polar: Polar, M: Tensor, method: str) -> None:
    """Raise if ``polar`` is not of ``M``, or has no T."""
    if not isinstance(polar.M, Tensor) or polar.M.shape != M.shape:
        raise ValueError(
            f"{method} returned a Polar whose M is {_shape(polar.M)} for matrices of shape "
            f"{tuple(M.shape)}: expected Polar(M, T) with the M that it got"
        )
    if polar.squared_norm is not None and not callable(polar.squared_norm):
        raise TypeError(
            f"{method} returned a Polar whose squared_norm is {_shape(polar.squared_norm)}: expected a "
            "function without arguments that returns ‖T‖²_F, of shape (batch,), or None"
        )
    if polar.factors is not None:
        _check_factors(polar, M, method)
    elif polar.T is None:
        raise ValueError(
            f"{method} returned a Polar without T and without factors: expected Polar(M, T), with T of "
            f"the shape of M, {tuple(M.shape)}"
        )
    elif not isinstance(polar.T, RowProduct | ScaledRows):  # these know their shape
        check_matrices(polar.T, M, method)


def _check_factors(polar: Polar, M: Tensor, method: str) -> None:
    """Raise if the factors of ``polar`` are not of ``M``, or of its transpose where it is tall."""
    if not isinstance(polar.factors, Factors):
        raise TypeError(
            f"{method} returned factors as a {type(polar.factors).__name__}: expected "
            "polarstep.maps.base.Factors; Polar(M, T) needs no factors"
        )
    L, R = polar.factors.two
    (batch, m, n), of = M.shape, (L.shape[0], L.shape[-2], R.shape[-1])
    if of != (batch, min(m, n), max(m, n)) or L.shape[-1] != R.shape[-2]:
        raise ValueError(
            f"{method} returned factors {tuple(L.shape)} and {tuple(R.shape)} for matrices of shape "
            f"{tuple(M.shape)}: expected ({batch}, {min(m, n)}, ℓ) and ({batch}, ℓ, {max(m, n)}); "
            "factors of tall matrices are of their transposes"
        )


def _shape(found: object) -> str:
    """The shape of a tensor, or what is in its place."""
    if isinstance(found, Tensor):
        return f"of shape {tuple(found.shape)}"
    return "None" if found is None else f"a {type(found).__name__}"


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
