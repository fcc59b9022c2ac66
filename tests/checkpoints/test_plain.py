"""Options of a group go through a checkpoint as plain data."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.solvers import SOLVERS
from torch import Tensor
from torch.nn import Parameter

from polarstep import LowRank, Muon, NewtonSchulz, NormalizedRows, PolarMap, Warm
from polarstep.checkpoints.plain import decoded, encoded
from polarstep.maps import Draw, MapState, Polar


@dataclass(frozen=True)
class Halved(PolarMap):
    """A map of the user's own with plain options and a map inside."""

    inner: PolarMap = field(default_factory=NewtonSchulz)
    factors: tuple[float, ...] = (0.5, 0.1 + 0.2)

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        polar, left = self.inner.step(M, carry, draw)
        return Polar(M, self.factors[0] * polar.dense), left


@dataclass(frozen=True)
class Shifted(Halved):
    """A map with an option that is no plain data."""

    shift: object = object()


def tenth(m: int, n: int) -> float:
    return 0.1


def hundredth(m: int, n: int) -> float:
    return 0.01


def saved(**options: object) -> dict[str, object]:
    return Muon([Parameter(torch.eye(3))], **options).state_dict()  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: solver.name)
def test_every_map_is_read_back_from_its_text(solver) -> None:
    text = encoded(solver.map)
    assert isinstance(text, str)
    assert decoded(text) == solver.map


@pytest.mark.parametrize(
    "value", [NormalizedRows(0.9), torch.bfloat16, Halved(), LowRank(4, inner=Halved())], ids=repr
)
def test_transforms_precisions_and_own_maps_are_read_back(value) -> None:
    assert decoded(encoded(value)) == value


@pytest.mark.parametrize("value", [0.1, None, "spectral", (3, 4), [1, 2], True])
def test_plain_values_stay(value) -> None:
    assert encoded(value) is value
    assert decoded(value) is value


def test_a_checkpoint_has_plain_values_only(tmp_path) -> None:
    content = saved(
        polar=LowRank(2, 0, inner=Halved()), transform=NormalizedRows(), shape_scale=tenth
    )
    torch.save(content, tmp_path / "checkpoint.pt")
    safe = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(safe)
    optimizer = Muon([Parameter(torch.eye(3))], shape_scale=tenth)
    optimizer.load_state_dict(loaded)
    group = optimizer.param_groups[0]
    assert group["polar"] == LowRank(2, 0, inner=Halved())
    assert group["transform"] == NormalizedRows()
    assert group["shape_scale"] is tenth


def test_a_map_with_an_option_that_is_not_plain_is_kept_by_its_name() -> None:
    content, mine = saved(polar=Shifted()), Shifted(shift=3)
    optimizer = Muon([Parameter(torch.eye(3))], polar=mine)
    optimizer.load_state_dict(content)
    assert optimizer.param_groups[0]["polar"] == mine
    with pytest.raises(
        ValueError, match=r"polar of the checkpoint is .*Shifted.*by its name alone"
    ):
        Muon([Parameter(torch.eye(3))]).load_state_dict(content)


@pytest.mark.parametrize("given", ["spectral", hundredth])
def test_a_function_must_be_given_again(given) -> None:
    optimizer = Muon([Parameter(torch.eye(3))], shape_scale=given)
    with pytest.raises(
        ValueError, match=r"shape_scale of the checkpoint is .*tenth.*give shape_scale="
    ):
        optimizer.load_state_dict(saved(shape_scale=tenth))


def test_an_option_that_a_class_does_not_have_is_named() -> None:
    content = saved(polar=LowRank(2, 0))
    packed = json.loads(content["param_groups"][0]["polar"])
    packed["options"]["tilt"] = 3
    content["param_groups"][0]["polar"] = json.dumps(packed)
    with pytest.raises(ValueError, match=r"is a LowRank with tilt, .*group.pop\('polar', None\)"):
        Muon([Parameter(torch.eye(3))]).load_state_dict(content)


def test_a_class_that_is_not_defined_here_is_named() -> None:
    content = saved()
    content["param_groups"][0]["polar"] = json.dumps({"class": "os.path.Elsewhere", "options": {}})
    with pytest.raises(ValueError, match=r"is a os.path.Elsewhere: .*import os.path before"):
        Muon([Parameter(torch.eye(3))]).load_state_dict(content)


