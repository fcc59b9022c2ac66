"""The cheap certificate where the basis Q is in 16 bits, as on a GPU: QᵀQ = I to two digits."""

from __future__ import annotations

import math

import pytest
import torch
from tests.spectra import SPECTRA, batch, gaussian, operator_norm, orthogonal

import polarstep as ps
from polarstep.certificate import certify, cheap_certificate
from polarstep.certificate import cheap as cheap_bounds
from polarstep.maps.base import Factors, Lift
from polarstep.maps.full_space import schatten_norm
from polarstep.ops import ops_of

BFLOAT16 = 2.0**-7


def nuclear(X):
    return torch.linalg.svdvals(X.double()).sum(-1)


def polar_factor(B):
    U, _, Vh = torch.linalg.svd(B, full_matrices=False)
    return U @ Vh


def factors_of(M, Q, padding=0):
    """T = Q·polar(QᵀM) for a wide M, with columns beyond ℓ that belong to no basis."""
    B = Q.to(M.dtype).mT @ M
    columns = torch.cat([Q, torch.full_like(Q[..., :padding], 7)], -1)
    return Factors(columns, B, Lift(polar_factor(B)), Q.shape[-1], orthonormal=True)


def rounded(m, width, batch=1):
    """Orthonormal columns, rounded to bfloat16."""
    Q = torch.stack([orthogonal(m, seed, width) for seed in range(batch)])
    return Q.bfloat16()


def norm_by_powers(H):
    return schatten_norm(H, cheap_bounds.SQUARINGS).square().flatten()


@pytest.mark.parametrize("scale", [1e-10, 1.0])
@pytest.mark.parametrize("d", [1, 2, 12, 100])
def test_powers_bound_the_norm_of_symmetric_matrices(d, scale):
    """‖H¹⁶‖_F^(1/16) = (Σλ³²)^(1/32) for eigenvalues of either sign: at most d^(1/32) times ‖H‖_op."""
    Q = torch.stack([orthogonal(d, seed) for seed in range(3)])
    eigenvalues = torch.stack(
        [torch.ones(d), torch.linspace(-1, 0.5, d), 0.9 ** torch.arange(d)]
    ).double()
    H = (Q * eigenvalues[:, None]) @ Q.mT * scale
    exact = scale * torch.linalg.vector_norm(eigenvalues, ord=32, dim=-1)
    torch.testing.assert_close(norm_by_powers(H), exact, rtol=1e-12, atol=0)
    in_float32 = norm_by_powers(H.float()).double()
    torch.testing.assert_close(in_float32, exact, rtol=1e-4, atol=0)
    # Equal eigenvalues are those for which it is farthest above ‖H‖_op.
    assert exact[0] == pytest.approx(d ** (1 / 32) * scale)


def test_powers_of_zero_are_zero_beside_other_matrices():
    H = torch.stack([torch.zeros(5, 5), torch.diag(torch.tensor([0.0, 0.0, -2.0, 0.0, 0.0]))])
    assert norm_by_powers(H).tolist() == [0, pytest.approx(2)]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("m", "width"), [(12, 4), (96, 32), (512, 96)])
def test_the_norm_of_a_rounded_basis_is_bounded_closely(m, width, padding):
    Q = rounded(m, width, batch=3)
    Q[1, :, 1] = 0  # a direction that M does not have
    basis = cheap_bounds._basis(factors_of(gaussian(3, m, m).float(), Q, padding), BFLOAT16)
    assert (operator_norm(Q) <= basis.norm + 1e-6).all()
    E = Q.double().mT @ Q.double() - torch.eye(width)
    torch.testing.assert_close(basis.error.double(), E, rtol=0, atol=1e-6)
    # λ = (1 + √(1 + 4f))/2 ≤ 1 + f, where f is what powers tell of ‖F‖_op.
    f = width ** (1 / 32) * operator_norm(E + E @ E)
    assert (basis.norm <= (1 + f).sqrt() + 1e-6).all()


