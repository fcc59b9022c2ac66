"""The state of a matrix: C in any precision, rounding errors, and what a polar map carries.

:data:`ENTRIES` lists what the state of a parameter has beside what its momentum rule keeps
(:func:`kept_by_rule`), and beside the carries: what the map and the transform leave for the next step,
with a row for each matrix of a block (:func:`entry`). Checkpoints, ranks and the check of resized
parameters read that list.

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

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from polarstep.groups import Group
from polarstep.maps import MapState, PolarMap
from polarstep.momentum import Momentum
from polarstep.ranks.layout import Layout, is_sharded, local, wrapped

__all__ = [
    "BLOCK",
    "ENTRIES",
    "KEPT_AS_MOMENTUM",
    "OF_RULE",
    "Entry",
    "State",
    "add_compensated",
    "carried_dtype",
    "check_blocks",
    "entry",
    "is_compensated",
    "is_shaped_as_parameter",
    "keep_momentum",
    "kept_by_rule",
    "momentum_dtype",
    "momentum_of",
    "name_of",
    "put_compensated",
    "recalled",
    "remember",
    "rounding_error",
    "scale_as_sharded",
    "stored_dtype",
    "written_over",
]

# The type of torch's Optimizer.state: a dict for each parameter.
State = dict[Tensor, dict[str, Any]]

BLOCK = 128
LARGEST = 127


class Entry(NamedTuple):
    """A tensor in a parameter's state."""

    what: str
    # Its shape, and how ranks cut it: as the parameter, or with a number for each block of BLOCK entries
    # of the parameter, or for each matrix.
    shape: Literal["parameter", "blocks", "matrices"]
    # Its precision: that of the parameter, to which torch casts a checkpoint that it loads, or that of
    # the momentum, which stays as it is.
    precision: Literal["parameter", "momentum"]


ENTRIES = {
    "momentum_buffer": Entry("C, in the group's momentum_dtype", "parameter", "momentum"),
    "momentum_scale": Entry("the scales of C in eight bits", "blocks", "momentum"),
    "rounding_error": Entry("R of compensated rounding", "parameter", "parameter"),
    "peak": Entry("the peak of C (polarstep.stale_momentum)", "matrices", "momentum"),
}
KEPT_AS_MOMENTUM = tuple(key for key, its in ENTRIES.items() if its.precision == "momentum")
# What a momentum rule keeps beside C is under "momentum." and its name, shaped as the parameter.
OF_RULE = "momentum"


def is_shaped_as_parameter(key: str) -> bool:
    """Whether the state of a matrix has a tensor of its shape under ``key``."""
    return name_of(key) == OF_RULE or (key in ENTRIES and ENTRIES[key].shape == "parameter")


def kept_by_rule(p: Tensor, of_parameter: dict[str, Any], rule: Momentum) -> dict[str, Tensor]:
    """The tensors that ``rule`` keeps beside C, by name; zero for a parameter not updated yet."""
    kept, dtype = {}, torch.promote_types(p.dtype, torch.float32)
    for name in rule.entries:
        key = f"{OF_RULE}.{name}"
        if key not in of_parameter:
            zeros = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            of_parameter[key] = zeros
        kept[name] = of_parameter[key]
    return kept


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


def momentum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of C and M, and of an element-wise rule's buffers, for a parameter in ``dtype``.

    It is the parameter's own, or float32 for float16. C may be 1/(1 − β) times as large as the
    gradients: at β = 0.95 gradients of 5,000 would pass 65504, the largest number of float16. AdamW's v
    adds (1 − β₂)G², which is zero in float16 for gradients below 7e-4 at β₂ = 0.95. bfloat16 has the
    range of float32.
    """
    return torch.float32 if dtype == torch.float16 else dtype


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
    return torch.promote_types(dtype, torch.float32) if name in polar.traits.wide_carries else dtype


def recalled(
    of_parameter: dict[str, Any], block: int, polar: PolarMap, count: int, m: int, n: int
) -> MapState | None:
    """The last step's carry for ``count`` matrices; ``None`` if ``polar`` cannot use it.

    Tensors of ``wide_carries`` that other code has put there in 16 bits are cast to float32, as kernels
    read them in.
    """
    if not polar.traits.carries:
        return None
    found = {name: of_parameter.get(entry(name, block)) for name in polar.traits.carries}
    carry = MapState({name: tensor for name, tensor in found.items() if tensor is not None})
    for name in polar.traits.wide_carries:
        if name in carry:
            carry[name] = carry[name].to(carried_dtype(polar, name, carry[name].dtype))
    usable = carry and all(len(tensor) == count for tensor in carry.values())
    return carry if usable and polar.resumes(carry, m, n) else None


def remember(
    of_parameter: dict[str, Any],
    block: int,
    polar: PolarMap,
    carry: MapState,
    dtype: torch.dtype,
    finite: Tensor | None,
) -> None:
    """Keep ``carry`` for the next step, unless ``finite`` is false and the parameter is skipped.

    The carry is kept in the parameter's precision, to which torch casts a loaded checkpoint, except for
    ``wide_carries``. Each tensor stays at one address, where a CUDA graph of the user's own finds
    it at the next replay.
    """
    for name in polar.traits.carries:
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
