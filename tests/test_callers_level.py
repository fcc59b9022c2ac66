"""A warning points at the line of the user's, through any frames of this package and of torch."""

from __future__ import annotations

import warnings
from functools import partial
from types import SimpleNamespace

import pytest

from polarstep.callers_level import callers_level

WARN = "def warn(): warnings.warn('a mistake', stacklevel=callers_level())"
CALL = "def call(inner): return inner()"


def made(source: str, module: str):
    """The function that ``source`` defines, as one of ``module``."""
    names = {"__name__": module, "warnings": warnings, "callers_level": callers_level}
    exec(compile(source, f"{module}.py", "exec"), names)
    return names[source.split()[1].partition("(")[0]]


@pytest.mark.parametrize(
    "through",
    [
        [],
        ["polarstep"],
        ["torch.optim.optimizer"],
        ["polarstep.optimizer", "torch.optim", "torch"],
    ],
    ids=str,
)
def test_the_line_outside_the_package_and_torch_is_shown(through):
    step = made(WARN, "polarstep.cuda_graphs")
    for module in through:
        step = partial(made(CALL, module), step)
    with pytest.warns(UserWarning, match="a mistake") as told:
        step()
    assert told[0].filename == __file__


@pytest.mark.parametrize("module", ["polarstep_lab.training", "torchvision.models", "users"])
def test_a_package_of_a_similar_name_is_the_users(module):
    step = made(WARN, "polarstep.cuda_graphs")
    call = made(CALL, module)
    with pytest.warns(UserWarning, match="a mistake") as told:
        call(step)
    assert told[0].filename == f"{module}.py"


def test_without_a_line_of_the_users_it_is_the_outermost(monkeypatch):
    frame = None
    for name in ("polarstep", "torch._dynamo", "polarstep.cuda_graphs"):
        frame = SimpleNamespace(f_back=frame, f_globals={"__name__": name})
    monkeypatch.setattr("sys._getframe", lambda depth: frame)
    assert callers_level() == 3
