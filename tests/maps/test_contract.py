"""The promises of ``maps/base.py``, over every solver of the table."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.solvers import SOLVERS, over_solvers
from tests.spectra import SPECTRA, batch, gaussian, matrix, operator_norm, orthogonal

from polarstep import LowRank, NewtonSchulz, rng
from polarstep.maps import MapState, full_space
from polarstep.maps.coefficients import extremes

SHAPES = [
    (1, 1),
    (1, 9),
    (9, 1),
    (8, 8),
    (12, 20),
    (20, 12),
    (3, 12, 20),
    (2, 2, 20, 12),
    (1, 8, 8),
]
EMPTY = [(0, 4), (4, 0), (0, 12, 20), (3, 0, 5)]
SHARP = 1e-9  # agreement in float64, beyond what any solver's conditioning loses


def key():
    return rng.generator("contract")


def alignment(M, T):
    """⟨M, T⟩/‖M‖_*, which is 1 − γ."""
    M, T = M.double(), T.double()
    return (M * T).sum((-2, -1)) / torch.linalg.matrix_norm(M, "nuc")


@over_solvers()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shape_dtype_and_input_are_kept(solver, dtype, untouched_rng):
    for shape in SHAPES + EMPTY:
        M = gaussian(*shape).to(dtype)
        before = M.clone()
        T = solver.map(M, generator=key())
        assert (T.shape, T.dtype, T.device) == (M.shape, M.dtype, M.device)
        assert torch.equal(M, before), shape
        assert T.isfinite().all(), shape
        assert T.numel() == 0 or T.data_ptr() != M.data_ptr(), shape


@over_solvers()
def test_an_equal_generator_gives_an_equal_result(solver):
    M = gaussian(3, 12, 20)
    first, second = (solver.map(M, generator=key()) for _ in range(2))
    assert torch.equal(first, second)
    if solver.random and solver.map.on(12, 20, M.device) is solver.map:
        assert not torch.equal(first, solver.map(M, generator=rng.generator("another")))


@over_solvers()
def test_solvers_are_values(solver):
    for twin in (copy.deepcopy(solver.map), pickle.loads(pickle.dumps(solver.map))):
        assert twin == solver.map
        assert hash(twin) == hash(solver.map)
        assert repr(twin) == repr(solver.map)
    with pytest.raises(AttributeError):
        solver.map.steps = 3
    assert solver.map.flops(12, 20) == solver.map.flops(20, 12) >= 0
    assert solver.map.describe(12, 20)


@over_solvers()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_zero_is_mapped_to_zero_also_beside_others(solver, dtype):
    M = gaussian(3, 12, 20).to(dtype)
    M[1] = 0
    T = solver.map(M, generator=key())
    assert torch.equal(T[1], torch.zeros_like(T[1]))
    assert (operator_norm(T[[0, 2]]) > 0.3).all() or not solver.scale_invariant
    assert not solver.map(torch.zeros(12, 20), generator=key()).any()


@over_solvers(scale_invariant=True)
@pytest.mark.parametrize("spectrum", ["power-law", "one-dominant"])
def test_scale_does_not_matter(solver, spectrum):
    M = batch(spectrum, 2, 12, 20)
    T = solver.map(M, generator=key())
    single = solver.map(M.float(), generator=key())
    scales = (1e-30, 1e-7, 3.0, 1e7, 1e30)
    # In float32 the product scale·M is rounded, unless the scale is a power of two.
    twos = [2.0 ** round(math.log2(scale)) for scale in scales]
    for X, by, expected, tolerance in ((M, scales, T, SHARP), (M.float(), twos, single, 1e-5)):
        scaled = solver.map(torch.cat([scale * X for scale in by]), generator=key())
        for found in scaled.split(len(X)):
            torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@over_solvers()
@pytest.mark.parametrize("shape", [(12, 20), (9, 1), (3, 20, 12)], ids=str)
def test_transpose(solver, shape):
    M = gaussian(*shape)
    T = solver.map(M, generator=key())
    torch.testing.assert_close(solver.map(M.mT, generator=key()), T.mT, atol=SHARP, rtol=0)


@over_solvers(random=False)
def test_transpose_of_a_square_matrix(solver):
    M = gaussian(8, 8)
    torch.testing.assert_close(solver.map(M.mT), solver.map(M).mT, atol=SHARP, rtol=0)


@over_solvers()
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (8, 8)], ids=str)
def test_rotations_pass_through(solver, shape):
    if solver.map.on(*shape, torch.device("cpu")).traits.draws != "never":
        pytest.skip("a sketch is not rotated with the matrix")
    M, U, V = gaussian(*shape), orthogonal(shape[0], 5), orthogonal(shape[1], 6)
    torch.testing.assert_close(solver.map(U @ M @ V), U @ solver.map(M) @ V, atol=SHARP, rtol=0)


@over_solvers()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_batch_is_its_matrices(solver, dtype):
    spectra = ["flat", "power-law", "one-dominant", "zero", "low-rank-and-noise"]
    M = torch.stack([matrix(s, 12, 20, seed=i) for i, s in enumerate(spectra)]).to(dtype)
    together = solver.map(M, generator=key())
    alone = torch.stack([solver.map(each, generator=key()) for each in M])
    tolerance = SHARP if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(together, alone, atol=tolerance, rtol=0)
    nested = solver.map(M[:4].reshape(2, 2, 12, 20), generator=key())
    torch.testing.assert_close(nested.reshape(4, 12, 20), together[:4], atol=tolerance, rtol=0)


@over_solvers()
def test_strides_do_not_matter(solver):
    wide = gaussian(3, 24, 40)
    for M in (wide[:, ::2, ::2], wide.mT[:, :20, :12], wide[0].expand(3, 24, 40)[:, :12, 3:23]):
        T = solver.map(M, generator=key())
        contiguous = solver.map(M.contiguous(), generator=key())
        torch.testing.assert_close(T, contiguous, atol=SHARP, rtol=0)


@pytest.mark.parametrize(
    "polar", [NewtonSchulz(3, "quintic"), LowRank(4, 2, always_sketch=True)], ids=str
)
@pytest.mark.parametrize("form", ["plain", "gram"])
def test_the_result_lies_in_memory_as_the_input_does(polar, form):
    """An update that is transposed in memory takes ten times as long to add."""
    polar = dataclasses.replace(polar, form=form) if isinstance(polar, NewtonSchulz) else polar
    for shape in ((3, 20, 12), (3, 12, 20)):
        assert polar(gaussian(*shape)).is_contiguous()


@over_solvers()
def test_a_nan_stays_in_its_matrix(solver):
    M = gaussian(3, 12, 20)
    clean = solver.map(M, generator=key())
    M[1, 2, 3] = math.nan
    T = solver.map(M, generator=key())
    torch.testing.assert_close(T[[0, 2]], clean[[0, 2]], atol=SHARP, rtol=0)
    assert T[1].isnan().any()


@over_solvers(bounded=True)
@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (48, 48)], ids=str)
def test_norm_is_at_most_one(solver, shape):
    M = torch.cat([batch(spectrum, 2, *shape) for spectrum in SPECTRA]).float()
    norms = operator_norm(solver.map(M, generator=key())).unflatten(0, (len(SPECTRA), 2))
    for spectrum, norm in zip(SPECTRA, norms, strict=True):
        assert (norm <= 1 + 1e-5).all(), spectrum


COHERENT = {
    "ones": lambda m, n, g: torch.ones(m, n),
    "rank one": lambda m, n, g: torch.outer(torch.rand(m, generator=g), torch.rand(n, generator=g)),
    "equal columns": lambda m, n, g: torch.randn(m, 1, generator=g).expand(m, n).contiguous(),
    "rank eight": lambda m, n, g: torch.rand(m, 8, generator=g) @ torch.rand(8, n, generator=g),
    "zero rows": lambda m, n, g: torch.ones(m, n) * (torch.arange(m)[:, None] % 3 == 0),
}


@over_solvers(bounded=True)
@pytest.mark.parametrize("shape", [(96, 384), (384, 96), (160, 160)], ids=str)
def test_norm_is_at_most_one_where_rounding_errors_add_up(solver, shape):
    """In float32 ‖T‖_op ≤ 1 + max(1e-5, max(m, n)·ε)."""
    if not solver.scale_invariant:
        pytest.skip("has a δ below the norm of these matrices")
    M = torch.stack([made(*shape, torch.Generator().manual_seed(0)) for made in COHERENT.values()])
    norms = operator_norm(solver.map(M, generator=key()))
    limit = 1 + max(1e-5, max(shape) * torch.finfo(M.dtype).eps)
    for kind, norm in zip(COHERENT, norms, strict=True):
        assert norm <= limit, kind


SCHEDULES = [
    ("cubic", 5), ("cubic", 7), ("cubic", 8), ("quintic", 5), ("quintic", 7), ("polar-express", 5),
    ("polar-express-sketch", 5), ("polar-express-nanogpt", 9),
]  # fmt: skip
LARGE_ONES = [
    *product([(256, 1024)], SCHEDULES, ["plain", "gram"], ["frobenius", "spectral"]),
    ((768, 3072), ("quintic", 7), "plain", "frobenius"),
    ((768, 3072), ("cubic", 7), "gram", "spectral"),
]


@pytest.mark.usefixtures("no_tiles")
@pytest.mark.parametrize(("shape", "schedule", "form", "delta"), LARGE_ONES, ids=str)
def test_norm_of_ones_is_at_most_that_of_the_polynomial_up_to_rounding(
    shape, schedule, form, delta
):
    """1 + 1.5e-4 and 1 + 3.7e-4 were measured with seven cubic steps in the Gram form, where A = 17."""
    (m, n), (coefficients, steps) = shape, schedule
    polar = NewtonSchulz(steps, coefficients, delta, form=form)
    norm = float(operator_norm(polar(torch.ones(m, n))))
    limit = n * torch.finfo(torch.float32).eps
    if form == "gram":
        start = max(
            [0, *full_space.restarts(polar.polynomials, full_space.rounding(torch.float32))]
        )
        slopes = math.prod(a for a, *_ in polar.polynomials[start:])
        limit = max(limit, slopes / 2 * m * torch.finfo(torch.float32).eps)
    largest, _ = extremes(polar.polynomials)
    assert 0.8 < norm <= largest + limit


SCALES = {
    torch.float32: [2.0**-148, 2.0**-140, 2.0**-120, 2.0**120, 2.0**126],
    torch.float64: [2.0**-1073, 2.0**-1000, 2.0**-540, 2.0**515, 2.0**1022],
    torch.float16: [2.0**-23, 2.0**13],
    torch.bfloat16: [2.0**-130, 2.0**126],
}


@over_solvers(scale_invariant=True)
@pytest.mark.parametrize("dtype", SCALES)
def test_scale_does_not_matter_up_to_the_ends_of_the_range(solver, dtype):
    """Entries are −1, 0 or 1 times the scale, which is exact among denormals too."""
    tolerance = {torch.float64: SHARP, torch.float32: 1e-5}.get(dtype, 2e-2)
    for shape in ((12, 20), (20, 12), (48, 48)):
        M = gaussian(2, *shape).round().clamp(-1, 1).to(dtype)
        T = solver.map(M, generator=key())
        scaled = solver.map(torch.cat([M * scale for scale in SCALES[dtype]]), generator=key())
        for scale, found in zip(SCALES[dtype], scaled.split(len(M)), strict=True):
            assert found.isfinite().all(), (shape, scale)
            torch.testing.assert_close(found, T, atol=tolerance, rtol=0)


@over_solvers(bounded=True)
def test_norm_is_at_most_one_on_real_momentum(solver, momentum):
    for matrices in momentum.values():
        M = matrices / matrices.abs().amax() if not solver.scale_invariant else matrices
        T = solver.map(M[::8], generator=key())
        assert T.isfinite().all()
        assert (operator_norm(T) <= 1 + 1e-5).all()


@over_solvers(bounded=False)
def test_overshooting_sets_stay_near_one(solver, momentum):
    for M in (*momentum.values(), batch("power-law", 2, 12, 20).float()):
        T = solver.map(M[:8], generator=key())
        assert (operator_norm(T) < 1.4).all()


@over_solvers(bounded=True)
@given(data=st.data())
def test_never_longer_than_one_nor_against_the_momentum(solver, data):
    m, n = data.draw(st.integers(1, 16), "m"), data.draw(st.integers(1, 16), "n")
    logs = data.draw(st.lists(st.floats(-8, 0), min_size=min(m, n), max_size=min(m, n)), "log σ")
    sigma = 10.0 ** torch.tensor(sorted(logs, reverse=True), dtype=torch.float64)
    U, V = orthogonal(m, 1, len(sigma)), orthogonal(n, 2, len(sigma))
    M = ((U * sigma) @ V.mT).float()
    T = solver.map(M, generator=key())
    assert operator_norm(T) <= 1 + 1e-5
    assert alignment(M, T) >= -1e-6


@over_solvers(scale_invariant=True)
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_full_alignment_on_what_rank_there_is(solver, rank):
    sigma = torch.linspace(1, 0.5, rank, dtype=torch.float64)
    M = torch.stack(
        [(orthogonal(12, s, rank) * sigma) @ orthogonal(20, s + 9, rank).mT for s in range(3)]
    )
    M[1] = 0  # as zero-initialized projections are, beside the others
    tolerance = 1e-3 if solver.bounded else 0.35
    for scale in (1e-30, 1.0, 1e30):
        X = (M * scale).float()
        T = solver.map(X, generator=key())
        assert T.isfinite().all(), scale
        torch.testing.assert_close(
            alignment(X[[0, 2]], T[[0, 2]]), torch.ones(2).double(), atol=tolerance, rtol=0
        )


@over_solvers(scale_invariant=True)
def test_full_alignment_within_rounding_of_rank_one(solver):
    M = batch("rank-one-within-rounding", 3, 12, 20).float()
    T = solver.map(M, generator=key())
    leading = torch.linalg.svd(M.double())
    along = (leading.U[..., :1].mT @ T.double() @ leading.Vh[..., :1, :].mT).flatten()
    assert ((along - 1).abs() < (1e-4 if solver.bounded else 0.35)).all()


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"shape \(3,\).*M\[None\]"),
        (torch.zeros(3, 3, dtype=torch.int64), TypeError, "torch.int64; cast it"),
        (torch.zeros(3, 3, dtype=torch.complex64), TypeError, "torch.complex64"),
        (torch.zeros(3, 3).to(torch.float8_e4m3fn), TypeError, "16 bits, got torch.float8_e4m3fn"),
        (torch.zeros(3, 3).to_sparse(), TypeError, r"sparse.*to_dense"),
        ([[1.0]], TypeError, "M is a list: expected a tensor"),
    ],
    ids=["vector", "integers", "complex", "eight bits", "sparse", "list"],
)
def test_bad_input(bad, error, message):
    def refuses(solver):
        try:
            solver.map(bad)
        except error as refusal:
            return re.search(message, str(refusal)) is not None
        return False

    assert [solver.name for solver in SOLVERS if not refuses(solver)] == []


@over_solvers()
def test_a_map_without_state_goes_on_from_nothing(solver):
    """A map that carries tensors cannot go on without them; a map that carries none always can."""
    assert solver.map.resumes(MapState(), 12, 20) == (not solver.map.traits.carries)