@pytest.mark.parametrize("stretch", [0.75, 1.0, 1.25, 1.5])
def test_the_norm_of_a_basis_of_one_length(stretch):
    """QᵀQ = c²I, so that λ = c² and ‖F¹⁶‖_F^(1/16) = ℓ^(1/32)·|λ² − λ|."""
    lam, width = stretch**2, 4
    Q = stretch * torch.eye(9, width)[None]
    found = cheap_bounds._basis(factors_of(gaussian(1, 9, 9).float(), Q), BFLOAT16)
    bounded = (1 + math.sqrt(1 + 4 * width ** (1 / 32) * abs(lam**2 - lam))) / 2
    assert found.norm.item() == pytest.approx(math.sqrt(bounded), rel=1e-6)
    assert found.norm.item() >= stretch
    torch.testing.assert_close(found.error, (lam - 1) * torch.eye(width)[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_basis_of_more_than_16_bits_is_not_looked_at(dtype):
    factors = factors_of(gaussian(1, 9, 9).to(dtype), orthogonal(9, 0, 4)[None].to(dtype))
    assert cheap_bounds._basis(factors, torch.finfo(dtype).eps) is None


def bound_on_nuclear_norm(M, Q):
    factors = factors_of(M, Q)
    basis = cheap_bounds._basis(factors, BFLOAT16)
    alignment = (factors.B * factors.Z).sum((-2, -1))
    norm = torch.linalg.matrix_norm(M)
    d0 = min(M.shape[-2:])
    return cheap_bounds._by_factors(
        factors, basis, factors.B, alignment, ps.Exact(), d0, norm, BFLOAT16
    ).double()


@pytest.mark.parametrize("stretch", [0.8, 1.0, 1.25])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_what_a_rounded_basis_captured_bounds_the_nuclear_norm(spectrum, stretch):
    """‖M‖_* ≤ ‖Q‖_op·‖B‖_* + √d₀·‖M − QB‖_F for any Q."""
    M = batch(spectrum, 3, 12, 20).float()
    Q = (stretch * rounded(12, 4, batch=3)).bfloat16()
    found = bound_on_nuclear_norm(M, Q)
    assert (nuclear(M) <= found + 1e-6).all()
    B = Q.double().mT @ M.double()
    rest = M.double() - Q.double() @ B
    norm = torch.linalg.matrix_norm(M.double())
    room = math.sqrt(BFLOAT16 / 64) * norm
    largest = cheap_bounds._basis(factors_of(M, Q), BFLOAT16).norm.double()
    formula = largest * nuclear(B) + math.sqrt(12) * torch.linalg.matrix_norm(rest)
    assert (formula <= found + 1e-6).all()
    assert (found <= formula + math.sqrt(12) * room + 1e-6).all()


@pytest.mark.parametrize("spectrum", sorted({*SPECTRA} - {"zero"}))
@pytest.mark.parametrize("stretch", [1.0, 1.125])
def test_the_certificate_of_a_step_with_a_rounded_basis(spectrum, stretch, monkeypatch):
    """It bounds γ and ν of T = QZ, though the map has ‖Z‖_op = 1 and T has ‖Q‖_op."""
    monkeypatch.setattr(
        type(ops_of(torch.device("cpu"))), "dtype", lambda self, given: torch.bfloat16
    )
    M = batch(spectrum, 3, 24, 40).float()
    U = torch.linalg.svd(M).U[..., :10]  # the leading directions
    Q = (stretch * U).bfloat16()
    factors = factors_of(M, Q)
    T = Q.float() @ factors.Z
    polar = ps.LowRank(8, 2, inner=ps.Exact(), always_sketch=True)
    found, exact = cheap_certificate(M, T, polar, factors), certify(M, T)
    assert (exact.gamma <= found.gamma).all()
    assert (exact.nu <= found.nu).all()
    assert (found.nu <= (stretch - 1) + 2.0**-6 + 0.03).all()
