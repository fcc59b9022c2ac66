"""docs/integrations/torchtitan.md with torchtitan's own configuration and containers."""

from __future__ import annotations

import torch
from tests.integrations.pages import blocks, needs, run, same, weights

from polarstep import muon_for

PAGE = "torchtitan.md"
pytestmark = needs("torchtitan")


def test_the_page_trains_and_resumes_bit_for_bit(steps: list[object]) -> None:
    script, resume = blocks(PAGE)
    namespace = run(script, {}, PAGE)
    assert len(steps) == 6
    rates = namespace["schedulers"].get_metrics()
    assert len(rates) == len(namespace["optimizers"].optimizers[0].param_groups)
    run(resume, namespace, PAGE)
    assert same(weights(namespace["model"]), weights(namespace["other"]))


def test_fused_weights_are_cut_group_by_group() -> None:
    """Its ``wqkv`` has the query heads of a group, their key and their value, then the next group."""
    from torchtitan.models.qwen3 import model_registry

    with torch.device("meta"):
        model = model_registry("debugmodel").model.build()
    optimizer = muon_for(model)
    row = optimizer.routes["layers.0.attention.qkv_linear.wqkv.weight"]
    fused = model.get_submodule("layers.0.attention.qkv_linear")
    width = fused.head_dim
    group = optimizer.param_groups[row.group]
    assert group["split_sizes"] == (fused.heads_per_kv * width, width, width)
    assert group["split_repeats"] == row.shape[0] // (fused.r_dim * width)
