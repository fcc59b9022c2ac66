"""The optimizer: Muon, the rules beside it, and who gets which."""

from polarstep.optim.elementwise import SGD, AdamW
from polarstep.optim.muon import Muon
from polarstep.optim.routing import muon_for

__all__ = ["SGD", "AdamW", "Muon", "muon_for"]
