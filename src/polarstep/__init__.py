"""Muon for PyTorch with exact, inexact and randomized polar steps."""

from polarstep import convert
from polarstep.diagnostics.certificate import Certificate, certify
from polarstep.optim import SGD, AdamW, Elementwise, Muon, NormalizedRows, Transform, muon_for
from polarstep.polar import Auto, Deflated, Exact, Finder, LowRank, NewtonSchulz, PolarMap, Warm
from polarstep.sketch import Gaussian, Kaczmarz, Sketch

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdamW",
    "Auto",
    "Certificate",
    "Deflated",
    "Elementwise",
    "Exact",
    "Finder",
    "Gaussian",
    "Kaczmarz",
    "LowRank",
    "Muon",
    "NewtonSchulz",
    "NormalizedRows",
    "PolarMap",
    "Sketch",
    "Transform",
    "Warm",
    "certify",
    "convert",
    "muon_for",
]
