"""The first cases of the fuzzer, and that it finds what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from tests.fuzz import checkpoints, configurations, contracts
from tests.fuzz.__main__ import kind_of, main, run_case
from tests.fuzz.cases import Choices
from tests.fuzz.configurations import Configuration, Group, Parameter
from tests.fuzz.directories import Damage, after_damage
from tests.fuzz.matrices import LAYOUTS, laid_out, random_batch

from polarstep import Kaczmarz, LowRank, Muon, NewtonSchulz, NormalizedRows, rng
from polarstep.maps import Polar

# Numbers of cases, not minutes: the same work on every machine.
CASES = {"maps": 30, "configurations": 150, "checkpoints": 24, "damages": 2, "kills": 1}
PARTS = [(kind, part) for kind, count in CASES.items() for part in range(min(3, count))]


@pytest.mark.parametrize(("kind", "part"), PARTS, ids=str)
def test_no_violation(kind, part):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(part, CASES[kind], 3):
            outcome = run_case(0, number, kind)
            assert sum(outcome.tried.values()) > 0
            assert not outcome.violations, outcome.violations[0]
    finally:
        torch.set_num_threads(threads)


def test_a_steep_polynomial_on_a_gram_matrix_rounds_as_its_tolerance_says():
    """Four large singular values, two of 8e-6, and p'(0) = 1,779 in float32: off by 7ε·p'(0)."""
    assert not run_case(20261116, 5333, "maps").violations


@pytest.mark.parametrize(
    ("seed", "number"),
    [
        (
            20261117,
            1661,
        ),  # one entry, polynomials without a safety factor: x·p'(x) = 131,478 at one
        (20261117, 2621),  # p'(0) = 150 in float32, and ‖T‖_op = 1 + 1.14ε·p'(0)
        (5000, 2969),  # ones(20, 20) on a Gram matrix, seven cubic steps: ‖T‖_op = 1 + 1.3e-5
        (5005, 4517),  # 7×31, five steps for a sketch: ‖T‖_op = 1 + 7.3e-5
        (5007, 2825),  # in float64 p is highest between two points of the grid: 1 + 9e-10
    ],
)
def test_steep_polynomials_round_as_their_tolerances_say(seed, number):
    assert not run_case(seed, number, "maps").violations


@dataclass(frozen=True)
class Wrong(NewtonSchulz):
    """A map that breaks one promise, chosen by its name."""

    way: str = "scale"

    def step(self, M, carry, draw):
        polar, left = super().step(M, carry, draw)
        return Polar(M, self.spoilt(M, polar.dense)), left

    def spoilt(self, X, T):
        if self.way == "scale":
            return T * (X.abs().amax((-2, -1), keepdim=True) > 1)
        if self.way == "batch":
            return T * (0.5 if len(X) > 1 else 1)
        if self.way == "long":
            return T * 1.01
        if self.way == "zero":
            return T + 1e-3
        if self.way == "against":
            return -T
        assert self.way == "nan"
        return torch.where(X == 0, torch.nan, T)


@pytest.mark.parametrize(
    ("way", "promise"),
    [
        ("scale", "T(cM) = T(M)"),
        ("batch", "batch = single"),
        ("long", "‖T‖_op"),
        ("zero", "T(0) = 0"),
        ("against", "alignment"),
        ("nan", "finite"),
    ],
)
def test_a_broken_promise_of_a_map_is_found_and_shrunk(way, promise, monkeypatch):
    monkeypatch.setattr(contracts, "random_map", lambda choose: Wrong(5, "quintic", way=way))
    violations = (
        v for case in range(40) for v in contracts.tried(Choices("wrong", case)).violations
    )
    found = next(violation for violation in violations if violation.promise == promise)
    scope = {"Wrong": Wrong}
    exec(found.program.replace("print(", "result = ("), scope)  # the program shows the violation
    assert promise in [broken.promise for broken in scope["result"]]
    assert scope["M"].numel() <= 40


def test_a_wrong_step_is_found_and_shrunk(monkeypatch):
    """An optimizer that forgets the weight decay of its second group."""
    real = Muon.step

    def forgetful(self, closure=None):
        decays = [group["weight_decay"] for group in self.param_groups]
        self.param_groups[-1]["weight_decay"] = 0.0
        real(self, closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay

    monkeypatch.setattr(Muon, "step", forgetful)
    cases = (configurations.tried(Choices("wrong", case)) for case in range(60))
    found = next(violation for outcome in cases for violation in outcome.violations)
    scope: dict[str, object] = {}
    exec(found.program.replace("print(", "result = ("), scope)
    assert scope["result"]
    assert found.program.count("Parameter(") == 1


def copied(events):
    """What a copy does otherwise, of a transform that remembers its rows."""
    parameter = Parameter((16, 3), events=events)
    group = Group((parameter,), {"transform": NormalizedRows(0.5)})
    return checkpoints.continues_otherwise(Configuration((group,), torch.float32, steps=2))


def test_rows_of_nan_may_be_missing_in_a_copy():
    """A momentum of NaN makes rows of NaN, which are not loaded: the parameter is NaN for good."""
    assert copied(("nan",)) == []


def test_a_deepcopy_is_compared_without_gaps_in_memory():
    """torch makes a dense copy, and adds T = QZ to dense parameters in another order."""
    polar = LowRank(2, 0, power=2, inner=NewtonSchulz(8, "polar-express"), always_sketch=True)
    parameter = Parameter((9, 9), layout="strided")
    group = Group((parameter,), {"polar": polar})
    assert checkpoints.continues_otherwise(Configuration((group,), torch.float32, steps=2)) == []


def test_rows_that_are_numbers_may_not(monkeypatch):
    load = Muon.load_state_dict

    def forgetful(self, state):
        load(self, state)
        for of_parameter in self.state.values():
            of_parameter.pop("rows")

    monkeypatch.setattr(Muon, "load_state_dict", forgetful)
    assert "state_dict goes on alike" in dict(copied(()))


def test_a_case_follows_from_seed_and_number():
    first, again, other = (random_batch(Choices(0, "maps", n)) for n in (5, 5, 17))
    assert torch.equal(first.M, again.M)
    assert first.M.shape != other.M.shape or not torch.equal(first.M, other.M)
    assert {kind_of(number) for number in range(1000)} == set(CASES)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_keep_the_values(layout):
    M = torch.randn(3, 4, 5, generator=rng.generator("layouts"))
    there = laid_out(M, layout)
    assert torch.equal(there, M)
    assert (there.stride() == M.stride()) == (layout in ("contiguous", "offset"))


def test_an_unexplained_failure_is_found(monkeypatch):
    """A run whose checkpoint cannot be read raises through ``clear_errors``."""
    monkeypatch.setattr("polarstep_lab.cli.errors.EXPECTED", ())
    monkeypatch.setattr("polarstep_lab.cli.runs.state_of", lambda directory: 1 / 0)
    found = after_damage("adamw", False, Damage("config.json", "cut", 0.5), "resume")
    assert found is not None
    assert "ZeroDivisionError" in found


def test_the_command_line_counts_and_fails(capsys, monkeypatch):
    assert main(["--case", "5"]) == 0
    assert "1 maps" in capsys.readouterr().out
    monkeypatch.setattr(contracts, "random_map", lambda choose: Wrong(5, way="long"))
    assert main(["--case", "5"]) == 1
    assert "violation 1, seed 0, case 5" in capsys.readouterr().out


def test_a_number_of_cases_is_written_down(tmp_path):
    out = tmp_path / "fuzz.json"
    assert main(["--cases", "3", "--first", "4", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["seed"], found["first"], found["cases"], found["violations"]) == (0, 4, 3, [])
    assert (found["tried"]["configurations"], found["tried"]["maps"]) == (2, 1)
    assert found["environment"]["packages"]["torch"] == torch.__version__


def test_a_configuration_is_its_own_program():
    c = Configuration(
        (Group((Parameter((3, 4)),), {"polar": NewtonSchulz(3, "quintic")}),), torch.float32, 2
    )
    scope: dict[str, object] = {}
    exec(configurations.program(c, "differences").replace("print(", "result = ("), scope)
    assert scope["result"] == []


def test_equal_columns_that_a_sketch_draws_are_noticed():
    polar = LowRank(rank=2, oversample=1, sketch=Kaczmarz(), always_sketch=True)
    apart = torch.randn(4, 5, 48, generator=rng.generator("columns"))
    alike = apart[..., :1].expand(4, 5, 48)
    for M in (apart, apart.mT, apart.half()):
        assert not contracts.draws_equal_columns(polar, M, key=14).any()
    for M in (alike, alike.mT, alike.half()):
        assert contracts.draws_equal_columns(polar, M, key=14).all()
    mixed = torch.cat([alike[:1], apart[:1]])
    assert contracts.draws_equal_columns(polar, mixed, key=14).tolist() == [True, False]
    other = LowRank(rank=2, oversample=1, always_sketch=True)
    assert not contracts.draws_equal_columns(other, alike, key=14).any()
