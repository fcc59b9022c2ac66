"""docs/integrations/timm.md with the real library."""

from __future__ import annotations

import pytest
from tests.integrations.pages import blocks, needs, run, same, weights
from tests.integrations.torchvision_stand_in import stand_in_for_torchvision

PAGE = "timm.md"
pytestmark = needs("timm")


def test_the_page_trains_and_resumes_bit_for_bit(
    steps: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_torchvision(monkeypatch)
    script, resume = blocks(PAGE)
    namespace = run(script, {}, PAGE)
    assert len(steps) == 4
    qkv = namespace["optimizer"].routes["blocks.0.attn.qkv.weight"]
    assert qkv.algorithm == "Muon"
    assert qkv.matrix == "3·(192×192)"
    run(resume, namespace, PAGE)
    assert len(steps) == 4 + 2
    assert same(weights(namespace["model"]), weights(namespace["resumed"]))
