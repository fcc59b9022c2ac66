"""Parameters so large that the memory of a step matters: T is computed in the memory of M.

A step in full space usually holds M, two of its iterates and two matrices of the small side at a time,
up to eight times the parameter. In place it holds M, half of its Gram matrix and a few rows or columns
(:mod:`polarstep.products.in_place`), and multiplies in float32 on every CPU. :func:`peak` has the
formula: 1.26 times the memory of the parameter for 8192×16384, 1.506 times for 16384×16384.
"""

from __future__ import annotations

from polarstep import products
from polarstep.optim.stepping.collect import Member, Signature
from polarstep.optim.stepping.step import Matrices, PolarHook
from polarstep.polar import Polar
from polarstep.products.in_place import LARGE, STRIP

__all__ = ["is_large", "launch_in_place", "peak"]


def is_large(signature: Signature, sharded: bool) -> bool:
    """Whether matrices of this shape are large, and the map can compute T in the memory of M."""
    its = signature
    nbytes = its.m * its.n * its.dtype.itemsize
    return nbytes >= LARGE and not sharded and its.device.type == "cpu" and its.polar.overwrites


def launch_in_place(
    signature: Signature, matrices: Matrices, members: list[Member], hooks: tuple[PolarHook, ...]
) -> Polar:
    """One step of a bucket, like :func:`polarstep.optim.stepping.step.launch`, for a map without state.

    T takes the place of M, or of a copy of M: where M is the momentum buffer itself, where hooks look at
    M, and where M has 16 bits, which are copied to float32.
    """
    M = matrices.momentum()
    T = products.of(M.device).workable(M)
    is_buffer = not all(member.group["nesterov"] for member in members)
    if T is M and (is_buffer or hooks):
        T = M.clone()
    for X in T:
        signature.polar.overwrite(X if X.shape[0] <= X.shape[1] else X.mT)
    polar = Polar(M, T)
    matrices.update(polar)
    return polar


def peak(m: int, n: int) -> float:
    """1 + (m + 64)/2n + 64/m for m ≤ n: a step's memory in place, relative to the parameter's.

    It counts M, half of its Gram matrix with whole blocks on the diagonal, and a copy of some rows of
    M, but not X, G and C.

    >>> round(peak(8192, 16384), 2), round(peak(16384, 16384), 3)
    (1.26, 1.506)
    """
    m, n = sorted((m, n))
    return 1 + (m + STRIP) / (2 * n) + STRIP / m
