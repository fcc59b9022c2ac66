"""Polar maps: exact, by polynomial iterations, and randomized."""

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
