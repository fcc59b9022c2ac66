"""Options of a group go through a checkpoint as plain data."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.solvers import SOLVERS
from torch import Tensor
from torch.nn import Parameter

from polarstep import LowRank, Muon, NewtonSchulz, NormalizedRows, PolarMap, Warm
from polarstep.optim.checkpoints import described
from polarstep.optim.checkpoints.plain import decoded, encoded
from polarstep.optim.groups import LR_SCALE


@dataclass(frozen=True)
class Halved(PolarMap):
    """A map of the user's own with plain options and a map inside."""

    inner: PolarMap = field(default_factory=NewtonSchulz)
    factors: tuple[float, ...] = (0.5, 0.1 + 0.2)

    def _polar(self, X: Tensor, numbers: Tensor | None) -> Tensor:
        return self.factors[0] * self.inner.as_computed(X)

    def flops(self, m: int, n: int) -> int:
        return self.inner.flops(m, n)


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
    content = saved(polar=LowRank(2, 0, inner=Halved()), transform=NormalizedRows(), lr_scale=tenth)
    torch.save(content, tmp_path / "checkpoint.pt")
    safe = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    finally:
        torch.serialization.add_safe_globals(safe)
    optimizer = Muon([Parameter(torch.eye(3))], lr_scale=tenth)
    optimizer.load_state_dict(loaded)
    group = optimizer.param_groups[0]
    assert group["polar"] == LowRank(2, 0, inner=Halved())
    assert group["transform"] == NormalizedRows()
    assert group[LR_SCALE] is tenth


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
    optimizer = Muon([Parameter(torch.eye(3))], lr_scale=given)
    with pytest.raises(ValueError, match=r"lr_scale of the checkpoint is .*tenth.*give lr_scale="):
        optimizer.load_state_dict(saved(lr_scale=tenth))


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


# --- functions


def times(m: int, n: int, k: float = 1.0, name: Any = None) -> float:
    return k


class Times:
    """An object that can be called, with a field; ``method`` is a function of its own."""

    def __init__(self, k: Any) -> None:
        self.k = k

    def __call__(self, m: int, n: int) -> float:
        return 0.5

    def method(self, m: int, n: int) -> float:
        return 0.5


@dataclass(frozen=True)
class Frozen(Times):
    k: float
    seen: list[int] = field(default_factory=list, compare=False)


class Slotted(Times):
    __slots__ = ("k",)


class Named(Times):
    __name__ = "named"


class Layer(torch.nn.Module):
    def forward(self, m: int, n: int) -> float:
        return 0.5


class Size(Enum):
    SMALL = 1
    LARGE = 2


def enclosing(k: Any):
    return lambda m, n: 0.5 if k is None else 1.0


def recursive(k: float):
    def scale(m: int, n: int) -> float:
        return k if m > 1 else scale(2, n)

    return scale


def cached(k: float):
    return lru_cache(lambda m, n: k)


# Each makes a new function from a value: functions of equal values are the same, of others they differ.
TOLD = {
    "partial": (lambda k: partial(times, k=k), 0.5, 5.0),
    "partial by place": (lambda k: partial(times, 1, 1, k), 0.5, 5.0),
    "partial of another": (lambda f: partial(f), tenth, hundredth),
    "partial of a lambda": (lambda k: partial(enclosing(k)), 1, 2),
    "partial with a tuple": (lambda k: partial(times, name=(1, (k, "a"))), 1, 2),
    "partial with a choice": (lambda k: partial(times, name=k), Size.SMALL, Size.LARGE),
    "partial with a precision": (lambda k: partial(times, name=k), torch.float32, torch.bfloat16),
    "partial with a number of NumPy": (lambda k: partial(times, k=np.float32(k)), 0.5, 0.25),
    "partial with a dict": (lambda k: partial(times, name={1: k}), 0.5, 0.25),
    "partial with a set": (lambda k: partial(times, name={"a", "b", k}), "c", "d"),
    "object": (Times, 0.5, 5.0),
    "object with NaN": (Times, float("nan"), 5.0),
    "frozen": (Frozen, 0.5, 5.0),
    "slots": (Slotted, 0.5, 5.0),
    "object with a name": (Named, 0.5, 5.0),
    "method of a frozen object": (lambda k: Frozen(k).method, 0.5, 5.0),
    "enclosed": (enclosing, 0.5, 5.0),
    "enclosed function": (lambda f: enclosing(f), tenth, hundredth),
    "recursive": (recursive, 0.5, 5.0),
    "cached": (cached, 0.5, 5.0),
    "default": (lambda k: lambda m, n, a=k: a, 0.5, 5.0),
    "default by name": (lambda k: lambda m, n, *, a=k: a, 0.5, 5.0),
}


