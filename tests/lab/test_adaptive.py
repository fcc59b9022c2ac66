"""The rules of benchmarks/adaptive.py: budgets are met, and what is chosen captures more."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import polarstep as ps
from polarstep.maps import Carry, Draw
from polarstep_lab.data.corpus import corpus_tokens
from polarstep_lab.storage import read_lines

ROOT = Path(__file__).parents[2]
ROWS, COLUMNS, MEAN = 48, 80, 8


@pytest.fixture(scope="module")
def adaptive() -> ModuleType:
    import adaptive

    return adaptive


def of_decay(decays: list[float], scales: list[float] | None = None) -> Tensor:
    """A batch of matrices with σⱼ ∝ j^−a for the exponents ``decays``, of norm one times ``scales``."""
    g = torch.Generator().manual_seed(0)
    j = torch.arange(1, ROWS + 1)
    found = []
    for decay, scale in zip(decays, scales or [1.0] * len(decays), strict=True):
        U = torch.linalg.qr(torch.randn(ROWS, ROWS, generator=g)).Q
        V = torch.linalg.qr(torch.randn(COLUMNS, ROWS, generator=g)).Q
        values = j**-decay
        found.append(scale * (U * (values / values.norm())) @ V.mT)
    return torch.stack(found)


def low_rank(finder: ps.Finder, width: int) -> ps.LowRank:
    return ps.LowRank(
        width, 0, sketch=finder, inner=ps.NewtonSchulz(4, "quintic"), always_sketch=True
    )


def steps_of(polar: ps.LowRank, batches: list[Tensor]) -> list[tuple[Tensor, Carry]]:
    """T and the carry of one step after the other, each with its own random numbers."""
    carry, found = Carry(), []
    for step, M in enumerate(batches):
        generator = torch.Generator().manual_seed(step)
        numbers = polar.draw(M.shape[-2], M.shape[-1], generator)
        T, carry = polar.step(M, carry, Draw(numbers))
        found.append((T.dense, Carry({name: tensor.clone() for name, tensor in carry.items()})))
    return found


def per_step(carries: list[Carry], column: int) -> Tensor:
    """(steps, batch): what each step added to a column of the sums."""
    sums = torch.stack([carry["told"][:, column] for carry in carries])
    return sums.diff(dim=0, prepend=torch.zeros_like(sums[:1]))


@pytest.mark.parametrize("by", ["equal", "energy", "share"])
def test_the_sum_of_ranks_is_the_budget_at_every_step(adaptive, by):
    g = torch.Generator().manual_seed(1)
    batches = [torch.randn(5, ROWS, COLUMNS, generator=g) ** 3 for _ in range(6)]
    batches[0][2] = 0  # as whole gradients may be at the first step
    finder = adaptive.Chosen(1, by, MEAN, 2)
    found = steps_of(low_rank(finder, 2 * MEAN), batches)
    ranks = per_step([carry for _, carry in found], 1)
    assert torch.equal(ranks.sum(-1), torch.full((6,), 5.0 * MEAN))
    assert ranks.min() >= 2
    assert ranks.max() <= 2 * MEAN
    for (T, _), of_step, M in zip(found, ranks, batches, strict=True):
        seen = torch.linalg.matrix_rank(T, atol=1e-3)
        assert torch.equal(seen, torch.where(M.any(-1).any(-1), of_step, 0).long())
        assert torch.linalg.matrix_norm(T, 2).max() <= 1 + 1e-5


@pytest.mark.parametrize("by", ["energy", "share"])
def test_equal_matrices_have_equal_ranks(adaptive, by):
    M = of_decay([0.7]).expand(6, -1, -1)
    equal, chosen = (
        steps_of(low_rank(adaptive.Chosen(1, rule, MEAN, 2), 2 * MEAN), [M] * 4)
        for rule in ("equal", by)
    )
    for (T, carry), (expected, _) in zip(chosen, equal, strict=True):
        assert torch.equal(carry["told"][:, 1], carry["told"][:, 0] * MEAN)
        assert torch.equal(T, expected)


def test_ranks_are_a_function_of_the_past(adaptive):
    M = of_decay([0.2, 0.5, 0.8, 1.1])
    polar = low_rank(adaptive.Chosen(0, "energy", MEAN, 2), 2 * MEAN)
    once, again = (steps_of(polar, [M, 2 * M, M.mT.contiguous().mT]) for _ in range(2))
    for (T, carry), (same, known) in zip(once, again, strict=True):
        assert torch.equal(T, same)
        assert all(torch.equal(carry[name], known[name]) for name in carry)


@pytest.mark.parametrize(
    ("by", "scales"),
    [("share", [1.0] * 4), ("energy", [1.0, 0.2, 3.0, 0.5])],
    ids=["share", "energy"],
)
def test_unequal_spectra_gain_most_of_what_the_best_ranks_gain(adaptive, by, scales):
    """From the share that sketches have measured, after enough steps for its average."""
    M = of_decay([0.1, 0.4, 0.9, 1.5], scales)
    means = {}
    for rule in ("equal", by):
        found = steps_of(low_rank(adaptive.Chosen(1, rule, MEAN, 2), 2 * MEAN), [M] * 40)
        shares = per_step([carry for _, carry in found], 2)[-10:].mean(0)
        weights = torch.ones(4) if by == "share" else M.square().sum((-2, -1))
        means[rule] = float((shares * weights).sum() / weights.sum())
    possible = adaptive.captured(torch.linalg.svdvals(M), MEAN)
    which = 1 if by == "share" else 0
    gain = possible[f"best for {by}"][which] - possible["equal"][which]
    assert gain > 0.02
    assert means[by] - means["equal"] > 0.7 * gain


def test_the_exponent_is_found_again(adaptive):
    decay = torch.tensor([0.0, 0.013, 0.5, 0.77, 1.3, 2.0])
    ranks = torch.tensor([1, 5, 8, 8, 20, 47])
    law = adaptive.power_law(decay, ROWS)
    share = torch.stack([row[:rank].sum() for row, rank in zip(law, ranks, strict=True)])
    assert torch.allclose(adaptive.fitted(share, ranks, ROWS), decay, atol=2e-3)
    extremes = adaptive.fitted(torch.tensor([0.0, 1.0]), torch.tensor([8, 8]), ROWS)
    assert extremes.tolist() == [0.0, 2.0]


def test_the_largest_values_are_taken(adaptive):
    g = torch.Generator().manual_seed(2)
    values = torch.rand(7, 12, generator=g).sort(-1, descending=True).values
    ranks = adaptive.filled(values, 2, 5)
    taken = torch.arange(12) < ranks[:, None]
    assert ranks.sum() == 35
    assert values[taken & (torch.arange(12) >= 2)].min() >= values[~taken].max()
    assert adaptive.filled(torch.ones(7, 12), 2, 5).tolist() == [5] * 7


def test_equal_ranks_are_a_low_rank_map(adaptive):
    """On the same random numbers: the zero columns of the wider basis change nothing."""
    M = of_decay([0.3, 0.8])
    wide = low_rank(adaptive.Chosen(1, "equal", MEAN, 2), 2 * MEAN)
    numbers = wide.draw(ROWS, COLUMNS, torch.Generator().manual_seed(0))
    plain = ps.LowRank(MEAN, 0, inner=ps.NewtonSchulz(4, "quintic"), always_sketch=True)
    T, _ = wide.step(M, Carry(), Draw(numbers))
    expected, _ = plain.step(M, Carry(), Draw(numbers[:, :MEAN]))
    assert (T.dense - expected.dense).abs().max() < 1e-5


def trained(polar: ps.PolarMap, steps: int = 10) -> list[Tensor]:
    """Parameters after ``steps`` steps on gradients that are a function of the step."""
    params = [torch.nn.Parameter(torch.zeros(ROWS, COLUMNS)) for _ in range(4)]
    optimizer = ps.Muon(params, lr=0.1, polar=polar, seed=3)
    for step in range(steps):
        for i, p in enumerate(params):
            g = torch.Generator().manual_seed(100 * step + i)
            p.grad = torch.randn(ROWS, COLUMNS, generator=g)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("by", ["together", "age", "fall"])
def test_new_bases_meet_the_budget(adaptive, by):
    g = torch.Generator().manual_seed(1)
    batches = [torch.randn(5, ROWS, COLUMNS, generator=g) for _ in range(24)]
    found = steps_of(low_rank(adaptive.Renewed(1, by, 4), MEAN), batches)
    made = per_step([carry for _, carry in found], 3).sum(-1)
    assert torch.equal(made[:4], torch.full((4,), 5.0))  # the first steps all make new bases
    if by == "together":
        assert torch.equal(made[4:], torch.tensor([5.0, 0, 0, 0] * 5))
    else:
        assert set(made[4:].tolist()) == {1.0, 2.0}
    assert made[4:].sum() == 25  # a quarter of 5 matrices × 20 steps


def test_a_basis_is_renewed_where_the_share_has_fallen(adaptive):
    """Of four matrices one turns at every step: it gets the new bases, and more is captured."""
    still, g = of_decay([1.0] * 4), torch.Generator().manual_seed(1)
    batches, M = [], still
    for _ in range(20):
        turn = torch.linalg.qr(torch.eye(ROWS) + 0.1 * torch.randn(ROWS, ROWS, generator=g)).Q
        M = torch.cat([M[:2], (turn @ M[2])[None], M[3:]])
        batches.append(M)
    shares = {}
    for by in ("age", "fall"):
        found = steps_of(low_rank(adaptive.Renewed(1, by, 4), MEAN), batches)
        carries = [carry for _, carry in found]
        made = per_step(carries, 3)[4:].sum(0)
        assert made.sum() == 16
        # A fall shows one step after a new basis: the matrix that turns is due at every second step.
        assert made.tolist() == [4.0] * 4 if by == "age" else made[2] == 8
        shares[by] = float(per_step(carries, 2)[4:].mean())
    assert shares["fall"] > shares["age"] + 0.01


def test_a_small_gpt_trains_with_each_rule(adaptive):
    for polar in (
        adaptive.chosen("energy", 4, 0),
        adaptive.renewed("fall", 4),
        ps.Deflated(adaptive.chosen("share", 4, 1), ps.NewtonSchulz(1, "flat")),
    ):
        loss, optimizer, momenta = adaptive.small_run(polar, 10, 32, 0)
        assert (
            loss < math.log(len(corpus_tokens()[2])) - 0.5
        )  # a uniform guess, less what was learnt
        told = adaptive.measured(optimizer)
        assert [len(of) for of in told["ranks"].values()] == [16, 4, 4]
        assert all(abs(sum(of) - 4 * len(of)) < 0.01 for of in told["ranks"].values())
        assert sorted({step for step, _, _ in momenta}) == [2, 5, 10]


def test_the_summary_comes_from_the_records(adaptive):
    folder = ROOT / "results" / "adaptive"
    made = list(adaptive.table(read_lines(folder / "runs.jsonl")))
    assert (folder / "summary.md").read_text(encoding="utf-8").splitlines() == made


def test_the_table_has_paired_differences_to_the_fixed_setting(adaptive):
    def row(name: str, seed: int, perplexity: float, ranks: list[float]):
        told = {"ranks": {"768x768": ranks}, "shares": {"768x768": [0.5, 0.7]}, "renewals": {}}
        fixed = {"map": name, "seed": seed, "lr": 0.014, "steps": 750}
        return fixed | {"perplexity": perplexity, "ms": 1.0} | told

    rows = [row("rank-energy", s, (100 + s) * (0.99 + 0.01 * s), [300, 116]) for s in range(3)]
    rows += [row("rank-equal", s, 100.0 + s, [208, 208]) for s in range(3)]
    head, _, equal, energy = adaptive.table(rows)
    assert head.count("|") == equal.count("|") == energy.count("|")
    assert "| 100.00, 101.00, 102.00 | – | 0.600 | 1.000 |" in equal
    half = 4.30 / math.sqrt(3)  # Student's t, standard deviation one
    energy = energy.replace("\N{NO-BREAK SPACE}", " ")
    assert f"| +0.00% ± {half:.2f} (n = 3) | 0.600 | 1." in energy
    assert float(energy.split("|")[-2]) > 1  # the inner map costs more for unequal ranks
