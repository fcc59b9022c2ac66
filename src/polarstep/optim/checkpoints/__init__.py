"""How :class:`polarstep.Muon` is saved, loaded and pickled.

checkpoint  state_dict(), load_state_dict() and pickling
plain       options of a group as plain data
content     the form of a checkpoint, checked before anything is read from it
matching    which parameter of a checkpoint is which parameter of the optimizer

A ``state_dict`` names classes of this package without their module. A pickle of an optimizer does not:
it names the classes it holds in ``optim.muon``, ``optim.elementwise``,
``optim.transforms``, ``optim.routing.known_model`` and ``optim.routing.route``, so these modules cannot
move without an alias. Older pickles have a ``Route`` in ``optim.routing.routes``, which imports it.
"""
