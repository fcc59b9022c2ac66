"""docs/integrations/trl.md with the real library."""

from __future__ import annotations

import shutil

import pytest
from tests.integrations.pages import blocks, needs, run, same, weights

PAGE = "trl.md"
pytestmark = [needs("trl"), pytest.mark.filterwarnings("ignore")]  # the library's own
SCRIPT, OTHER_TRAINERS, RESUMED = blocks(PAGE)
TRAIN = "trainer.train()\n"


def test_the_trainer_makes_the_optimizer_and_resumes_bit_for_bit(steps: list[object]) -> None:
    whole = run(SCRIPT, {}, PAGE)
    assert len(steps) == 6
    routes = whole["trainer"].optimizer.optimizer.routes
    assert {row.algorithm for row in routes if "_proj" in row.name} == {"Muon"}
    shutil.rmtree("runs/sft/checkpoint-6")
    assert TRAIN in SCRIPT
    resumed = run(SCRIPT.replace(TRAIN, RESUMED), {}, PAGE)
    assert len(steps) == 6 + 3
    assert same(weights(whole["model"]), weights(resumed["model"]))


def test_a_trainer_without_the_argument_takes_the_optimizer(steps: list[object]) -> None:
    setup, _, _ = SCRIPT.partition("model = language_model()")
    namespace = run(setup + OTHER_TRAINERS, {}, PAGE)
    assert len(steps) == 2
    assert namespace["preferences"].optimizer.optimizer is steps[0]
