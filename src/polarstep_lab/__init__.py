"""The laboratory of polarstep: the paper's experiments.

A config (:mod:`.config`) comes from a recipe (:mod:`.recipes`) for a method (:mod:`.methods`),
possibly with a setting varied (:mod:`.ablations`). One run is :mod:`.training`, many are
:mod:`.suites`; what they leave is :mod:`.records`, from which :mod:`.report` makes a page.
:mod:`.tune` finds learning rates.
"""
