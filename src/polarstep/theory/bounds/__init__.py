"""Every bound of the paper as a function: for polar maps, batch noise and convergence.

:func:`kept_basis_gamma`, about a basis that is used for several steps, is not in the paper.
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
from polarstep.theory.bounds.polar import (
    SketchBound,
    captured_energy_bound,
    captured_energy_of_sketch,
    kept_basis_gamma,
    newton_schulz_gamma,
    power_iterations_needed,
    randomized_polar_bound,
)

__all__ = [
    "PAPER_CONSTANT",
    "Bound",
    "Setting",
    "SketchBound",
    "Term",
    "batch_noise_bound",
    "batch_threshold",
    "captured_energy_bound",
    "captured_energy_of_sketch",
    "exact_polar_bound",
    "hilbert_constant",
    "inexact_polar_bound",
    "initial_bias_bound",
    "kept_basis_gamma",
    "newton_schulz_gamma",
    "power_iterations_needed",
    "randomized_polar_bound",
    "rho",
    "smallest_batch",
    "universal_bound",
]
