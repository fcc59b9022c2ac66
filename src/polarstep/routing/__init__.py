"""Which parameter of a model goes to which rule, and why.

* :mod:`~polarstep.routing.anatomy`: the structure of a model, as far as this needs it, made of
  :mod:`~polarstep.routing.node`, with the output :mod:`~polarstep.routing.heads`;
* :mod:`~polarstep.routing.roles`: the role of each parameter, by a list of rules;
* :mod:`~polarstep.routing.fused_weights`, :mod:`~polarstep.routing.orientation` and
  :mod:`~polarstep.routing.adapters`: how a weight is read as matrices, and factors of LoRA;
* :mod:`~polarstep.routing.overrides`: the caller's exceptions;
* :mod:`~polarstep.routing.choices`: all of it as parameter groups;
* :mod:`~polarstep.routing.muon_for`: one optimizer for a whole model;
* :mod:`~polarstep.routing.route`, :mod:`~polarstep.routing.routes` and
  :mod:`~polarstep.routing.route_table`: what was decided, as a row, all rows and text;
* :mod:`~polarstep.routing.following`: new parameters that the model has in place of old ones;
* :mod:`~polarstep.routing.known_model`: what the optimizer knows of the model afterwards.
"""
