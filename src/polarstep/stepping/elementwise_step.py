"""A step of AdamW, SGD or another element-wise rule on the parameters of one group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polarstep.bucket import in_parts
from polarstep.elementwise import SGD, AdamW
from polarstep.elementwise_rule import ELEMENTWISE, Elementwise
from polarstep.ranks.layout import is_sharded, local
from polarstep.rates import as_rule_sees
from polarstep.state import State, is_compensated, momentum_dtype, put_compensated, rounding_error
from polarstep.stepping.collect import Work

__all__ = ["check_buffers", "first_state", "prepare_elementwise", "step_elementwise"]

# Rules that step each parameter as if it were alone. Another rule may look at all gradients it is given.
BY_THEMSELVES = (AdamW.update, SGD.update)
# Entries of the parameters that are stepped at once where some may have to be skipped. A step holds two
# copies of them and of their states meanwhile. A larger parameter is stepped alone, without copies.
MOST_TOGETHER = 2**22


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
    """Update the prepared parameters of ``work``, each unless its gradient is to be skipped.

    A group may have parameters in several precisions; rounding is compensated for those in 16 bits.
    """
    work = replace(work, group=as_rule_sees(work.group))
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
    stepped = [_Stepped(*each) for each in zip(params, grads, states, flags, strict=True)]
    for part in _parts(stepped, together=rule.update in BY_THEMSELVES):
        if len(part) == 1:
            p, grad, of_parameter, finite = part[0]
            rule.update(work.group, [p], [grad], [of_parameter], found_inf=1 - finite.float())
        else:
            _update_or_put_back(work, part)


class _Stepped(NamedTuple):
    """A parameter that is stepped unless it is to be skipped."""

    p: Tensor
    grad: Tensor
    of_parameter: dict[str, Any]
    finite: Tensor


def _parts(stepped: list[_Stepped], *, together: bool) -> Iterator[list[_Stepped]]:
    """Parameters that are stepped at once, in one precision on one device, the smallest first."""
    if not together:
        yield from ([each] for each in stepped)
        return
    alike: dict[tuple[torch.device, torch.dtype], list[_Stepped]] = {}
    for each in sorted(stepped, key=lambda each: each.p.numel()):
        alike.setdefault((each.p.device, each.p.dtype), []).append(each)
    for those in alike.values():
        yield from in_parts(those, lambda each: each.p.numel(), MOST_TOGETHER)


def _update_or_put_back(work: Work, part: list[_Stepped]) -> None:
    """Step all of ``part`` at once; then put back what the skipped ones had before, on the device.

    Launches are for each shape, not for each parameter.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for each in part:
        for X in (each.p, *each.of_parameter.values()):
            alike.setdefault((X.shape, X.dtype, X.device), []).append((X, each.finite))
    changed = [[X for X, _ in pairs] for pairs in alike.values()]
    before = [torch.stack(tensors) for tensors in changed]
    rule = ELEMENTWISE[work.group["algorithm"]]
    states = [each.of_parameter for each in part]
    rule.update(work.group, [each.p for each in part], [each.grad for each in part], states)
    for pairs, tensors, old in zip(alike.values(), changed, before, strict=True):
        finite = torch.stack([flag for _, flag in pairs]).to(old.device)
        finite = finite.view(-1, *[1] * (old.dim() - 1))
        torch._foreach_copy_(tensors, torch.where(finite, torch.stack(tensors), old).unbind())


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
        put_compensated(x, X, R)
    for key, each in kept.items():
        if each is not wide[key]:
            each.copy_(wide[key])
