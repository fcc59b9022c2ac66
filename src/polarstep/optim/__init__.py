"""The optimizer: Muon, the rules beside it, and who gets which."""

from polarstep.optim.elementwise import SGD, AdamW
from polarstep.optim.muon import Muon

__all__ = ["SGD", "AdamW", "Muon"]
