"""How :class:`polarstep.Muon` is saved, loaded and pickled.

checkpoint  state_dict(), load_state_dict() and pickling
plain       options of a group as plain data
unstarted   entries that the state of a parameter does not have yet, for ranks
matching    which parameter of a checkpoint is which parameter of the optimizer
"""
