"""The module in which pickles from before release 0.1 look for :class:`polarstep.Warm`."""

from polarstep.polar.finders.warm import Warm

__all__ = ["Warm"]
