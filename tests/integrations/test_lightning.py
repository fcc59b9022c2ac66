"""docs/integrations/lightning.md with the real library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.integrations.pages import blocks, needs, run, same, weights

PAGE = "lightning.md"
pytestmark = needs("lightning")


def test_the_page_trains_and_resumes_bit_for_bit(steps: list[object]) -> None:
    script, _, _, resume = blocks(PAGE)
    namespace = run(script, {}, PAGE)
    whole = weights(namespace["trainer"].model)
    assert len(steps) == 6
    run(resume, namespace, PAGE)
    assert len(steps) == 6 + 3
    assert same(whole, weights(namespace["resumed"].model))


def test_the_rate_of_every_group_is_logged() -> None:
    script, *_ = blocks(PAGE)
    trainer = run(script, {}, PAGE)["trainer"]
    (log,) = Path("runs/Classifier").rglob("metrics.csv")
    header = log.read_text().splitlines()[0].split(",")
    rates = [name for name in header if name.startswith("lr-Muon")]
    assert len(rates) == len(trainer.optimizers[0].param_groups)


@needs("jsonargparse")
def test_options_come_from_the_command_line() -> None:
    script, from_command_line, *_ = blocks(PAGE)
    model = run(from_command_line, run(script, {}, PAGE), PAGE)["cli"].model
    groups = model.configure_optimizers().param_groups
    assert {(group["lr"], group["weight_decay"]) for group in groups} == {(0.01, 0.05), (0.01, 0.0)}


OPEN = """
import sys, torch
sys.modules["polarstep"] = None  # as where it is not installed
saved = torch.load(sys.argv[1], weights_only=True)
print(len(saved["optimizer_states"][0]["param_groups"]), sorted(saved["callbacks"])[0])
"""


@pytest.mark.filterwarnings("error:.*requires_grad=False:UserWarning")
def test_a_run_resumed_after_the_unfreezing_is_the_uninterrupted_one() -> None:
    script, _, unfreezing, _ = blocks(PAGE)
    namespace = run(unfreezing, run(script, {}, PAGE), PAGE)
    tuned, resumed = weights(namespace["tuned"].model), weights(namespace["tuned_on"].model)
    assert same(tuned, resumed)
    groups = namespace["tuned_on"].optimizers[0].param_groups
    assert [group["name"] for group in groups] == [
        "hidden",
        "head",
        "vector",
        "vector-2",
        "hidden-2",
    ]
    opened = subprocess.run(
        [sys.executable, "-c", OPEN, "runs/Finetuned/step=6.ckpt"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert opened.stdout.startswith("5 ")


def test_without_the_callback_of_the_page_the_first_step_tells_of_the_frozen_backbone() -> None:
    script, _, unfreezing, _ = blocks(PAGE)
    plain = unfreezing.replace("[Unfreezing(", "[BackboneFinetuning(")
    with pytest.warns(UserWarning, match="have a state in the checkpoint .* requires_grad=False"):
        run(plain, run(script, {}, PAGE), PAGE)
