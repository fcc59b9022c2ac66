"""Polar maps: exact, by polynomial iterations, and randomized.

To read it from the top:

base          what a polar map promises, what its step is given and returns; checks: of users' maps
full_space    polynomial iterations, on M or on its Gram matrix, and the SVD; coefficients has the
              polynomials
low_rank      Algorithms 1 and 2: sketches has Ω, and subspace finds the basis Q
deflated      a low-rank head and the rest that it leaves
auto          the map for each shape, by the rows from which on a sketch pays
"""

from polarstep.maps.auto import Auto
from polarstep.maps.base import Draw, MapState, Polar, PolarMap, Traits, wide
from polarstep.maps.coefficients import polar_express
from polarstep.maps.deflated import Deflated
from polarstep.maps.full_space import Exact, NewtonSchulz
from polarstep.maps.low_rank import LowRank
from polarstep.maps.subspace import Finder, Warm

__all__ = [
    "Auto",
    "Deflated",
    "Draw",
    "Exact",
    "Finder",
    "LowRank",
    "MapState",
    "NewtonSchulz",
    "Polar",
    "PolarMap",
    "Traits",
    "Warm",
    "polar_express",
    "wide",
]
