"""The examples of docs/extending.md run and do what the page says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.spectra import gaussian, matrix
from torch.nn import Parameter

import polarstep as ps
import polarstep_lab.axes as ablation_axes
from polarstep.others import ELEMENTWISE
from polarstep_lab.axes import apply_axis
from polarstep_lab.methods import METHODS
from polarstep_lab.recipes import RECIPES, resolve

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "extending.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def page() -> Iterator[dict[str, Any]]:
    """All names that the page defines; what it enters into lists is taken out again."""
    rules, recipes, axes = dict(ELEMENTWISE), dict(RECIPES), ablation_axes.AXES
    # Dataclasses look for the module that they are defined in.
    namespace: dict[str, Any] = {"__name__": __name__}
    try:
        for block in BLOCKS:
            exec(compile(block, str(PAGE), "exec"), namespace)
        yield namespace
    finally:
        for listed, before in ((ELEMENTWISE, rules), (RECIPES, recipes)):
            listed.clear()
            listed.update(before)
        ablation_axes.AXES = axes


def maps_of(page: dict[str, Any]) -> dict[str, ps.PolarMap]:
    return {
        "map": page["ByEigenvalues"](),
        "map with state": page["Leading"](),
        "map around a map": page["Damped"](ps.LowRank(8, 4, sketch=ps.Warm(), always_sketch=True)),
        "sketch": ps.LowRank(8, 4, sketch=page["Signs"](), always_sketch=True),
        "finder": ps.LowRank(8, 4, sketch=page["Largest"](), always_sketch=True),
    }


MAPS = ["map", "map with state", "map around a map", "sketch", "finder"]


def test_the_transform_clips(page: dict[str, Any]) -> None:
    W = Parameter(torch.zeros(8, 12, dtype=torch.float64))
    optimizer = ps.Muon([W], lr=1.0, shape_scale="none", transform=page["Clipped"](1.0))
    W.grad = gaussian(8, 12)
    optimizer.step()
    T = ps.NewtonSchulz(5, "polar-express")(1.95 * W.grad)
    rms = T.square().mean().sqrt()
    torch.testing.assert_close(W.detach(), -T.clamp(-rms, rms))
    assert not torch.equal(W.detach(), -T)


def test_the_momentum_rule_divides_by_the_root_of_a_running_mean(page: dict[str, Any]) -> None:
    W, v = Parameter(torch.zeros(8, 12, dtype=torch.float64)), 0.0
    polar = ps.NewtonSchulz(3, "quintic")
    optimizer = ps.Muon([W], 1.0, shape_scale="none", polar=polar, momentum_rule=page["PerEntry"]())
    for k in range(3):
        before, W.grad = W.detach().clone(), gaussian(8, 12, seed=k)
        optimizer.step()
        C, v = optimizer.state[W]["momentum_buffer"], 0.95 * v + 0.05 * W.grad.square()
        T = polar((W.grad + 0.95 * C) / v.sqrt())
        torch.testing.assert_close(before - W.detach(), T)
    again = ps.Muon([W])
    with pytest.warns(UserWarning, match="momentum_rule=Momentum"):
        again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["momentum_rule"] == page["PerEntry"]()


def test_there_is_an_example_of_each_kind() -> None:
    assert len(BLOCKS) == 10


@pytest.mark.parametrize("name", MAPS)
def test_a_map_of_the_page_keeps_the_promises(page: dict[str, Any], name: str) -> None:
    polar = maps_of(page)[name]
    M = torch.stack([matrix("power-law", 24, 40), torch.zeros(24, 40), gaussian(24, 40)])
    T = polar(M)
    assert T.shape == M.shape
    assert not T[1].any()
    torch.testing.assert_close(polar(1e-30 * M), T, atol=1e-8, rtol=0)
    torch.testing.assert_close(torch.stack([polar(each) for each in M]), T, atol=1e-8, rtol=0)
    torch.testing.assert_close(polar(M.mT), T.mT, atol=1e-8, rtol=0)
    assert torch.linalg.matrix_norm(T, 2).max() <= 1 + 1e-6
    assert (M * T).sum() > 0


def test_the_eigenvalues_give_the_polar_factor(page: dict[str, Any]) -> None:
    M = gaussian(24, 40)
    torch.testing.assert_close(page["ByEigenvalues"]()(M), ps.Exact()(M), atol=1e-8, rtol=0)


def test_the_power_iteration_finds_the_leading_pair(page: dict[str, Any]) -> None:
    W, G = Parameter(torch.zeros(24, 40).double()), matrix("power-law", 24, 40)
    optimizer = ps.Muon([W], polar=page["Leading"](), momentum=0.0)
    seen = []
    optimizer.register_polar_hook(lambda bucket: seen.append(bucket.T[0].clone()))
    for _ in range(60):
        W.grad = G
        optimizer.step()
    U, _, Vh = torch.linalg.svd(G)
    torch.testing.assert_close(seen[-1], torch.outer(U[:, 0], Vh[0]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", MAPS)
def test_training_with_a_map_of_the_page(page: dict[str, Any], name: str) -> None:
    """‖W − A‖² falls."""
    target = gaussian(24, 40).float()
    W = Parameter(torch.zeros(24, 40))
    optimizer = ps.Muon([W], lr=0.05, polar=maps_of(page)[name])
    losses = []
    for _ in range(10):
        loss = (W - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_the_rule_of_the_page(page: dict[str, Any]) -> None:
    b, c = Parameter(torch.zeros(5)), Parameter(torch.zeros(5))
    optimizer = ps.Muon([{"params": [b, c], "algorithm": "sign", "lr": 0.5}], nonfinite="skip")
    b.grad, c.grad = torch.tensor([1.0, -2, 0, 3, -4]), torch.full((5,), torch.nan)
    optimizer.step()
    assert b.tolist() == [-0.5, 0.5, 0, -0.5, 0.5]
    assert c.tolist() == [0] * 5
    assert not optimizer.state[c]["momentum_buffer"].any()
    b.grad = torch.tensor([-1.0, -2, 1, 3, -4])
    optimizer.step()  # from the state of the first, 0.9·1 − 1 < 0
    assert b.tolist() == [0, 1, -0.5, -1, 1]
    assert c.tolist() == [0] * 5
    b.data = b.data.bfloat16()
    optimizer.step()
    assert optimizer.state[b]["momentum_buffer"].dtype == torch.bfloat16
    assert {route.algorithm for route in optimizer.routes} == {"SignDescent"}
    assert "SignDescent" in str(optimizer.routes)
    with pytest.raises(ValueError, match=r"option 'betas'.*expected some of .*momentum"):
        ps.Muon([{"params": [b], "algorithm": "sign", "betas": (0.9, 0.95)}])


@pytest.mark.parametrize("method", [method.slug for method in METHODS])
def test_the_recipe_of_the_page(page: dict[str, Any], method: str) -> None:
    config = resolve("nanogpt-wide", method)
    assert (config.recipe, config.model.width) == ("nanogpt-wide", 256)


def test_the_axis_of_the_page(page: dict[str, Any]) -> None:
    config = resolve("nanogpt-wide", "rand-muon")
    values = page["oversample"].values(config)
    applied = [apply_axis(config, "oversample", value) for value in values]
    assert [each.optimizer.polar.oversample for each in applied] == [0, 2, 10, 20]


def test_the_files_that_the_page_names_are_there() -> None:
    named = re.findall(r"`((?:src|tests|docs)/[\w/.]+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 15
    for path in named:
        assert (ROOT / path).exists(), path


def test_every_part_that_is_listed_is_safe_to_load() -> None:
    """The list is where a new one is entered; a checkpoint with it reads back."""
    from polarstep import maps, momentum, transforms
    from polarstep.checkpoints.plain import KINDS
    from polarstep.maps import sketches

    safe = torch.serialization.get_safe_globals()
    for room in (maps, sketches, transforms, momentum):
        for part in (getattr(room, name) for name in room.__all__):
            if isinstance(part, type) and issubclass(part, KINDS):
                assert part in safe, part
