"""docs/integrations/peft.md with the real library."""

from __future__ import annotations

from tests.integrations.pages import blocks, needs, run, same, weights

PAGE = "peft.md"
pytestmark = needs("peft")


def test_the_page_trains_adapters_and_resumes_bit_for_bit(steps: list[object]) -> None:
    script, resume = blocks(PAGE)
    namespace = run(script, {}, PAGE)
    whole = weights(namespace["model"])
    routes = namespace["optimizer"].routes
    trained = {row.name for row in routes if row.algorithm != "left out"}
    assert len(trained) == 2 * 2 * 3  # A and B of three projections in two layers
    assert all("lora_" in name for name in trained)
    run(resume, namespace, PAGE)
    assert len(steps) == 6 + 3
    assert same(whole, weights(namespace["resumed"]))
