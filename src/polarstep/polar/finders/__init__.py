"""Range finders: how a low-rank map finds the basis Q that it works in."""

from polarstep.polar.finders.base import Basis, Finder
from polarstep.polar.finders.fresh import Fresh
from polarstep.polar.finders.warm import Warm

__all__ = ["Basis", "Finder", "Fresh", "Warm"]
