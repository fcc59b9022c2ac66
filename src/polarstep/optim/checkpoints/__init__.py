"""How :class:`polarstep.Muon` is saved, loaded and pickled."""
