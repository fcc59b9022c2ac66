"""The optimizer: Muon, the rules beside it, and which parameter goes to which rule.

To read it from the top:

muon          the optimizer: its options, its step, its state
stepping/     what a step works with; polarstep.muon is equation (1)
over_ranks    the same step where other ranks have parts of the parameters (polarstep.distributed);
              alike has what these ranks must agree on
groups        what a parameter group holds: its parameters, their names, how they are read as matrices
options       the options of a group, and every check of them. Some have a file: scaling (lr_scale),
              transforms (transform), elementwise_rule and elementwise (AdamW, SGD)
given, flattened, misnamed
              what callers give: parameters, those that FSDP1 has cut, options under other names
rates         the learning rate of a group: lr, which all groups share, times the group's lr_factor
added, names  groups added during a run: the rule of each parameter, and names
routing/      muon_for: the rule of each parameter of a model
guards/       misuse that a step must notice: it raises or warns
checkpoints/  saving, loading and pickling

Imports go one way: routing.muon_for → muon → checkpoints, over_ranks → guards → the rest of routing →
the upper half of polarstep.distributed → stepping → options → groups → the files of single options →
the lower half of polarstep.distributed.
"""

from polarstep.optim.elementwise import SGD, AdamW
from polarstep.optim.elementwise_rule import Elementwise
from polarstep.optim.muon import Muon
from polarstep.optim.routing.muon_for import muon_for
from polarstep.optim.transforms import NormalizedRows, Transform

__all__ = ["SGD", "AdamW", "Elementwise", "Muon", "NormalizedRows", "Transform", "muon_for"]
