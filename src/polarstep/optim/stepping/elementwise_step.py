"""A step of AdamW, SGD or another element-wise rule on the parameters of one group."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polarstep.distributed.layout import is_sharded, local
from polarstep.optim.elementwise_rule import ELEMENTWISE, Elementwise
from polarstep.optim.stepping.collect import State, Work, momentum_dtype
from polarstep.optim.stepping.low_precision import is_compensated, put, rounding_error

__all__ = ["check_buffers", "first_state", "prepare_elementwise", "step_elementwise"]


def prepare_elementwise(work: Work, state: State) -> None:
    """Make the states that are missing, and cast buffers that have the wrong precision.

    ``model.to(torch.bfloat16)`` between two steps casts parameters and not their state, and torch's
    rules need both in one precision. The buffers of a float16 parameter must be in float32. Raises if a
    state belongs to another rule.
    """
    if not work.params:
        return
    rule = ELEMENTWISE[work.group["algorithm"]]
    for name, p in zip(work.names, work.params, strict=True):
        of_parameter = state[p]
        if of_parameter:
            check_buffers(name, of_parameter, rule)
        else:
            of_parameter.update(first_state(rule, p))
        kept = momentum_dtype(p.dtype)
        if kept == p.dtype and is_compensated(work.group, p):
            continue  # its step computes in float32 whatever the precision of its state
        for key in rule.buffers:
            if of_parameter[key].dtype != kept:
                of_parameter[key] = of_parameter[key].to(kept)


def first_state(rule: type[Elementwise], p: Tensor) -> dict[str, Any]:
    """The first state of ``p``, with the buffers of a float16 parameter in float32.

    Raises if the rule's ``new_state`` returned something that cannot be stepped, sharded or saved.
    """
    state = rule.new_state(p)
    title = f"new_state of {rule.__name__}"
    if not isinstance(state, dict):
        raise TypeError(f"{title} returned a {type(state).__name__}: expected a dict of tensors")
    for key, X in state.items():
        if not isinstance(X, Tensor):
            raise TypeError(
                f"{title} has {key!r} as a {type(X).__name__}: expected a tensor, as "
                "torch.zeros(()) for a number"
            )
    for key in rule.buffers:
        X = state.get(key)
        if X is None or X.shape != p.shape or is_sharded(X) != is_sharded(p):
            found = "nothing" if X is None else f"a {type(X).__name__} of shape {tuple(X.shape)}"
            raise ValueError(
                f"{title} has {found} for the buffer {key!r}, and the parameter is a "
                f"{type(p).__name__} of shape {tuple(p.shape)}: expected torch.zeros_like(p), or "
                f"{key!r} left out of buffers"
            )
    kept = momentum_dtype(p.dtype)
    if kept == p.dtype:
        return state
    return {key: X.to(kept) if key in rule.buffers else X for key, X in state.items()}


class _InPlace(dict[str, Any]):
    """A parameter's state as ``update`` gets it; raises if an entry is replaced, which would be lost."""

    def __setitem__(self, key: str, value: Any) -> None:
        if self.get(key) is not value:
            raise ValueError(
                f"update puts a new value at {key!r} of a state, which would be lost: expected the "
                f"tensor that new_state made to be changed in place, as state[{key!r}].copy_(value)"
            )


def check_buffers(name: str, of_parameter: dict[str, Any], rule: type[Elementwise]) -> None:
    """Raise if the state of the parameter called ``name`` lacks an entry that ``rule`` needs."""
    for key in (*rule.buffers, *rule._counters):
        if not isinstance(of_parameter.get(key), Tensor):
            found = f"has no {key!r}, only {', '.join(map(repr, of_parameter))}"
            if key in of_parameter:
                found = f"has a {type(of_parameter[key]).__name__} at {key!r}, and no tensor"
            raise ValueError(
                f"the state of {name} {found}: expected {rule.__name__}'s state. "
                "If its group had another rule before, let the parameter start anew, by "
                "optimizer.state.pop(parameter); else the checkpoint is incomplete"
            )
    for key in rule._counters:
        if of_parameter[key].numel() != 1:
            raise ValueError(
                f"{key!r} in the state of {name} has shape {tuple(of_parameter[key].shape)}: expected "
                "one number, as torch.tensor(100.0) after 100 steps; the checkpoint is damaged, or was "
                "edited"
            )


def step_elementwise(work: Work, state: State) -> None:
    """Update the prepared parameters of ``work``, one by one if some may have to be skipped.

    A group may have parameters in several precisions; rounding is compensated for those in 16 bits.
    """
    plain = []
    for index, p in enumerate(work.params):
        if is_compensated(work.group, p) or momentum_dtype(p.dtype) != p.dtype:
            _step_in_float32(work, index, state)
        else:
            plain.append(index)
    if not plain:
        return
    rule = ELEMENTWISE[work.group["algorithm"]]
    params = [local(work.params[i]) for i in plain]
    # A parameter in bfloat16 may have a gradient in float32 (Tensor.grad_dtype).
    grads = [local(work.grads[i]).to(p.dtype) for i, p in zip(plain, params, strict=True)]
    states: list[dict[str, Any]] = [
        _InPlace({k: local(X) for k, X in state[work.params[i]].items()}) for i in plain
    ]
    if work.finite is None:
        rule.update(work.group, params, grads, states)
        return
    flags = [work.finite[i] for i in plain]
    for p, grad, of_parameter, finite in zip(params, grads, states, flags, strict=True):
        rule.update(work.group, [p], [grad], [of_parameter], found_inf=1 - finite.float())


def _step_in_float32(work: Work, index: int, state: State) -> None:
    """Update one 16-bit parameter in float32, as it is compensated or in float16.

    A float16 parameter has its buffers in float32, and rules need both in one precision.
    """
    p, rule = work.params[index], ELEMENTWISE[work.group["algorithm"]]
    X, R = local(p), None
    x = X.float()
    if is_compensated(work.group, p):
        R = local(rounding_error(p, state[p]))
        x = x + R
    kept = {k: local(each) for k, each in state[p].items() if k != "rounding_error"}
    # An entry that is in float32 already is not copied, and changes in place.
    wide = _InPlace({k: each.float() for k, each in kept.items()})
    stop = None if work.finite is None else 1 - work.finite[index].float()
    rule.update(work.group, [x], [local(work.grads[index]).float()], [wide], found_inf=stop)
    if R is None:
        X.copy_(x)
    else:
        put(x, X, R)
    for key, each in kept.items():
        if each is not wide[key]:
            each.copy_(wide[key])
