"""docs/integrations/huggingface.md with the real Trainer."""

from __future__ import annotations

import shutil

from tests.integrations.pages import blocks, needs, run, same, weights

PAGE = "huggingface.md"
pytestmark = needs("transformers")
SCRIPT, BUILT_BEFORE, RESUMED = blocks(PAGE)
TRAIN = "trainer.train()\n"


def test_the_trainer_makes_the_optimizer_and_resumes_bit_for_bit(steps: list[object]) -> None:
    whole = run(SCRIPT, {}, PAGE)
    assert len(steps) == 6
    routes = whole["trainer"].optimizer.optimizer.routes
    hidden = [row for row in routes if ".h." in row.name and len(row.shape) == 2]
    assert len(hidden) == 8
    assert {row.algorithm for row in hidden} == {"Muon"}

    shutil.rmtree("runs/gpt2/checkpoint-6")
    assert TRAIN in SCRIPT
    resumed = run(SCRIPT.replace(TRAIN, RESUMED), {}, PAGE)
    assert len(steps) == 6 + 3
    assert same(weights(whole["model"]), weights(resumed["model"]))


def test_an_optimizer_that_was_built_before_trains_alike() -> None:
    made_by_trainer = run(SCRIPT, {}, PAGE)
    script, after = SCRIPT.split(TRAIN)
    given = run(script + BUILT_BEFORE + TRAIN, {}, PAGE)
    assert "routes" in after
    assert same(weights(made_by_trainer["model"]), weights(given["model"]))
