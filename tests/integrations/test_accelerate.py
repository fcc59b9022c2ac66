"""docs/integrations/accelerate.md with the real library."""

from __future__ import annotations

from tests.integrations.pages import blocks, needs, run, same, weights

PAGE = "accelerate.md"
pytestmark = needs("accelerate")


def test_the_page_trains_and_resumes_bit_for_bit(steps: list[object]) -> None:
    script, resume = blocks(PAGE)
    namespace = run(script, {}, PAGE)
    whole = weights(namespace["model"])
    assert len(steps) == 6
    assert {row.algorithm for row in namespace["optimizer"].optimizer.routes} == {"Muon", "AdamW"}
    run(resume, namespace, PAGE)
    assert len(steps) == 6 + 3
    assert same(whole, weights(namespace["model"]))
