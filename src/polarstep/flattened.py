"""Refuse parameters that FSDP1 has cut into flat slices, in which no matrix is whole.

``FullyShardedDataParallel`` lays the parameters of a module end to end and gives each rank a run of
entries. A weight is then a vector, or empty, and would go to AdamW as vectors do. Matrices are whole
only with ``ShardingStrategy.NO_SHARD`` and ``use_orig_params=True``, as also in a world of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

__all__ = ["check_unflattened", "check_whole"]

# FSDP1 sets this on every parameter that it has laid end to end with others.
MARK = "_fsdp_flattened"
REMEDY = (
    "expected FSDP2, torch.distributed.fsdp.fully_shard(model), whose parameters keep their shapes, "
    "before or after muon_for; or, where nothing need be cut, FullyShardedDataParallel with "
    "sharding_strategy=ShardingStrategy.NO_SHARD and use_orig_params=True"
)


def check_unflattened(model: nn.Module) -> None:
    """Raise if FSDP1 has cut some part of ``model`` into flat slices."""
    if not any(getattr(p, MARK, False) for p in model.parameters()):
        return
    # Imported here, as most programs do without it.
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    for path, module in model.named_modules():
        if not isinstance(module, FullyShardedDataParallel):
            continue
        marked = [name for name, p in module.named_parameters() if getattr(p, MARK, False)]
        cut = module.sharding_strategy != ShardingStrategy.NO_SHARD
        if marked and (cut or any(name.endswith("_flat_param") for name in marked)):
            where = f"has at {path!r}" if path else "is"
            raise ValueError(
                f"model {where} a FullyShardedDataParallel (FSDP1), which keeps parameters in flat "
                f"vectors, where Muon needs whole matrices: {REMEDY}"
            )


def check_whole(params: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for the first of some named parameters of Muon that FSDP1 has made a vector."""
    for name, p in params:
        if p.ndim < 2 and getattr(p, MARK, False):
            raise ValueError(
                f"{name} has shape {tuple(p.shape)}, as FullyShardedDataParallel (FSDP1) keeps "
                f"parameters in flat vectors, where Muon needs whole matrices: {REMEDY}"
            )
