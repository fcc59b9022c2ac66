"""Which parameter of a model goes to which rule, and why.

* :mod:`~polarstep.routing.names`: what models call things, as tables;
* :mod:`~polarstep.routing.anatomy`: the structure of a model, with its output heads;
* :mod:`~polarstep.routing.matrices`: how a weight is read as matrices;
* :mod:`~polarstep.routing.per_head`: projections of attention cut into heads;
* :mod:`~polarstep.routing.roles`: the role of each parameter, by a list of rules, and LoRA's factors;
* :mod:`~polarstep.routing.choices`: roles and the caller's exceptions as parameter groups;
* :mod:`~polarstep.routing.muon_for`: one optimizer for a whole model;
* :mod:`~polarstep.routing.routes`: the table of what was decided.
"""
