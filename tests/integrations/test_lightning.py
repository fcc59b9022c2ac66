"""docs/integrations/lightning.md with the real library."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.pages import blocks, needs, run, same, weights

PAGE = "lightning.md"
pytestmark = needs("lightning")


def test_the_page_trains_and_resumes_bit_for_bit(steps: list[object]) -> None:
    script, resume = blocks(PAGE)
    namespace = run(script, {}, PAGE)
    whole = weights(namespace["trainer"].model)
    assert len(steps) == 6
    run(resume, namespace, PAGE)
    assert len(steps) == 6 + 3
    assert same(whole, weights(namespace["resumed"].model))


def test_the_rate_of_every_group_is_logged() -> None:
    script, _ = blocks(PAGE)
    trainer = run(script, {}, PAGE)["trainer"]
    (log,) = Path("runs/lightning").rglob("metrics.csv")
    header = log.read_text().splitlines()[0].split(",")
    rates = [name for name in header if name.startswith("lr-Muon")]
    assert len(rates) == len(trainer.optimizers[0].param_groups)
