"""Heavy-tailed gradient noise with known constants."""

from __future__ import annotations

from polarstep.theory.noise.gradient import Attached, GradientNoise, RareCorrection
from polarstep.theory.noise.laws import AlphaStable, Law, SkewedPareto, StudentT, SymmetricPareto

__all__ = [
    "AlphaStable",
    "Attached",
    "GradientNoise",
    "Law",
    "RareCorrection",
    "SkewedPareto",
    "StudentT",
    "SymmetricPareto",
]
