"""docs/asked.md: its blocks run, and what it says of clipping holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from tests.spectra import gaussian

import polarstep as ps

PAGE = Path(__file__).parents[2] / "docs" / "asked.md"


def test_the_blocks_of_the_page_run(capsys):
    namespace: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), namespace)
    told = capsys.readouterr().out
    assert "10 steps of polarstep.Muon" in told
    assert "Nothing looks wrong." in told
    assert "24·(8×64)\n64×64" in told
    assert torch.equal(namespace["gamma"], torch.ones(8))


def stepped(scales: list[float]) -> torch.Tensor:
    p = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    optimizer = ps.Muon([p], lr=0.1, polar=ps.Exact())
    for step, scale in enumerate(scales):
        p.grad = scale * gaussian(6, 4, seed=step)
        optimizer.step()
    return p.detach()


def test_a_gradient_that_is_always_clipped_alike_changes_nothing():
    torch.testing.assert_close(stepped([0.1] * 5), stepped([1.0] * 5))
    assert not torch.allclose(stepped([1.0, 1.0, 0.1, 1.0, 1.0]), stepped([1.0] * 5))
    assert torch.allclose(stepped([0.1]), stepped([1.0]))  # alone, it is a step of full length
