"""Which parameter of a model goes to which rule, and why.

* :mod:`~polarstep.routing.names`: what models call things, as tables;
* :mod:`~polarstep.routing.anatomy`: the structure of a model, with its output heads;
* :mod:`~polarstep.routing.weights`: how a weight is read as matrices, and factors of LoRA;
* :mod:`~polarstep.routing.heads`: projections of attention cut into heads;
* :mod:`~polarstep.routing.roles`: the role of each parameter, by a list of rules;
* :mod:`~polarstep.routing.choices`: roles and the caller's exceptions as parameter groups;
* :mod:`~polarstep.routing.muon_for`: one optimizer for a whole model;
* :mod:`~polarstep.routing.origin`: what that optimizer keeps of the call;
* :mod:`~polarstep.routing.routes`: the table of what was decided.
"""
