"""Parameters in bfloat16 that keep small updates, and momentum in fewer bits.

**Compensated rounding.** bfloat16 has eight bits, so an update below 1/512 of a weight is lost if X is
rounded to the nearest number. With ``rounding="compensated"`` the state keeps the rounding error R::

    x = X + R,    x ← (1 − ηλ)x − η·scale·T,    X = bfloat16(x),    R = bfloat16(x − X).

X and R together have sixteen bits. R takes two bytes for each entry of X. It is in the checkpoint, so
that a run goes on as if it had not stopped.

**Momentum.** C in bfloat16 has half the bytes of float32. C in eight bits is a whole number from −127 to
127 for each entry, and one scale for each :data:`BLOCK` entries. The polar factor depends on the
directions of C more than on the size of single entries, so this changes it little. Blocks follow the
entries as they lie in memory. Every rank must hold whole blocks of a sharded parameter, so that the
scales can be sharded like it: its rows must have a multiple of :data:`BLOCK` entries and must not be
cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polarstep.distributed.layout import Layout, is_sharded, local, wrapped
from polarstep.optim.groups import Group
from polarstep.optim.stepping.collect import momentum_dtype

__all__ = [
    "BLOCK",
    "MOMENTUM_STATE",
    "add_compensated",
    "check_blocks",
    "is_compensated",
    "keep_momentum",
    "momentum_of",
    "put_compensated",
    "rounding_error",
    "scale_as_sharded",
    "stored_dtype",
]

BLOCK = 128
LARGEST = 127
# Entries of the state with a precision of their own, which loading a checkpoint must not change.
MOMENTUM_STATE = ("momentum_buffer", "momentum_scale", "peak")


def is_compensated(group: Group, p: Tensor) -> bool:
    """Whether ``p`` has compensated rounding; only parameters in 16 bits need it."""
    return group["rounding"] == "compensated" and p.dtype in (torch.bfloat16, torch.float16)


def rounding_error(p: Tensor, of_parameter: dict[str, Any]) -> Tensor:
    """R, zero for a parameter that has not been updated yet."""
    if "rounding_error" not in of_parameter:
        of_parameter["rounding_error"] = torch.zeros_like(p, memory_format=torch.preserve_format)
    R: Tensor = of_parameter["rounding_error"]
    return R


def add_compensated(X: Tensor, R: Tensor, T: Tensor, size: Any, remains: Any) -> None:
    """``X + R ← remains·(X + R) + size·T``, computed in float32."""
    x = (X.float() + R).mul_(remains)
    x = torch.add(x, T.float(), alpha=size) if not isinstance(size, Tensor) else x + size * T
    put_compensated(x, X, R)


def put_compensated(x: Tensor, X: Tensor, R: Tensor) -> None:
    """Keep ``x`` as the sum of ``X`` and ``R``; where it is their sum already, both stay.

    R may be half the distance from X to the next number Y. X + R lies midway then, and a step that
    changes nothing would round it to Y.
    """
    stays = x == X.float() + R
    X.copy_(torch.where(stays, X, x.to(X.dtype)))
    R.copy_(torch.where(stays, R, (x - X).to(R.dtype)))


def stored_dtype(group: Group, p: Tensor) -> torch.dtype:
    """The precision in which C is kept: the group's ``momentum_dtype``, by default M's precision."""
    asked: torch.dtype | None = group["momentum_dtype"]
    return momentum_dtype(p.dtype) if asked is None else asked


def check_blocks(p: Tensor, name: str) -> None:
    """Raise if ``p`` is sharded so that a rank would hold only part of a block of 8-bit momentum."""
    if not is_sharded(p):
        return
    layout, last = Layout.of(p), p.dim() - 1
    assert layout is not None
    if p.shape[-1] % BLOCK or last in layout.cut:
        raise ValueError(
            f"momentum_dtype=torch.int8 for {name}, which has shape {tuple(p.shape)} and is sharded as "
            f"{tuple(p.placements)}: expected rows of a multiple of {BLOCK} entries that are not cut, "
            f"as {BLOCK} entries share a scale; take momentum_dtype=torch.bfloat16, or shard another "
            "dimension"
        )


def momentum_of(p: Tensor, of_parameter: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """C, zero for a parameter that has not been updated yet, and kept in ``dtype`` from now on.

    Returns the stored tensor itself. In eight bits it returns this rank's part of C as a copy in
    float32, which the step changes and :func:`keep_momentum` stores.
    """
    known: Tensor | None = of_parameter.get("momentum_buffer")
    if known is not None and known.dtype == dtype != torch.int8:
        return known
    if known is None:
        like, first = (local(p), torch.float32) if dtype == torch.int8 else (p, dtype)
        C = torch.zeros_like(like, dtype=first, memory_format=torch.preserve_format)
    elif known.dtype == torch.int8:
        C = _from_bits(local(known), local(of_parameter["momentum_scale"]))
        if dtype != torch.int8 and is_sharded(p):
            C = wrapped(C, p, p.placements, p.shape)
    else:
        C = local(known).float() if dtype == torch.int8 else known.to(dtype)
    if dtype != torch.int8:
        of_parameter.pop("momentum_scale", None)
        C = of_parameter["momentum_buffer"] = C.to(dtype)
    return C


def keep_momentum(C: Tensor, p: Tensor, of_parameter: dict[str, Any], dtype: torch.dtype) -> None:
    """Store ``C``, which :func:`momentum_of` has copied for ``p``, if it is kept in eight bits."""
    if dtype != torch.int8:
        return
    codes, scale = _to_bits(C)
    known = of_parameter.get("momentum_buffer")
    if known is not None and known.dtype == torch.int8:
        local(known).copy_(codes)
        kept = local(of_parameter["momentum_scale"])
        kept.copy_(scale.view(kept.shape))
        return
    if is_sharded(p):
        scale = scale_as_sharded(scale, p)
        codes = wrapped(codes, p, p.placements, p.shape)
    of_parameter["momentum_buffer"], of_parameter["momentum_scale"] = codes, scale


def scale_as_sharded(scale: Tensor, p: Any) -> Tensor:
    """This rank's scales as its part of a sharded tensor, which has a row for each row of ``p``."""
    *rows, columns = local(p).shape
    scale = scale.view(*rows, columns // BLOCK)
    return wrapped(scale, p, p.placements, (*p.shape[:-1], p.shape[-1] // BLOCK))


def _to_bits(C: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from −127 to 127, shaped as C, and the scale of each block of them."""
    flat = torch.nn.functional.pad(C.float().flatten(), (0, -C.numel() % BLOCK)).view(-1, BLOCK)
    scale = flat.abs().amax(dim=1) / LARGEST
    codes = flat / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    # A block with a NaN has a NaN for its scale, and so is NaN when it is read.
    codes = codes.nan_to_num().round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return codes.flatten()[: C.numel()].view(C.shape), scale


def _from_bits(codes: Tensor, scale: Tensor) -> Tensor:
    """The inverse of :func:`_to_bits`, up to half a scale."""
    flat = torch.nn.functional.pad(codes.flatten(), (0, -codes.numel() % BLOCK)).view(-1, BLOCK)
    C = (flat * scale.flatten()[:, None]).flatten()[: codes.numel()].view(codes.shape)
    return C.contiguous()
