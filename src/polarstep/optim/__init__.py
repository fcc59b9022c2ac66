"""The optimizer: Muon, AdamW and other rules beside it, and which parameter goes to which."""

from polarstep.optim.elementwise import SGD, AdamW
from polarstep.optim.elementwise_rule import Elementwise
from polarstep.optim.muon import Muon
from polarstep.optim.routing.muon_for import muon_for
from polarstep.optim.transforms import NormalizedRows, Transform

__all__ = ["SGD", "AdamW", "Elementwise", "Muon", "NormalizedRows", "Transform", "muon_for"]
