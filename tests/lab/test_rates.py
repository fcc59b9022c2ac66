from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

from polarstep import rng
from polarstep.maps import Exact, NewtonSchulz
from polarstep.theory import schedules
from polarstep.theory.noise import AlphaStable, GradientNoise
from polarstep_lab.checks import rate_studies as studies
from polarstep_lab.checks.convergence import (
    Case,
    Ripples,
    Setup,
    fit,
    measured_rates,
    trajectories,
)
from polarstep_lab.cli import app

SMALL = Setup(horizons=(16, 32, 64), replicas=6, shape=(3, 4))


def test_problem_gradient_smoothness_and_minimum():
    problem = Ripples()
    X = 2 * torch.randn(5, 4, 6, generator=rng.generator("X"), dtype=torch.float64)
    leaf = X.clone().requires_grad_()
    problem.value(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, problem.gradient(X))
    Y = X + torch.randn(X.shape, generator=rng.generator("Y"), dtype=torch.float64)
    ratio = torch.linalg.matrix_norm(problem.gradient(X) - problem.gradient(Y))
    assert (ratio <= problem.L * torch.linalg.matrix_norm(X - Y)).all()
    assert float(problem.value(torch.zeros(2, 3))) == 0
    grid = torch.linspace(-3, 3, 20001, dtype=torch.float64)[:, None]
    slope = problem.gradient(grid).flatten()
    assert (slope.diff() < 0).any()  # not convex
    stationary = grid.flatten()[slope.abs() < 1e-3]
    assert float(stationary.abs().max()) < 1e-2  # and yet zero is the only stationary point
    sigma = torch.linalg.svdvals(problem.start(3, 4, 6, 2.0))
    torch.testing.assert_close(sigma, torch.tensor([1.0, 1.5, 2.0])[:, None].expand(3, 4))


def test_trajectories_are_muon_by_hand():
    """Two steps of two cases without noise agree with equation (1) written out."""
    silent = GradientNoise(AlphaStable(2.0), 2.0, 0.0)
    cases = [
        Case("n", Exact(), silent, partial(schedules.from_tail_index, alpha=2.0)),
        Case("p", Exact(), silent, partial(schedules.universal, nesterov=False)),
    ]
    norms = trajectories(cases, 8, SMALL)
    assert norms.shape == (2, 8, 6)
    X = SMALL.problem.start(6, 3, 4, SMALL.distance)
    for i, nesterov in enumerate((True, False)):
        Y, C = X.clone(), torch.zeros_like(X)
        beta, eta = 1 - 8**-0.5, 8**-0.75
        for k in range(8):
            G = SMALL.problem.gradient(Y)
            torch.testing.assert_close(
                norms[i, k], torch.linalg.matrix_norm(G), rtol=1e-4, atol=1e-4
            )
            C = beta * C + G
            Y = Y - eta * Exact()(beta * C + G if nesterov else C)


def test_fit_recovers_a_known_slope_and_covers_it():
    covered = 0
    for trial in range(20):
        g = rng.generator("trial", trial)
        norms = []
        for K in (32, 64, 128, 256, 512):
            decay = torch.linspace(2, 1, K)[:, None].expand(K, 40)
            norms.append(3 * K**-0.3 * decay * torch.exp(0.3 * torch.randn(1, 40, generator=g)))
        found = fit((32, 64, 128, 256, 512), norms, trial)
        assert found.minimum.slope == pytest.approx(-0.3, abs=0.1)
        assert found.average.slope == pytest.approx(found.minimum.slope, abs=1e-6)
        covered += found.minimum.low <= -0.3 <= found.minimum.high
        assert found.attains(0.29) or found.minimum.low > -0.29
    assert covered >= 17


def test_the_minimum_is_biased_down_and_the_held_out_value_is_not():
    """Noise around one level: the expectation is 1 at every k."""
    below, beside = [], []
    for trial in range(20):
        g = rng.generator("flat", trial)
        norms = [1 + 0.2 * torch.randn(K, 12, generator=g) for K in (32, 64, 128)]
        found = fit((32, 64, 128), norms, trial)
        below += found.minimum.values
        beside += found.held_out.values
    assert max(below) < 0.95
    assert sum(beside) / len(beside) == pytest.approx(1, abs=0.02)


def test_same_seed_same_numbers_and_another_seed_others():
    cases = [case for case, _ in studies.study_cases((1.5,), ("gaussian",), 0.1, (6, 8))]
    setup = Setup(horizons=(8, 16, 32), replicas=3)
    assert measured_rates(cases, setup) == measured_rates(cases, setup)
    assert measured_rates(cases, setup) != measured_rates(
        cases, Setup(horizons=(8, 16, 32), replicas=3, seed=1)
    )


