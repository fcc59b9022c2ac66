"""docs/integrations/timm.md with the real library."""

from __future__ import annotations

import pytest
import torch
from tests.integrations.no_torchvision import put_in
from tests.integrations.pages import blocks, needs, run, same, weights

from polarstep import Muon, muon_for

PAGE = "timm.md"
pytestmark = needs("timm")


@pytest.fixture(scope="module", autouse=True)
def without_torchvision() -> None:
    put_in()


def test_the_page_trains_and_resumes_bit_for_bit(steps: list[object]) -> None:
    script, by_name, resume = blocks(PAGE)
    namespace = run(script, {}, PAGE)
    assert len(steps) == 4
    qkv = namespace["optimizer"].routes["blocks.0.attn.qkv.weight"]
    assert qkv.algorithm == "Muon"
    assert qkv.matrix == "3·(192×192)"
    made = run(by_name, namespace, PAGE)["by_name"]
    assert type(made) is Muon
    assert {group["weight_decay"] for group in made.param_groups} == {0.05, 0.0}
    assert made.routes["fc.weight"].role == "head"
    run(resume, namespace, PAGE)
    assert len(steps) == 4 + 2
    assert same(weights(namespace["model"]), weights(namespace["resumed"]))


@pytest.mark.parametrize(
    ("name", "weight", "parts"),
    [
        ("tiny_vit_5m_224", "stages.1.blocks.0.attn.qkv.weight", (32, 32, 32)),
        ("coatnet_pico_rw_224", "stages.2.blocks.0.attn.qkv.weight", (32, 32, 32)),
        ("levit_128s", "stages.0.blocks.0.attn.qkv.linear.weight", (16, 16, 32)),
    ],
)
def test_parts_that_come_head_by_head(name: str, weight: str, parts: tuple[int, ...]) -> None:
    """The rows that a cut gives to q are those that the layer takes for q."""
    import timm

    with torch.device("meta"):
        model = timm.create_model(name)
    optimizer = muon_for(model)
    group = optimizer.param_groups[optimizer.routes[weight].group or 0]
    heads = model.get_parameter(weight).shape[0] // sum(parts)
    assert (group["split_sizes"], group["split_repeats"]) == (parts, heads)
