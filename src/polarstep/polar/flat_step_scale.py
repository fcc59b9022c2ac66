"""The scale s with which a deflated map begins its polynomial steps: T = p(s·X₀).

The steps need XXᵀ for X = X₀ in any case (:mod:`polarstep.polar.deflated`), and its norm λ is estimated
from p products with 16 columns (:meth:`polarstep.products.Products.scale_to_one`): five up to 1024 rows,
seven from there on (:func:`polarstep.products.start_vectors.norm_products`). s = 1/(margin·√λ) then
brings ‖s·X₀‖_op to one. A leading direction that the head has missed makes λ large and the whole step
small.

**How far below ‖X₀‖²_op can λ be?** Let κ be the part of a vector v₀ that lies in the leading
eigenspace of G = X₀X₀ᵀ, and let all other eigenvalues be y times the first, which is the worst case for
a given κ by Jensen's inequality. Then λ²/‖G‖²_op = (κ + (1−κ)y²ᵖ)/(κ + (1−κ)y²ᵖ⁻²). κ = 6/m and the
worst y give √λ ≥ 0.86‖X₀‖_op for m = 768, 0.85 for m = 4096 and 0.82 for m = 16384
(:func:`norm_floor`). With MARGIN_OF_SCALE, ‖s·X₀‖_op ≤ 1.14. :func:`tolerant_scale` makes s smaller for
polynomials that explode soon after that: ‖T‖_op ≤ 2.6.

For a leading direction that is independent of the 16 vectors, the best of them has κ ≥ 6/m for a fifth
of all directions, 4/m for half of them and 1.3/m for 99%. ``"flat"`` stays below 2.6 up to 1.2, which
covers these 99%: ‖T‖_op ≤ 2.4 for m = 768 and 2.3 for m = 4096, on the very worst y, and ≤ 3.7 and 2.5
for all but one direction in a million (:func:`polarstep.theory.bounds.longest_deflated_step`). Five
products for m = 4096 would allow for 5.2 and 106. The vectors' entries have no pattern, so that sums and
differences of rows are seen as well as other directions. A leading singular direction that was made
orthogonal to all 16 vectors is not seen: ‖T‖_op was 4000 for such a matrix, whose new direction was 1.5
times as long as all others.
"""

from __future__ import annotations

import torch

from polarstep.polar.coefficients import Polynomial, evaluate
from polarstep.torch_compile import constant

__all__ = [
    "MARGIN_OF_SCALE",
    "TOLERATED_NORM",
    "TOLERATED_VALUE",
    "norm_floor",
    "tolerant_scale",
]

# Polynomial steps are applied to X₀/(this·√λ).
MARGIN_OF_SCALE = 1.08
# What ‖s·X₀‖_op may be, with room for rounding, where the estimate is at its worst, and ‖T‖_op then.
TOLERATED_VALUE = 1.17
TOLERATED_NORM = 2.6


def norm_floor(kappa: float, products: int) -> float:
    """The least √λ/‖X₀‖_op for a start v₀ with a part ``kappa`` in the leading eigenspace of X₀X₀ᵀ.

    >>> [round(norm_floor(6 / m, p), 2) for m, p in ((256, 5), (4096, 5), (4096, 7))]
    [0.89, 0.8, 0.85]
    """
    y, p = torch.linspace(0, 1, 100_001, dtype=torch.float64, device="cpu"), products
    seen = (kappa + (1 - kappa) * y ** (2 * p)) / (kappa + (1 - kappa) * y ** (2 * p - 2))
    return float(seen.min()) ** 0.25


# Not functools.cache, which torch.compile looks through, and warns of.
_SCALES: dict[tuple[Polynomial, ...], float] = {}


@constant
def tolerant_scale(polynomials: tuple[Polynomial, ...]) -> float:
    """The largest factor c ≤ 1 with |p(c·x)| ≤ 2.6 for all x ≤ 1.17.

    1 for ``"flat"`` and the paper's polynomials. Minimax polynomials without a safety factor explode
    soon after one: two steps made for [0.1, 1] have c = 0.88.
    """
    if polynomials not in _SCALES:
        if len(_SCALES) >= 256:
            _SCALES.clear()
        x = torch.arange(0, 2, 2.0**-14, dtype=torch.float64, device="cpu")
        highest = evaluate(polynomials, x).abs().cummax(0).values
        _SCALES[polynomials] = min(1.0, float(x[highest <= TOLERATED_NORM].max()) / TOLERATED_VALUE)
    return _SCALES[polynomials]
