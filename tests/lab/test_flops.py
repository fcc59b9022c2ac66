"""The cost formulas against counted products, and the ledger against the paper's Table 2."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from tests.counting import Flops

import polarstep as ps
from polarstep.maps import NewtonSchulz
from polarstep.maps.coefficients import minimax, resolve
from polarstep_lab import flops
from polarstep_lab.flops import CIFAR10, NANOGPT, TABLE_2, Workload
from polarstep_lab.flops.workload import workload_named, workload_names
from polarstep_lab.models.convnet import ConvNet, ConvNetConfig

WORKLOADS = [NANOGPT, CIFAR10]
SHAPES = [(5, 5), (7, 12), (12, 7), (1, 6)]


def count(function, *arguments) -> int:
    """FLOPs of the matrix products that ``function`` runs."""
    with Flops() as counter:
        function(*arguments)
    return counter.total


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize(
    ("degree", "products"), [(3, None), (5, None), (7, None), (9, 2), (13, None), (17, 3)]
)
@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize("steps", [1, 4])
def test_polynomial_steps_cost_what_the_solver_runs(m, n, degree, products, form, steps):
    """By Horner's rule, or by the squarings that degrees 9 and 17 have."""
    flat = resolve("flat", 1)[0]
    polynomial = flat if degree == 17 else minimax(1.0, 1.0, degree)[0]
    solver = NewtonSchulz(steps, (polynomial,), form=form)
    formula = flops.newton_schulz if form == "plain" else flops.gram_newton_schulz
    expected = formula(m, n, steps, degree, products=products)
    assert count(solver, torch.ones(m, n, dtype=torch.float64)) == expected
    assert solver.flops(m, n) == flops.newton_schulz(m, n, steps, degree, products=products)


def test_degrees_that_have_no_squarings_cost_horners_rule():
    flat = resolve("flat", 1)[0]
    other = (*flat[:3], flat[3] + 1, *flat[4:])  # of degree 17 too, but not nested
    assert NewtonSchulz(1, (flat,)).flops(16, 20) == 4 * 20 * 16**2 + 3 * 2 * 16**3
    assert NewtonSchulz(1, (other,)).flops(16, 20) == 4 * 20 * 16**2 + 7 * 2 * 16**3


def test_the_ledger_of_the_deflated_map_is_the_solvers_count():
    head = ps.LowRank(200, 10, 1, inner=NewtonSchulz(7, "quintic"), always_sketch=True)
    polar = ps.Deflated(head)
    items = flops.ledger(NANOGPT, "Deflated Muon (one flat step)")
    outside = ("momentum", "normalization", "extra", "update", "element-wise")
    spent = sum(cost for item, cost in items.items() if item not in outside)
    assert spent == sum(count * polar.flops(m, n) for (m, n), count in NANOGPT.matrices)
    assert "polynomial steps on X₀" in items


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_the_deflated_map_costs_more_than_its_head_and_less_than_full_space(workload):
    low_rank, full = (
        sum(flops.ledger(workload, name).values())
        for name in ("Rand Muon (Nes.-Gaussian)", "Muon (Nesterov)")
    )
    (lifted,) = flops.gflops(workload, ["Deflated Muon (one flat step)"]).values()
    assert low_rank / 1e9 < lifted < full / 1e9
    narrow = dataclasses.replace(workload, rank=10_000)  # as wide as every matrix: full space
    assert sum(flops.ledger(narrow, "Deflated Muon (one flat step)").values()) == full


def test_the_ledger_of_auto_is_that_of_the_maps_it_takes():
    (name,) = set(flops.OURS) - {"Deflated Muon (one flat step)"}
    items = flops.ledger(NANOGPT, name)
    cuda = torch.device("cuda")
    spent = sum(count * ps.Auto().on(m, n, cuda).flops(m, n) for (m, n), count in NANOGPT.matrices)
    assert items["map of auto (Deflated)"] == spent
    lifted = flops.gflops(NANOGPT, ["Deflated Muon (one flat step)"])[
        "Deflated Muon (one flat step)"
    ]
    assert sum(items.values()) / 1e9 < lifted  # its head is smaller


def algorithm_1(M, ell, h, q):
    """The paper's Algorithm 1 with the quintic, written out product by product."""
    Y = M @ torch.randn(M.shape[1], ell, generator=torch.Generator().manual_seed(0))
    for _ in range(h):
        Y = M @ (M.mT @ Y)
    Q, _ = torch.linalg.qr(Y)
    Z = Q.mT @ M
    Z = Z / torch.linalg.matrix_norm(Z)
    for _ in range(q):
        A = Z @ Z.mT
        Z = 1.875 * Z + (-1.25 * A + 0.375 * (A @ A)) @ Z
    return Q @ Z


