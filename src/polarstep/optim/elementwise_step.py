"""A step of AdamW, SGD or another element-wise rule on the parameters of one group."""

from __future__ import annotations

from polarstep.distributed.layout import local
from polarstep.optim.collect import State, Work
from polarstep.optim.groups import ELEMENTWISE
from polarstep.optim.low_precision import is_compensated, put, rounding_error

__all__ = ["step_elementwise"]


def step_elementwise(work: Work, state: State) -> None:
    """Update the parameters of ``work``, one by one if some may have to be skipped."""
    if not work.params:
        return
    rule = ELEMENTWISE[work.group["algorithm"]]
    for p in work.params:
        if not state[p]:
            state[p].update(rule.new_state(p))
    if is_compensated(work.group, work.params[0]):
        for index in range(len(work.params)):
            _step_compensated(work, index, state)
        return
    params, grads = ([local(X) for X in each] for each in (work.params, work.grads))
    states = [{k: local(X) for k, X in state[p].items()} for p in work.params]
    if work.finite is None:
        rule.update(work.group, params, grads, states)
        return
    for p, grad, of_parameter, finite in zip(params, grads, states, work.finite, strict=True):
        rule.update(work.group, [p], [grad], [of_parameter], found_inf=1 - finite.float())


def _step_compensated(work: Work, index: int, state: State) -> None:
    """Update one parameter in 16 bits, computed in float32."""
    p, rule = work.params[index], ELEMENTWISE[work.group["algorithm"]]
    R = local(rounding_error(p, state[p]))
    kept = {k: local(X) for k, X in state[p].items() if k != "rounding_error"}
    wide = {k: X.float() for k, X in kept.items()}
    x = local(p).float() + R
    stop = None if work.finite is None else 1 - work.finite[index].float()
    rule.update(work.group, [x], [local(work.grads[index]).float()], [wide], found_inf=stop)
    put(x, local(p), R)
    for key, X in kept.items():
        X.copy_(wide[key])
