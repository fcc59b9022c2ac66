"""Every bound of the paper as a function: for polar maps, noise, momentum, descent and convergence.

Some bounds here are not in the paper: :func:`kept_basis_gamma`, about a basis that is used for several
steps, :func:`initial_bias_bound`, and all bounds of :mod:`polarstep.theory.bounds.deflated`,
:mod:`polarstep.theory.bounds.lifted`, :mod:`polarstep.theory.bounds.sketched_rest` and
:mod:`polarstep.theory.bounds.longest_step`, about maps that keep the rest of their sketch.
"""

from __future__ import annotations

from polarstep.theory.bounds.batch_noise import (
    PAPER_CONSTANT,
    batch_noise_bound,
    hilbert_constant,
    initial_bias_bound,
)
from polarstep.theory.bounds.convergence import (
    Bound,
    Setting,
    Term,
    batch_threshold,
    exact_polar_bound,
    inexact_polar_bound,
    rho,
    smallest_batch,
    universal_bound,
)
from polarstep.theory.bounds.deflated import (
    certified_deflated_gamma,
    deflated_nu,
    expected_deflated_gamma,
    expected_deflated_nu,
    ideal_deflated_gamma,
)
from polarstep.theory.bounds.descent import one_step_descent_bound, summed_gradient_bound
from polarstep.theory.bounds.lifted import expected_lifted_gamma, lifted_gamma, lifted_nu
from polarstep.theory.bounds.longest_step import longest_deflated_step, subspace_norm_floor
from polarstep.theory.bounds.martingale import gaussian_row_bound, martingale_bound
from polarstep.theory.bounds.momentum import (
    momentum_error,
    momentum_error_bound,
    noise_weights,
    scaled_momentum,
    summed_momentum_error_bound,
)
from polarstep.theory.bounds.polar import (
    SketchBound,
    captured_energy_bound,
    captured_energy_of_sketch,
    covered_by_proposition_1,
    kept_basis_gamma,
    newton_schulz_gamma,
    power_iterations_needed,
    randomized_polar_bound,
)
from polarstep.theory.bounds.sketched_rest import (
    RestBound,
    missed_directions,
    sketched_rest_bound,
)

__all__ = [
    "PAPER_CONSTANT",
    "Bound",
    "RestBound",
    "Setting",
    "SketchBound",
    "Term",
    "batch_noise_bound",
    "batch_threshold",
    "captured_energy_bound",
    "captured_energy_of_sketch",
    "certified_deflated_gamma",
    "covered_by_proposition_1",
    "deflated_nu",
    "exact_polar_bound",
    "expected_deflated_gamma",
    "expected_deflated_nu",
    "expected_lifted_gamma",
    "gaussian_row_bound",
    "hilbert_constant",
    "ideal_deflated_gamma",
    "inexact_polar_bound",
    "initial_bias_bound",
    "kept_basis_gamma",
    "lifted_gamma",
    "lifted_nu",
    "longest_deflated_step",
    "martingale_bound",
    "missed_directions",
    "momentum_error",
    "momentum_error_bound",
    "newton_schulz_gamma",
    "noise_weights",
    "one_step_descent_bound",
    "power_iterations_needed",
    "randomized_polar_bound",
    "rho",
    "scaled_momentum",
    "sketched_rest_bound",
    "smallest_batch",
    "subspace_norm_floor",
    "summed_gradient_bound",
    "summed_momentum_error_bound",
    "universal_bound",
]