@pytest.mark.parametrize(("m", "n", "ell"), [(20, 30, 8), (30, 20, 8), (25, 25, 5), (6, 30, 8)])
@pytest.mark.parametrize("h", [0, 1, 2])
@pytest.mark.parametrize("q", [0, 3])
def test_low_rank_costs_what_algorithm_1_multiplies(m, n, ell, h, q):
    """6×30 with ℓ = 8: the sketch keeps its 8 columns, Q has 6."""
    counted = count(algorithm_1, torch.randn(m, n), ell, h, q)
    inner = flops.newton_schulz(min(m, ell), n, q)
    assert flops.low_rank(m, n, ell, h, inner, orth_flops=0) == counted
    assert flops.low_rank(m, n, ell, h, inner) == counted + flops.qr(m, ell)


@pytest.mark.parametrize("h", [0, 0.5, 1, 1.5, 2])
def test_products_of_the_low_rank_map_are_4h_plus_6_times_mnl(h):
    m, n, ell = 40, 60, 10
    products = flops.low_rank(m, n, ell, h, inner_flops=0, orth_flops=0)
    assert products == (4 * h + 6) * m * n * ell


def test_the_papers_worked_example_is_about_forty_times_cheaper():
    d, ell, q, h = 4096, 256, 5, 1
    full = flops.newton_schulz(d, d, q)
    low_rank = flops.low_rank(d, d, ell, h, flops.newton_schulz(ell, d, q))
    assert full / low_rank == pytest.approx(40, rel=0.1)


def test_qr_is_the_papers_formula_in_whole_flops():
    assert flops.qr(768, 210) == 2 * 768 * 210**2 - 2 * 210**3 // 3
    assert flops.qr(10, 3) == 2 * 10 * 9 - 18


def test_kaczmarz_saves_the_dense_product_and_pays_for_norms_and_rescaling():
    m, n, ell = 50, 70, 12
    assert flops.gaussian_sketch(m, n, ell) == 2 * m * n * ell
    assert flops.kaczmarz_sketch(m, n, ell) == 2 * m * n + m * ell


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("formula", [flops.newton_schulz, flops.gram_newton_schulz])
def test_even_degrees_are_refused(formula, degree):
    with pytest.raises(ValueError, match=f"degree={degree}: expected an odd degree ≥ 3"):
        formula(4, 4, 1, degree)


@pytest.mark.parametrize("power", [-1, 0.3])
def test_power_must_be_a_multiple_of_one_half(power):
    with pytest.raises(ValueError, match=f"power={power}: expected 0, ½, 1"):
        flops.low_rank(4, 4, 2, power, 0)


# The ledger


@pytest.mark.parametrize("method", TABLE_2["nanogpt"])
def test_nanogpt_rows_agree_with_table_2_to_every_printed_digit(method):
    assert round(flops.gflops(NANOGPT)[method], 4) == TABLE_2["nanogpt"][method]


@pytest.mark.parametrize("method", list(TABLE_2["cifar10"])[2:])
def test_cifar10_rows_agree_with_table_2(method):
    """Within one unit of the last printed digit, which is 0.0013% or less."""
    assert flops.gflops(CIFAR10)[method] == pytest.approx(TABLE_2["cifar10"][method], abs=1e-4)


@pytest.mark.parametrize("method", ["AdamW", "SGD (Nesterov)"])
def test_cifar10_elementwise_rows_agree_within_their_rounding(method):
    assert round(flops.gflops(CIFAR10)[method], 4) == TABLE_2["cifar10"][method]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_differences_between_rows_agree_with_table_2(workload):
    ours, paper = flops.gflops(workload), TABLE_2[workload.name]
    rounding = 1e-4  # of a difference of two figures with four decimals
    for dear, cheap in [
        ("Muon (Nesterov)", "Muon (Polyak)"),
        ("Rand Muon (Nes.-Gaussian)", "Rand Muon (Polyak)"),
        ("Rand Muon (Nes.-Gaussian)", "Rand Muon (Nes.-Kaczmarz)"),
    ]:
        theirs = paper[dear] - paper[cheap]
        assert ours[dear] - ours[cheap] == pytest.approx(theirs, rel=5e-3, abs=rounding)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_what_distinguishes_the_rows(workload):
    rows = {
        method: {item: round(cost) for item, cost in flops.ledger(workload, method).items()}
        for method in flops.METHODS
    }
    polyak, nesterov = rows["Muon (Polyak)"], rows["Muon (Nesterov)"]
    assert nesterov["momentum"] - polyak["momentum"] == 2 * workload.muon_parameters
    assert polyak | {"momentum": 0} == nesterov | {"momentum": 0}
    gaussian, kaczmarz = rows["Rand Muon (Nes.-Gaussian)"], rows["Rand Muon (Nes.-Kaczmarz)"]
    assert gaussian | {"sketch MΩ": 0} == kaczmarz | {"sketch MΩ": 0}
    assert gaussian["sketch MΩ"] == 2 * workload.width * workload.muon_parameters
    assert polyak["update"] == 2 * workload.muon_parameters
    assert polyak["normalization"] == 3 * workload.muon_parameters


