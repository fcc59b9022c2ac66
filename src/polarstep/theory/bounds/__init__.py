"""Every bound of the paper as a function: for polar maps, noise, momentum, descent and convergence.

:mod:`~polarstep.theory.bounds.polar_maps` has Propositions 1 and 2 and what a sketch captures,
:mod:`~polarstep.theory.bounds.convergence` the lemmas and theorems on runs of Muon. All bounds of
:mod:`~polarstep.theory.bounds.deflated`, about maps that keep the rest of their sketch, are not in the
paper; nor are :func:`missed_directions`, :func:`sketched_rest_bound` and :func:`initial_bias_bound`.
"""

from __future__ import annotations

from polarstep.theory.bounds.convergence import (
    PAPER_CONSTANT,
    Bound,
    Setting,
    Term,
    batch_noise_bound,
    batch_threshold,
    exact_polar_bound,
    gaussian_row_bound,
    hilbert_constant,
    inexact_polar_bound,
    initial_bias_bound,
    martingale_bound,
    momentum_error,
    momentum_error_bound,
    noise_weights,
    one_step_descent_bound,
    rho,
    scaled_momentum,
    smallest_batch,
    summed_gradient_bound,
    summed_momentum_error_bound,
    universal_bound,
)
from polarstep.theory.bounds.deflated import (
    expected_lifted_gamma,
    ideal_deflated_gamma,
    lifted_nu,
    longest_deflated_step,
)
from polarstep.theory.bounds.polar_maps import (
    RestBound,
    SketchBound,
    captured_energy_bound,
    captured_energy_of_sketch,
    covered_by_proposition_1,
    missed_directions,
    newton_schulz_gamma,
    power_iterations_needed,
    randomized_polar_bound,
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
    "covered_by_proposition_1",
    "exact_polar_bound",
    "expected_lifted_gamma",
    "gaussian_row_bound",
    "hilbert_constant",
    "ideal_deflated_gamma",
    "inexact_polar_bound",
    "initial_bias_bound",
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
    "summed_gradient_bound",
    "summed_momentum_error_bound",
    "universal_bound",
]
