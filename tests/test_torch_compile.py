"""What importing the package loads, and what torch.compile makes of marked functions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polarstep.torch_compile import constant, not_compiled


def test_importing_the_package_leaves_the_compiler_alone():
    code = "import sys, polarstep; print('torch' in sys.modules, 'torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_constant_sets_what_torch_sets():
    def ours():
        return 1

    def theirs():
        return 1

    torch.compiler.assume_constant_result(theirs)
    assert vars(constant(ours)) == vars(theirs) != {}


def test_a_constant_function_is_called_not_traced():
    calls = []

    @constant
    def numbers(n: int) -> float:
        calls.append(Path(__file__).stat())  # a full graph has no place for a look at the disk
        return float(n)

    step = torch.compile(lambda x: x * numbers(3), fullgraph=True, backend="eager")
    for _ in range(3):
        assert torch.equal(step(torch.ones(2)), torch.full((2,), 3.0))
    assert len(calls) == 1


class Counter:
    """Counts its steps in a function that torch.compile is told to leave alone."""

    def __init__(self) -> None:
        self.steps = 0
        self.traced: list[bool] = []

    @not_compiled(reason="it counts")
    def count(self, by: int = 1) -> int:
        """The number of steps so far."""
        self._inner()
        self.steps += by
        return self.steps

    def _inner(self) -> None:
        self.traced.append(torch.compiler.is_compiling())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.count(by=2)
        return x + 1


def test_an_excluded_function_runs_uncompiled_and_never_recompiles():
    torch.compiler.reset()
    counter = Counter()
    step = torch.compile(counter.step, backend="eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(4):
            assert torch.equal(step(torch.zeros(2)), torch.ones(2))
    assert counter.steps == 8
    assert counter.traced == [False] * 4


def test_a_full_graph_is_refused_with_the_reason():
    torch.compiler.reset()
    step = torch.compile(Counter().step, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="it counts"):
        step(torch.zeros(2))


def test_an_excluded_function_keeps_its_name_and_words():
    assert Counter.count.__name__ == "count"
    assert Counter.count.__doc__ == "The number of steps so far."
    assert Counter().count() == 1
