"""The paper's theory as something one runs.

:mod:`~polarstep.theory.bounds` (what the propositions and theorems promise),
:mod:`~polarstep.theory.schedules` (η and β from a horizon and a tail index),
:mod:`~polarstep.theory.annealing` (warm-ups and cool-downs for practice),
:mod:`~polarstep.theory.noise` (heavy-tailed gradient noise with known constants),
:mod:`~polarstep.theory.tail_index` (how heavy the tail of given noise is). Convergence measured
against these predictions is :mod:`polarstep_lab.rates`, since it runs the optimizer.
"""

from __future__ import annotations

from polarstep.theory import annealing, bounds, noise, schedules, tail_index

__all__ = ["annealing", "bounds", "noise", "schedules", "tail_index"]
