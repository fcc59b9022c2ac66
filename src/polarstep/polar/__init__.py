"""Polar maps: exact, by polynomial iterations, and randomized."""

from polarstep.polar.base import PolarMap
from polarstep.polar.exact import Exact
from polarstep.polar.low_rank import LowRank
from polarstep.polar.newton_schulz import NewtonSchulz

__all__ = ["Exact", "LowRank", "NewtonSchulz", "PolarMap"]
