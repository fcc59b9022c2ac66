"""The optimizer: Muon, the rules beside it, and who gets which."""

from polarstep.optim.elementwise import SGD, AdamW
from polarstep.optim.muon import Muon
from polarstep.optim.routing import muon_for
from polarstep.optim.transforms import NormalizedRows, Transform

__all__ = ["SGD", "AdamW", "Muon", "NormalizedRows", "Transform", "muon_for"]
