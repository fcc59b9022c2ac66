"""Checks of what a map or a transform of a user's own returns, so that a slip is named.

A shape that broadcasts, or a carry under a name that is not in ``carries``, would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from polarstep.polar.result import Factors, Lift, Polar
from polarstep.products.row_product import RowProduct
from polarstep.products.scaled_rows import ScaledRows

__all__ = ["check_matrices", "checked_polar", "pair_of"]

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
            f"{method} returned {told}: expected a pair, T and a Carry; Carry() is empty"
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
                f"{method} returned T as a {type(T).__name__}: expected polarstep.polar.Polar(M, T)"
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
        _check_factors(polar.factors, M, method)
    elif polar.T is None:
        raise ValueError(
            f"{method} returned a Polar without T and without factors: expected Polar(M, T), with T of "
            f"the shape of M, {tuple(M.shape)}"
        )
    elif not isinstance(polar.T, RowProduct | ScaledRows):  # these know their shape
        check_matrices(polar.T, M, method)


def _check_factors(factors: object, M: Tensor, method: str) -> None:
    """Raise if ``factors`` do not fit ``M``, or its transpose where it is tall."""
    if not isinstance(factors, Factors) or not isinstance(factors.lift, Lift):
        what = f"{type(factors).__name__}"
        if isinstance(factors, Factors):
            what = f"Factors whose lift is a {type(factors.lift).__name__}"
        raise TypeError(
            f"{method} returned factors as a {what}: expected polarstep.polar.result.Factors, with a "
            "Lift; Polar(M, T) needs no factors"
        )
    batch, short, long = len(M), min(M.shape[-2:]), max(M.shape[-2:])
    X, W, width = factors.lift.X, factors.lift.W, factors.width
    for name, tensor, rows, columns in (
        ("columns", factors.columns, short, None),
        ("projected", factors.projected, None, long),
        ("lift.X", X, None, long),
    ):
        form = f"({batch}, {rows or f'≥ {width}'}, {columns or f'≥ {width}'})"
        if (
            not isinstance(tensor, Tensor)
            or tensor.ndim != 3
            or len(tensor) != batch
            or (tensor.shape[1] < width if rows is None else tensor.shape[1] != rows)
            or (tensor.shape[2] < width if columns is None else tensor.shape[2] != columns)
        ):
            raise ValueError(
                f"{method} returned factors whose {name} is {_shape(tensor)} for matrices of shape "
                f"{tuple(M.shape)} and a width of {width}: expected {form}"
                + "; factors of tall matrices are of their transposes"
                * (M.shape[-2] > M.shape[-1])
            )
    inner = (batch, factors.columns.shape[2], X.shape[1])
    if (
        W is not None
        and factors.lift.left is None
        and (not isinstance(W, Tensor) or tuple(W.shape) != inner)
    ):
        raise ValueError(
            f"{method} returned factors whose lift.W is {_shape(W)}: expected {inner} between columns "
            f"{tuple(factors.columns.shape)} and lift.X {tuple(X.shape)}"
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
