"""Checkpoints of other Muon optimizers, as states of :class:`polarstep.Muon`.

:func:`options` reads the hyperparameters of a checkpoint, :func:`state_dict` its momentum::

    theirs = torch.load("checkpoint.pt")["optimizer"]
    optimizer = ps.Muon(params, **ps.convert.options(theirs))
    optimizer.load_state_dict(ps.convert.state_dict(theirs, optimizer))

Where the algorithms agree, the run goes on as it would have. ``docs/coming-from.md`` lists differences.

polarstep keeps the sum C ← βC + G. Some of the others keep an average, B ← βB + (1 − β)G, and then C is
B/(1 − β). T(B) = T(C), but the next gradients must be added in C's units.
"""

from polarstep.convert.formats import FORMATS, Format, options
from polarstep.convert.states import state_dict

__all__ = ["FORMATS", "Format", "options", "state_dict"]
