"""Polynomial steps in a matrix's own memory are those with more memory."""

from __future__ import annotations

import pytest
import torch
from tests.spectra import gaussian

from polarstep.polar.coefficients import resolve
from polarstep.products.base import Products
from polarstep.products.in_place import iterate_in_place

SEQUENCES = {
    "cubic": resolve("cubic", 3),
    "quintic": resolve("quintic", 2),
    "mixed": ((1.5, -0.5), (2.0, -1.5, 0.5), (35 / 16, -35 / 16, 21 / 16, -5 / 16)),
}
# A single strip of 192 rows, several of them, columns that are no multiple of a part's.
SHAPES = [(1, 5), (20, 33), (192, 200), (193, 200), (400, 2100)]


@pytest.mark.parametrize(("m", "n"), SHAPES)
@pytest.mark.parametrize("polynomials", SEQUENCES.values(), ids=SEQUENCES.keys())
def test_the_steps_are_those_with_more_memory(m, n, polynomials):
    X = gaussian(m, n)
    X /= torch.linalg.matrix_norm(X)
    expected = Products().iterate(X[None], polynomials)[0]
    address = X.data_ptr()
    assert iterate_in_place(X, polynomials) is None
    assert X.data_ptr() == address
    torch.testing.assert_close(X, expected, atol=1e-12, rtol=0)


def test_the_matrix_may_be_a_part_of_another():
    whole = gaussian(30, 60) / 60
    before = whole.clone()
    expected = Products().iterate(whole[None, 5:25, 10:50], SEQUENCES["cubic"])[0]
    iterate_in_place(whole[5:25, 10:50], SEQUENCES["cubic"])
    torch.testing.assert_close(whole[5:25, 10:50], expected)
    whole[5:25, 10:50] = before[5:25, 10:50]
    assert torch.equal(whole, before)