@pytest.mark.parametrize("alpha", [1.2, 2.0])
def test_measured_gradients_are_below_the_theorem_and_as_steep(alpha):
    """A short version of the study; the theorem's bound must hold at any length."""
    setup = Setup(horizons=(32, 64, 128, 256), replicas=12)
    rows = studies.rate_study(setup, (alpha,), ("newton-schulz", "gaussian"))
    assert len(rows) == 4
    for row in rows:
        assert row.details["attains"], row
        assert row.details["below_bound"]
        known = row.details["momentum"] == "nesterov"
        assert all((limit is not None) == known for limit in row.details["bound"])
        assert row.predicted == -schedules.rate(alpha)


def test_batch_threshold_decides():
    """At B = 1 Muon does not converge; above the threshold it does."""
    rows = studies.batch_study(Setup(distance=1.0, replicas=8, horizons=(32, 64, 128)))
    by_batch = {row.details["batch"]: row.fit["average"]["values"] for row in rows}
    threshold = rows[0].details["threshold"]
    assert by_batch[1][-1] > by_batch[1][0] * 0.9
    assert by_batch[threshold][-1] < 0.75 * by_batch[threshold][0]
    assert by_batch[threshold][-1] < by_batch[1][-1] / 4


def test_tick_counts_every_step():
    done = []
    cases = [
        Case(
            "x",
            NewtonSchulz(2, "quintic"),
            GradientNoise(AlphaStable(2.0), 2.0, 1.0),
            schedules.universal,
        )
    ]
    trajectories(cases, 37, SMALL, done.append)
    assert sum(done) == 37


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Setup(horizons=(1, 2, 3)), "K ≥ 2"),
        (lambda: Setup(horizons=(8, 16)), "at least 3 different horizons"),
        (lambda: Setup(replicas=1), "replicas=1: expected an integer ≥ 2"),
        (lambda: Ripples(a=3.0), "only stationary point"),
        (lambda: studies.study_cases((1.5,), ("svd",), 1.0, (6, 8)), "expected some of exact"),
        (lambda: studies.study_cases((1.0,), ("exact",), 1.0, (6, 8)), "1 < α ≤ 2"),
    ],
)
def test_errors(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_command_writes_its_record_and_keeps_an_earlier_one(tmp_path):
    out = tmp_path / "new" / "rates.json"
    run = ["rates", "--out", str(out), "--alphas", "1.5,2", "--solvers", "newton-schulz"]
    run += ["--shortest", "8", "--longest", "32", "--replicas", "3", "--no-examples"]
    result = CliRunner().invoke(app, run)
    assert result.exit_code == 0, result.output
    record = json.loads(out.read_text())
    assert [row["alpha"] for row in record["rates"]] == [1.5, 1.5, 2.0, 2.0]
    assert record["setup"]["horizons"] == [8, 16, 32]
    again = CliRunner().invoke(app, run)
    assert again.exit_code == 2
    assert "--force" in again.output
    assert CliRunner().invoke(app, [*run, "--force"]).exit_code == 0
    assert json.loads(out.read_text()) == record


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--alphas", "3"], "--alphas: '3': expected numbers in (1, 2], such as 1.2,1.6,2"),
        (["--alphas", "1.5,two"], "--alphas: '1.5,two': expected numbers in (1, 2]"),
        (["--solvers", "exact,svd"], "--solvers: 'svd': expected some of exact, newton-schulz"),
        (["--longest", "100"], "100 with --shortest 64 leaves 64: expected at least 3 horizons"),
        (["--longest", "100"], "to fit a slope; give 256 or more"),
    ],
)
def test_command_names_the_option_that_is_wrong(options, words, tmp_path):
    outcome = CliRunner().invoke(app, ["rates", "--out", str(tmp_path / "bad"), *options])
    assert outcome.exit_code == 2
    assert words in " ".join(outcome.output.replace("│", " ").split())
    assert not (tmp_path / "bad").exists()


def test_command_refuses_a_place_below_a_file_before_it_measures(tmp_path):
    (tmp_path / "rates").write_text("")
    words = ["rates", "--quick", "--out", str(tmp_path / "rates" / "inside.json")]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 2
    said = " ".join(outcome.output.replace("│", " ").split())
    assert "is a file, expected a folder: choose another --out" in said
    assert "steps" not in outcome.output  # no progress was shown