def test_parameter_counts():
    assert CIFAR10.parameters == 1_971_352
    assert NANOGPT.muon_parameters == 80_216_064
    assert NANOGPT.parameters == pytest.approx(518.7e6, rel=1e-4)


def test_the_ledger_of_the_convnet_is_made_from_its_own_shapes():
    with torch.device("meta"):
        model = ConvNet(ConvNetConfig())
    parameters = [p for p in model.parameters() if p.requires_grad]
    filters = [p for p in parameters if p.ndim == 4]
    workload = Workload.from_shapes(
        "cifar10",
        [(p.shape[0], p[0].numel()) for p in filters],
        elementwise=sum(p.numel() for p in parameters if p.ndim < 4),
        rank=128,
        power=2,
        companion=flops.SGD_NESTEROV,
    )
    assert flops.gflops(workload) == flops.gflops(CIFAR10)


def test_a_workload_of_ones_own_has_rows_but_no_paper_figures():
    workload = Workload.from_shapes("mine", [(8, 4)] * 3, elementwise=10, rank=2, oversample=1)
    assert workload.matrices == (((8, 4), 3),)
    assert flops.relative_difference(workload, "AdamW") is None
    assert flops.gflops(workload)["AdamW"] == 12 * (3 * 32 + 10) / 1e9
    assert "| AdamW | 0.0000 |  |  |" in flops.markdown(workload)


def test_settings_reach_the_ledger():
    base = flops.gflops(NANOGPT)
    more_steps = flops.gflops(dataclasses.replace(NANOGPT, steps=8))
    assert more_steps["Muon (Polyak)"] > base["Muon (Polyak)"]
    for change in ({"rank": 400}, {"oversample": 20}, {"power": 2}, {"steps": 8}):
        changed = flops.gflops(dataclasses.replace(NANOGPT, **change))
        assert changed["Rand Muon (Polyak)"] > base["Rand Muon (Polyak)"]
        assert changed["AdamW"] == base["AdamW"]
    often = flops.gflops(dataclasses.replace(NANOGPT, companion_every=1))
    assert often["Muon (Polyak)"] - base["Muon (Polyak)"] == pytest.approx(
        7 * NANOGPT.elementwise / 1e9
    )


def test_a_sketch_wider_than_every_matrix_costs_full_space_and_one_that_is_not_does_not():
    shapes = [(128, 128), (512, 128)]
    full, just_full, sketched = (
        flops.gflops(Workload.from_shapes("w", shapes, elementwise=9, rank=rank, oversample=8))
        for rank in (400, 120, 119)
    )
    assert full == just_full
    for sketch in ("Nes.-Gaussian", "Nes.-Kaczmarz"):
        assert full[f"Rand Muon ({sketch})"] == full["Muon (Nesterov)"]
        assert sketched[f"Rand Muon ({sketch})"] != full[f"Rand Muon ({sketch})"]
    assert full["Rand Muon (Polyak)"] == full["Muon (Polyak)"]
    # One matrix that is sketched is enough for Table 2's convention, which charges all as sketched.
    assert CIFAR10.sketched
    assert CIFAR10.width > 64
    assert "sketch MΩ" in flops.ledger(CIFAR10, "Rand Muon (Polyak)")


def test_unknown_names_are_answered_with_the_known_ones():
    assert [workload_named(name) for name in workload_names()] == [*WORKLOADS, flops.EIGHT_B]
    with pytest.raises(ValueError, match=r"workload 'mnist': expected one of nanogpt, cifar10"):
        workload_named("mnist")
    with pytest.raises(ValueError, match=r"method 'Lion': expected one of 'AdamW'"):
        flops.ledger(NANOGPT, "Lion")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matrices": (((0, 3), 1),)}, "1 of 0×3: expected positive"),
        ({"rank": 0}, "rank=0"),
        ({"oversample": -1}, "oversample=-1"),
        ({"steps": -1}, "steps=-1"),
        ({"power": 0.3}, "power=0.3"),
        ({"companion_every": 0}, "companion_every=0"),
    ],
)
def test_malformed_workloads_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CIFAR10, **change)


PAGE = (Path(__file__).parents[2] / "docs" / "flops.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_the_tables_and_counts_in_the_documentation_are_the_codes(workload):
    assert flops.markdown(workload) in PAGE
    assert f"{workload.elementwise:,.0f}" in PAGE
    assert f"{workload.parameters:,.0f}" in PAGE


def test_the_example_in_the_documentation_runs():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    namespace: dict[str, object] = {}
    exec(example, namespace)
    assert namespace["workload"].muon_parameters == 2 * 4096**2 + 3 * 14336 * 4096
