"""docs/integrations/torchtitan.md with torchtitan's own configuration and containers."""

from __future__ import annotations

from tests.integrations.pages import blocks, needs, run, same, weights

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