def test_a_checkpoint_with_objects_loads() -> None:
    """A hook may put the groups of an optimizer into a checkpoint as they are."""
    content = saved()
    content["param_groups"][0]["polar"] = LowRank(2, 0)
    optimizer = Muon([Parameter(torch.eye(3))])
    optimizer.load_state_dict(content)
    assert optimizer.param_groups[0]["polar"] == LowRank(2, 0)


def test_numbers_of_numpy_become_pythons_own():
    groups = [{"params": [Parameter(torch.eye(4))], "split_sizes": np.array([1, 3]).tolist()}]
    groups += [{"params": [Parameter(torch.eye(4))], "algorithm": "adamw", "lr": np.float32(0.5)}]
    groups[1]["betas"] = (np.float64(0.9), np.float64(0.95))
    groups[0]["polar"] = LowRank(2, power=np.float32(1), sketch=Warm(noise=np.float32(0.25)))
    optimizer = Muon(groups, lr=np.float64(0.02), weight_decay=np.float32(0.5), seed=np.int64(3))
    optimizer.param_groups[0]["split_sizes"] = tuple(np.array([1, 3]))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    content = torch.load(file)  # weights_only=True: refuses numbers of NumPy
    options = content["param_groups"][0] | {"betas": content["param_groups"][1]["betas"]}
    assert {
        option: options[option] for option in ("lr", "weight_decay", "seed", "split_sizes", "betas")
    } == {
        "lr": 0.02,
        "weight_decay": 0.5,
        "seed": 3,
        "split_sizes": (1, 3),
        "betas": (0.9, 0.95),
    }
    optimizer.load_state_dict(content)
    assert optimizer.param_groups[0]["polar"] == LowRank(2, power=1.0, sketch=Warm(noise=0.25))


def test_a_class_of_another_version_is_told_from_one_that_is_not_imported():
    for path, remedy in (
        ("Curved", "install the polarstep that wrote the checkpoint"),
        ("mine.maps.Curved", "import mine.maps"),
    ):
        text = json.dumps({"class": path, "options": {}})
        with pytest.raises(ValueError, match=f"is a {path}: .*; {remedy} before load_state_dict"):
            decoded(text)


def defined_again() -> type[PolarMap]:
    """A class of one name, as of a cell of a notebook that was run again."""

    @dataclass(frozen=True)
    class Third(Halved):
        pass

    return Third


def test_of_classes_of_one_name_the_present_one_is_read_or_else_the_last() -> None:
    first, last = defined_again(), defined_again()
    text = encoded(LowRank(2, 1, inner=first()))
    assert type(decoded(text).inner) is last
    assert type(decoded(text, now=LowRank(3, inner=first())).inner) is first
    assert type(decoded(encoded(first()), now=first())) is first


# --- functions


class Times:
    """An object that can be called, and changes during a run."""

    def __init__(self, k: float) -> None:
        self.k = k

    def __call__(self, m: int, n: int) -> float:
        return self.k


@pytest.mark.parametrize("make", [
    lambda k: tenth,
    lambda k: partial(tenth, k),
    lambda k: lambda m, n: k,
    Times,
], ids=["function", "partial", "lambda", "object"])  # fmt: skip
def test_a_function_is_kept_by_its_name(make: Callable[[int], Any]) -> None:
    text, now = encoded(make(1)), make(2)
    assert isinstance(text, str)
    assert decoded(text, now) is now
    for other in (hundredth, "spectral", None):
        with pytest.raises(
            ValueError, match=r"shape_scale of the checkpoint is .*by its name alone"
        ):
            decoded(text, other, "shape_scale")


def test_the_remedy_keeps_the_function_of_the_optimizer() -> None:
    content = saved(shape_scale=tenth)
    optimizer = Muon([Parameter(torch.eye(3))], shape_scale=Times(5.0))
    with pytest.raises(ValueError, match=r"is .*tenth, .*group.pop\('shape_scale'"):
        optimizer.load_state_dict(content)
    for group in content["param_groups"]:
        group.pop("shape_scale", None)
    optimizer.load_state_dict(content)
    assert optimizer.param_groups[0]["shape_scale"].k == 5.0
