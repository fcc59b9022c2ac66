"""Muon for PyTorch with exact, inexact and randomized polar steps.

muon_for, Muon             one optimizer for a whole model; Muon for given parameters
AdamW, SGD, Elementwise    rules for parameters that are not hidden matrices
NewtonSchulz, Exact        polar maps in full space
LowRank, Deflated          randomized polar maps; Deflated keeps the rest of M, too
Auto                       a map for each shape
Gaussian, Kaczmarz, Warm   how a randomized map finds its subspace
Momentum                   how M is made of G; a base class for rules of your own
NormalizedRows, Transform  changes of the update after the map
routes, check              who updates what, inside any wrapper; what some steps did
qk_clip                    a bound on attention logits, as in Kimi K2
certify, Certificate       how inexact a step was
convert                    checkpoints of other Muon optimizers
PolarMap, Sketch, Finder   base classes for maps, sketches and finders of your own
"""

from polarstep import convert
from polarstep.certificate import Certificate, certify
from polarstep.checkup import check, routes
from polarstep.maps import Auto, Deflated, Exact, Finder, LowRank, NewtonSchulz, PolarMap, Warm
from polarstep.maps.sketches import Gaussian, Kaczmarz, Sketch
from polarstep.momentum import Momentum
from polarstep.optimizer import Muon
from polarstep.others import SGD, AdamW, Elementwise
from polarstep.qk_clip import qk_clip
from polarstep.routing.muon_for import muon_for
from polarstep.transforms import NormalizedRows, Transform

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
    "Momentum",
    "Muon",
    "NewtonSchulz",
    "NormalizedRows",
    "PolarMap",
    "Sketch",
    "Transform",
    "Warm",
    "certify",
    "check",
    "convert",
    "muon_for",
    "qk_clip",
    "routes",
]
