"""Sketches: how the ℓ test vectors of a randomized polar map are chosen."""

from polarstep.sketch.base import Sketch
from polarstep.sketch.gaussian import Gaussian
from polarstep.sketch.kaczmarz import Kaczmarz

__all__ = ["Gaussian", "Kaczmarz", "Sketch"]
