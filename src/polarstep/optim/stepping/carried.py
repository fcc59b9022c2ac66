"""The carry of a polar map in the optimizer's state.

A :class:`~polarstep.maps.Carry` is kept per parameter and block, under the names that the map
gives its tensors. A checkpoint then holds them as plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polarstep.maps import Carry, PolarMap

__all__ = ["carried_dtype", "entry", "name_of", "recalled", "remember", "written_over"]


def entry(name: str, block: int) -> str:
    """The key in a parameter's state for the tensor ``name`` of its ``block``-th block.

    >>> entry("basis", 0), entry("basis", 2)
    ('basis', 'basis.2')
    """
    return name if block == 0 else f"{name}.{block}"


def name_of(key: str) -> str:
    """The name of the tensor that a parameter's state has under ``key``.

    >>> name_of("basis"), name_of("basis.2")
    ('basis', 'basis')
    """
    return key.partition(".")[0]


def carried_dtype(polar: PolarMap, name: str, dtype: torch.dtype) -> torch.dtype:
    """The precision in which the tensor ``name`` of a parameter in ``dtype`` is kept."""
    return torch.promote_types(dtype, torch.float32) if name in polar.wide_carries else dtype


def recalled(
    of_parameter: dict[str, Any], block: int, polar: PolarMap, count: int, m: int, n: int
) -> Carry | None:
    """The last step's carry for ``count`` matrices; ``None`` if ``polar`` cannot use it.

    Tensors of ``polar.wide_carries`` that other code has put there in 16 bits are cast to float32, as
    kernels read them in.
    """
    if not polar.carries:
        return None
    found = {name: of_parameter.get(entry(name, block)) for name in polar.carries}
    carry = Carry({name: tensor for name, tensor in found.items() if tensor is not None})
    for name in polar.wide_carries:
        if name in carry:
            carry[name] = carry[name].to(carried_dtype(polar, name, carry[name].dtype))
    usable = carry and all(len(tensor) == count for tensor in carry.values())
    return carry if usable and polar.resumes(carry, m, n) else None


def remember(
    of_parameter: dict[str, Any],
    block: int,
    polar: PolarMap,
    carry: Carry,
    dtype: torch.dtype,
    finite: Tensor | None,
) -> None:
    """Keep ``carry`` for the next step, unless ``finite`` is false and the parameter is skipped.

    The carry is kept in the parameter's precision, to which torch casts a loaded checkpoint, except for
    ``polar.wide_carries``. Each tensor stays at one address, where a CUDA graph of the user's own finds
    it at the next replay.
    """
    for name in polar.carries:
        key = entry(name, block)
        if name not in carry:
            of_parameter.pop(key, None)
            continue
        value = carry[name].to(carried_dtype(polar, name, dtype))
        kept = written_over(of_parameter.get(key), value, finite)
        if kept is not None:
            of_parameter[key] = kept


def written_over(known: Tensor | None, value: Tensor, finite: Tensor | None) -> Tensor | None:
    """Write ``value`` into ``known`` where ``finite`` allows it; return a new tensor if it does not fit.

    Returns ``None`` if ``known`` was written. It does not fit if it has another shape, or another
    precision, as after ``model.to(torch.bfloat16)``.
    """
    if known is not None and known.shape == value.shape:
        if finite is not None:
            value = torch.where(finite, value, known.to(value.dtype))
        if known.dtype == value.dtype:
            known.copy_(value)
            return None
    return value.clone(memory_format=torch.contiguous_format)
