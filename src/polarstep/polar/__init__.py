"""Polar maps: exact, by polynomial iterations, and randomized.

To read it from the top:

base           what a polar map promises; result is what its step returns, and checks are for maps that
               users write
exact          the SVD
newton_schulz  polynomial iterations: coefficients and minimax have the polynomials, gram and small other
               ways to apply them
low_rank       Algorithms 1 and 2: finders/ find the basis Q, and orthonormal makes its columns so
deflated       a low-rank head and the rest that it leaves: rest_norm has δ, and flat_step_scale has s
auto           the map for each shape, by the rows from which on a sketch pays
containing     what all maps with another map inside have in common
"""

from polarstep.polar.auto import Auto
from polarstep.polar.base import Carry, Draw, PolarMap
from polarstep.polar.deflated import Deflated
from polarstep.polar.exact import Exact
from polarstep.polar.finders import Finder, Warm
from polarstep.polar.low_rank import LowRank
from polarstep.polar.minimax import polar_express
from polarstep.polar.newton_schulz import NewtonSchulz
from polarstep.polar.result import Polar

__all__ = [
    "Auto",
    "Carry",
    "Deflated",
    "Draw",
    "Exact",
    "Finder",
    "LowRank",
    "NewtonSchulz",
    "Polar",
    "PolarMap",
    "Warm",
    "polar_express",
]
