"""The paper's theory as functions.

:mod:`~polarstep.theory.bounds` (the right-hand sides of the propositions and theorems),
:mod:`~polarstep.theory.schedules` (η and β from a horizon and a tail index),
:mod:`~polarstep.theory.annealing` (warm-up and cool-down curves for practice),
:mod:`~polarstep.theory.noise` (heavy-tailed gradient noise with known constants),
:mod:`~polarstep.theory.tail_index` (estimates of the tail index of given noise).
:mod:`polarstep_lab.checks.convergence` measures convergence and compares it with the bounds.
"""

from __future__ import annotations

from polarstep.theory import annealing, bounds, noise, schedules, tail_index

__all__ = ["annealing", "bounds", "noise", "schedules", "tail_index"]
