"""How :class:`polarstep.Muon` is saved, loaded and pickled.

checkpoint  state_dict(), load_state_dict() and pickling
plain       options of a group as plain data
content     the form of a checkpoint, checked before anything is read from it
matching    which parameter of a checkpoint is which parameter of the optimizer
"""
