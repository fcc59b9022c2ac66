"""A basis that several steps work in."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.captures import as_if_captured
from tests.resuming import gone_on_beside
from tests.spectra import gaussian, with_singular_values
from torch import nn

import polarstep as ps

KEPT = ps.LowRank(5, 2, power=0, inner=ps.Exact(), always_sketch=True, keep=3)
SHAPES = [(12, 20), (20, 12), (2, 12, 16), (14, 14)]
NEW_BASIS = [True, True, True, True, False, False, True, False, False, True]  # step by step


def parameters():
    return [nn.Parameter(gaussian(*shape, seed=i)) for i, shape in enumerate(SHAPES)]


def set_gradients(params, step):
    for i, p in enumerate(params):
        p.grad = gaussian(*p.shape, seed=10 * step + i)


def started(steps=0, polar=KEPT, **options):
    params = parameters()
    optimizer = ps.Muon(params, lr=0.1, polar=polar, seed=3, **options)
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return params, optimizer


def bases(optimizer, params, steps):
    """Q of every matrix at each of ``steps``, and what was made with it."""
    seen = []
    handle = optimizer.register_polar_hook(lambda bucket: seen[-1].append(bucket))
    for step in steps:
        seen.append([])
        set_gradients(params, step)
        optimizer.step()
    handle.remove()
    return seen


def test_a_basis_serves_its_steps_and_no_more():
    params, optimizer = started()
    seen = bases(optimizer, params, range(len(NEW_BASIS)))
    for before, now, new in zip(seen, seen[1:], NEW_BASIS[1:], strict=False):
        for old, bucket in zip(before, now, strict=True):
            assert torch.equal(old.factors.Q, bucket.factors.Q) != new


def test_t_is_the_polar_factor_within_the_basis():
    params, optimizer = started()
    for step in bases(optimizer, params, range(6)):
        for bucket in step:
            wide = bucket.M.shape[-2] <= bucket.M.shape[-1]
            M, T = (X if wide else X.mT for X in (bucket.M, bucket.T))
            Q = bucket.factors.Q
            identity = torch.eye(Q.shape[-1], dtype=Q.dtype)
            assert torch.allclose(Q.mT @ Q, identity.expand_as(Q.mT @ Q), atol=1e-12)
            assert torch.allclose(T, Q @ ps.Exact()(Q.mT @ M), atol=1e-10)
            assert torch.linalg.matrix_norm(T, 2).max() <= 1 + 1e-12


def test_for_one_step_it_is_the_map_as_it_was():
    one, _ = started(5, replace(KEPT, keep=1))
    without, _ = started(5, ps.LowRank(5, 2, power=0, inner=ps.Exact(), always_sketch=True))
    kept, _ = started(5)
    assert all(map(torch.equal, one, without))
    assert not any(map(torch.equal, one, kept))


def test_the_plain_map_makes_its_own():
    M = gaussian(3, 12, 20)
    assert torch.equal(KEPT(M), replace(KEPT, keep=1)(M))


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_run_resumes_within_a_basis(steps):
    params, optimizer = started(steps)
    options = {"lr": 0.1, "polar": KEPT, "seed": 3}
    copies = gone_on_beside(
        params, optimizer, lambda these: these, set_gradients, range(steps, steps + 5), **options
    )
    assert all(map(torch.equal, params, copies))


def test_another_rank_takes_another_basis_at_once():
    params, optimizer = started(4)  # the next step would keep it
    optimizer.param_groups[0]["polar"] = replace(KEPT, rank=6)
    (step,) = bases(optimizer, params, [4])
    assert all(bucket.factors.Q.shape[-1] == 8 for bucket in step)
    assert optimizer.state[params[0]]["kept"].shape == (1, 8, 12)


def test_a_map_that_keeps_nothing_leaves_nothing():
    params, optimizer = started(4, replace(KEPT, keep=1))
    assert all("kept" not in optimizer.state[p] for p in params)


def test_a_parameter_that_is_skipped_keeps_its_basis():
    params, optimizer = started(6, nonfinite="skip")
    before = copy.deepcopy([optimizer.state[p]["kept"] for p in params])
    set_gradients(params, 6)  # a new one for all others
    params[0].grad[0, 0] = float("nan")
    optimizer.step()
    same = [
        torch.equal(old, optimizer.state[p]["kept"]) for p, old in zip(params, before, strict=True)
    ]
    assert same == [True, False, False, False]


def test_what_was_zero_at_first_has_a_basis_as_soon_as_it_is_not():
    params, optimizer = started()
    for step in range(3):
        set_gradients(params, step)
        if step == 0:
            params[0].grad.zero_()
        before = params[0].detach().clone()
        optimizer.step()
        assert torch.equal(params[0], before) == (step == 0)


def test_blocks_of_a_parameter_have_a_basis_each():
    p = nn.Parameter(gaussian(36, 20))
    optimizer = ps.Muon([{"params": [p], "split_sizes": (12, 24)}], lr=0.1, polar=KEPT)
    for step in range(4):
        p.grad = gaussian(36, 20, seed=step)
        optimizer.step()
    state = optimizer.state[p]
    assert state["kept"].shape == (1, 7, 12)
    assert state["kept.1"].shape == (1, 7, 20)


def test_a_graph_of_somebodys_own_has_new_bases_at_every_replay():
    params, optimizer = started(4)
    kept = optimizer.state[params[0]]["kept"]
    before = kept.clone()
    set_gradients(params, 4)
    with as_if_captured():
        optimizer.step()
    assert optimizer.state[params[0]]["kept"] is kept
    assert not torch.equal(kept, before)


def test_what_it_gives_up_where_m_moves_slowly():
    """A tenth of M is new at every step; the basis is at most two steps old."""
    sigma = torch.arange(1, 41, dtype=torch.float64) ** -1.0
    still = with_singular_values(sigma, 40, 60, 0)
    p = nn.Parameter(torch.zeros(40, 60, dtype=torch.float64))
    polar = ps.LowRank(12, 4, inner=ps.Exact(), always_sketch=True, keep=3)
    optimizer = ps.Muon([p], lr=0.1, momentum=0.0, polar=polar)
    gammas = []
    optimizer.register_polar_hook(
        lambda bucket: gammas.append(float(ps.certify(bucket.M, bucket.T).gamma))
    )
    for step in range(9):
        p.grad = 0.9 * still + 0.1 * with_singular_values(sigma, 40, 60, 1 + step)
        optimizer.step()
    assert max(gammas[3:]) <= max(gammas[:3]) + 0.03


def test_its_flops_are_those_of_a_cycle_in_equal_parts():
    m, n, ell = 40, 60, 16
    one = ps.LowRank(12, 4, inner=ps.NewtonSchulz(7, "quintic"))
    four = replace(one, keep=4)
    basis = 3 * 2 * m * n * ell + ps.flops.qr(m, ell)  # h = 1: three products with M
    assert one.flops(m, n) - four.flops(m, n) == pytest.approx(0.75 * basis, abs=3)


def test_the_routes_tell():
    _, optimizer = started()
    assert "basis kept 3 steps" in str(optimizer.routes)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"keep": 0}, ValueError, r"keep=0: expected an integer ≥ 1"),
        ({"keep": 2.5}, TypeError, r"keep=2.5: expected an integer ≥ 1"),
        ({"keep": 2, "sketch": ps.Warm()}, ValueError, r"keep=2 with Warm\(\): expected 1"),
    ],
)
def test_what_cannot_be_kept(options, error, message):
    with pytest.raises(error, match=message):
        ps.LowRank(5, 2, **options)