def through_a_file(content: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file)  # weights_only=True


@pytest.mark.parametrize(("make", "value", "other"), TOLD.values(), ids=list(TOLD))
def test_what_a_function_holds_is_told_as_plain_data(make, value, other) -> None:
    content = through_a_file(saved(lr_scale=make(value)))
    text = content["param_groups"][0][LR_SCALE]
    assert isinstance(text, str)
    again = make(value)
    optimizer = Muon([Parameter(torch.eye(3))], lr_scale=again)
    optimizer.load_state_dict(content)
    assert optimizer.param_groups[0][LR_SCALE] is again
    for given in (make(other), "spectral"):
        with pytest.raises(ValueError, match=r"lr_scale of the checkpoint is .*give lr_scale="):
            Muon([Parameter(torch.eye(3))], lr_scale=given).load_state_dict(content)


def test_lambdas_of_one_module_are_told_apart_by_their_code() -> None:
    import math

    lambdas = [
        lambda m, n: 1.0,
        lambda m, n: 5.0,
        lambda m, n: m / n,
        lambda m, n: n / m,
        lambda m, n: math.sqrt(m),
        lambda m, n: math.log(m),
        lambda m, n: m in {"a", "b"},
        lambda m, n: m in {"a", "c"},
        lambda m, n: max(1.0 * k for k in (m, n)),
        lambda m, n: max(2.0 * k for k in (m, n)),
    ]
    texts = [encoded(each) for each in lambdas]
    assert len(set(texts)) == len(lambdas)
    for _ in range(100):  # the interpreter rewrites the code of what is called often
        lambdas[0](3, 4), lambdas[2](3, 4), lambdas[4](3, 4), lambdas[8](3, 4)
    assert [encoded(each) for each in lambdas] == texts
    with pytest.raises(ValueError, match=r"lambda>.*by its description alone.*\(code is .* there"):
        decoded(texts[0], lambdas[1], option="lr_scale")
    assert decoded(texts[0], lambdas[0]) is lambdas[0]


def test_the_code_of_another_python_is_not_compared_but_values_are() -> None:
    told = json.loads(encoded(partial(enclosing(0.5))))
    told["partial"] |= {"python": "cpython-399", "code": "0"}
    now = partial(enclosing(0.5))
    assert decoded(json.dumps(told), now) is now
    with pytest.raises(ValueError, match="partial is"):
        decoded(json.dumps(told), partial(enclosing(0.25)))
    told = told["partial"]
    with pytest.raises(ValueError, match=r"values are {'k': 0.5} there and {'k': 0.25} here"):
        decoded(json.dumps(told), enclosing(0.25))


def test_a_function_is_known_by_its_name_alone_where_no_other_has_it() -> None:
    """As a function of a module; a lambda shares its name with others, so a name says too little."""
    assert decoded(json.dumps({"function": described.path_of(tenth)}), tenth) is tenth
    now = enclosing(0.5)
    with pytest.raises(ValueError, match="another function"):
        decoded(json.dumps({"function": described.path_of(now)}), now)


def test_what_changes_during_a_run_is_not_compared() -> None:
    """A model and its methods, objects that a function encloses, fields that are not compared."""
    model = Layer()
    before = [
        encoded(each) for each in (model, model.extra_repr, enclosing(model), enclosing(Times(1)))
    ]
    model.eval()
    changed = [model, model.extra_repr, enclosing(model), enclosing(Times(2))]
    assert [decoded(text, now) is now for text, now in zip(before, changed, strict=True)] == [
        True
    ] * 4
    one, two = Frozen(0.5), Frozen(0.5)
    two.seen.append(3)
    assert decoded(encoded(one), two) is two


def test_the_remedy_keeps_the_function_of_the_optimizer() -> None:
    content = saved(lr_scale=Times(0.5))
    optimizer = Muon([Parameter(torch.eye(3))], lr_scale=Times(5.0))
    with pytest.raises(ValueError, match=r"fields are {'k': 0.5} there .*group.pop\('shape_scale'"):
        optimizer.load_state_dict(content)
    for group in content["param_groups"]:
        group.pop("shape_scale", None)
    optimizer.load_state_dict(content)
    assert optimizer.param_groups[0][LR_SCALE].k == 5.0
