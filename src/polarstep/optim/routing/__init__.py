"""Which parameter of a model goes to which rule, and why.

* :mod:`~polarstep.optim.routing.anatomy`: the structure of a model, as far as this needs it, made of
  :mod:`~polarstep.optim.routing.node`, with the output :mod:`~polarstep.optim.routing.heads`;
* :mod:`~polarstep.optim.routing.roles`: the role of each parameter, by a list of rules;
* :mod:`~polarstep.optim.routing.fused_weights`, :mod:`~polarstep.optim.routing.orientation` and
  :mod:`~polarstep.optim.routing.adapters`: how a weight is read as matrices, and factors of LoRA;
* :mod:`~polarstep.optim.routing.overrides`: the caller's exceptions;
* :mod:`~polarstep.optim.routing.choices`: all of it as parameter groups;
* :mod:`~polarstep.optim.routing.muon_for`: one optimizer for a whole model;
* :mod:`~polarstep.optim.routing.route`, :mod:`~polarstep.optim.routing.routes` and
  :mod:`~polarstep.optim.routing.route_table`: what was decided, as a row, all rows and text;
* :mod:`~polarstep.optim.routing.following`: new parameters that the model has in place of old ones;
* :mod:`~polarstep.optim.routing.known_model`: what the optimizer knows of the model afterwards.
"""
