"""QK-clip: shrink the projections to q and k of a head whose attention logits have become too large."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polarstep.checked_values import is_integer, is_number
from polarstep.ranks.layout import Layout, is_sharded, local

__all__ = ["qk_clip"]


@torch.no_grad()
def qk_clip(
    q: nn.Linear | Tensor,
    k: nn.Linear | Tensor,
    max_logits: Tensor,
    tau: float = 100.0,
    *,
    rotary: int = 0,
    process_group: Any = None,
) -> Tensor:
    """Scale the weights of q and k so that the largest logit S of each head becomes τ at most.

    Call it after a step with the largest logits of the forward pass before it, as Kimi K2 does. A head
    with S ≤ τ stays as it is. With γ = τ/S, the rows of q and of k of a head are multiplied by √γ. Where
    several heads of q share a head of k, q is multiplied by γ, and k stays.

    Nothing waits for the device. A logit that is not finite changes nothing.

    Args:
        q: the projection to q: a layer, whose bias is scaled too, or its weight, with the heads one
            after the other in its rows. A slice of a fused weight is right, if it is no ``DTensor``.
        k: the projection to k, likewise. In multi-head latent attention it is ``kv_b_proj``, where each
            head has its rows of k and then those of v.
        max_logits: S for each head of q: the largest of qᵀk/√d over batch, queries and keys. Fused
            attention does not return it: compute it from q and k of some queries.
        tau: τ, the largest logit allowed.
        rotary: the rows at the end of each head of q that meet a rotary key which all heads share, as
            in multi-head latent attention. They are multiplied by γ, since that key stays.
        process_group: the ranks that hold copies of plain weights, as with DDP, whose largest logits
            count. The ranks of a ``DTensor`` are those of its mesh.

    Returns:
        γ of each head, 1 where nothing was changed.

    >>> q, k = (nn.Linear(8, 8, bias=False) for _ in range(2))
    >>> qk_clip(q, k, torch.tensor([400.0, 50.0]))
    tensor([0.2500, 1.0000])
    """
    Q, K = _weight("q", q), _weight("k", k)
    heads, keys = _sizes(Q, K, max_logits, rotary)
    if not is_number(tau) or tau <= 0:
        raise ValueError(f"tau={tau!r}: expected a number above zero, as 100, Kimi K2's")
    S = max_logits.detach().to(device=local(Q).device, dtype=torch.float32, copy=True)
    for group in _groups(Q, process_group):
        dist.all_reduce(S, dist.ReduceOp.MAX, group=group)
    gamma = torch.where(S.isfinite() & (tau < S), tau / S, 1.0)
    own = Q.shape[0] // heads - rotary
    are_shared = keys < heads
    of_q = gamma if are_shared else gamma.sqrt()
    rows = torch.cat([of_q[:, None].expand(-1, own), gamma[:, None].expand(-1, rotary)], dim=1)
    _scale(q, rows.flatten())
    if not are_shared:
        rest = K.shape[0] // heads - own
        ones = gamma.new_ones(heads, rest)
        _scale(k, torch.cat([gamma.sqrt()[:, None].expand(-1, own), ones], dim=1).flatten())
    return gamma


def _weight(name: str, given: object) -> Tensor:
    """The weight of a projection."""
    weight = given.weight if isinstance(given, nn.Linear) else given
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        raise TypeError(
            f"{name} is a {type(given).__name__}: expected a torch.nn.Linear, or a weight of two "
            "dimensions with outputs as rows; of GPT-2's Conv1D give weight.T"
        )
    return weight


def _sizes(Q: Tensor, K: Tensor, max_logits: Tensor, rotary: int) -> tuple[int, int]:
    """The number of heads of q and of k."""
    if not isinstance(max_logits, Tensor) or max_logits.ndim != 1 or not max_logits.numel():
        raise ValueError(
            f"max_logits={max_logits!r}: expected a tensor with the largest logit of each head, as "
            "logits.amax(dim=(0, 2, 3)) of shape (heads,)"
        )
    heads = len(max_logits)
    width, rest = divmod(Q.shape[0], heads)
    if rest:
        raise ValueError(
            f"max_logits has {heads} entries, and q has {Q.shape[0]} rows: expected an entry for each "
            "head, whose number divides the rows; of a fused weight give the rows of q alone"
        )
    if not is_integer(rotary) or not 0 <= rotary < width:
        raise ValueError(
            f"rotary={rotary!r} with heads of {width} rows: expected the number of rows of each head "
            "that meet a shared rotary key, as qk_rope_head_dim, and 0 where each head has its own"
        )
    keys = heads if rotary else K.shape[0] // width
    fits = K.shape[0] % heads == 0 and K.shape[0] // heads >= width - rotary
    if rotary and not fits:
        raise ValueError(
            f"k has {K.shape[0]} rows: expected for each of {heads} heads {width - rotary} rows of k "
            "without position, and then those of v, as kv_b_proj has them"
        )
    if not rotary and (K.shape[0] % width or not keys or heads % keys):
        raise ValueError(
            f"k has {K.shape[0]} rows: expected heads as wide as those of q, {width} rows each, and a "
            f"number of heads that divides {heads}; of a fused weight give the rows of k alone"
        )
    return heads, keys


def _groups(Q: Tensor, process_group: Any) -> list[Any]:
    """The groups of ranks whose largest logits count."""
    if is_sharded(Q):
        return [Q.device_mesh.get_group(dim) for dim in range(Q.device_mesh.ndim)]
    return [] if process_group is None else [process_group]


def _scale(projection: nn.Linear | Tensor, rows: Tensor) -> None:
    """Multiply each row of a projection, and each entry of its bias, by an entry of ``rows``."""
    weight, bias = projection, None
    if isinstance(projection, nn.Linear):
        weight, bias = projection.weight, projection.bias
    for p in (weight, bias):
        if isinstance(p, Tensor):
            layout = Layout.of(p)
            start, stop = (0, len(rows)) if layout is None else layout.boxes[layout.me][0]
            mine = rows[start:stop].to(p.dtype)
            local(p).mul_(mine[:, None] if p.ndim == 2 else mine)
