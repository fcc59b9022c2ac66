"""AdamW, SGD and rules of your own, for the parameters that are not hidden matrices.

A rule is a class (:class:`Elementwise`). Its definition enters it into :data:`ELEMENTWISE`, and
parameter groups and checkpoints name it by its ``algorithm``. AdamW and SGD are such rules. Their
arithmetic is torch's own (``torch.optim.adamw.adamw``, ``torch.optim.sgd.sgd``, fused where the device
has it), with torch's names for the state, so that a checkpoint looks like one of ``torch.optim.AdamW``.
One thing differs: the state of a float16 parameter is kept in float32
(:func:`polarstep.state.momentum_dtype`).

:func:`prepare_elementwise` and :func:`step_elementwise` take the step of the parameters of one group.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from polarstep.bucket import in_parts
from polarstep.checked_values import (
    check_arguments,
    check_at_least_zero,
    check_bool,
    check_fraction,
    is_number,
)
from polarstep.gradients import Work
from polarstep.groups import Group
from polarstep.ranks.layout import is_sharded, local
from polarstep.rates import as_rule_sees, in_proportion
from polarstep.state import State, is_compensated, momentum_dtype, put_compensated, rounding_error

__all__ = [
    "ELEMENTWISE",
    "RESERVED",
    "SGD",
    "AdamW",
    "Elementwise",
    "ParameterState",
    "beside",
    "check_buffers",
    "counter_device",
    "defaults_of",
    "first_state",
    "group_of",
    "no_rule",
    "options_of",
    "prepare_elementwise",
    "step_elementwise",
]

ParameterState = dict[str, Any]

# Keys of a group that are not hyperparameters; they would overwrite a rule's field of the same name.
RESERVED = (
    "algorithm",
    "buffers",
    "initial_lr",
    "lr_factor",
    "name",
    "nonfinite",
    "param_names",
    "params",
    "plan",
    "role",
    "rounding",
    "use_muon",
)
WITHOUT_DECAY = "0 is without weight decay"


class Elementwise(ABC):
    """A rule for parameters that are not hidden matrices. Subclasses are frozen dataclasses.

    The fields are the hyperparameters, each with a default, and ``lr`` must be among them. They become
    the options of a parameter group and may change there between steps, so :meth:`update` reads them
    from the group. There ``lr`` is the rate of this group: that of the optimizer times ``lr_factor``
    (:mod:`polarstep.rates`). With ``lr: float | None = None`` a rule leaves its rate to
    :func:`polarstep.muon_for`. ``__post_init__`` may check the fields: it runs whenever a group is
    checked.

    ``algorithm`` is the name of the rule in groups and checkpoints. ``buffers`` names the entries of the
    state that have the shape of the parameter. They are kept in the parameter's precision, or in float32
    if that is float16, and :meth:`update` gets parameters, gradients and buffers in one precision.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Descent(Elementwise):
    ...     lr: float = 0.1
    ...     algorithm = "descent"
    ...
    ...     @staticmethod
    ...     def new_state(p):
    ...         return {}
    ...
    ...     @staticmethod
    ...     def update(group, params, grads, states, found_inf=None):
    ...         for p, grad in zip(params, grads, strict=True):
    ...             step = group["lr"] * grad
    ...             p.sub_(step if found_inf is None else step.where(found_inf == 0, 0.0))
    >>> group_of(Descent(lr=0.5))
    {'algorithm': 'descent', 'lr': 0.5}
    """

    algorithm: ClassVar[str]
    buffers: ClassVar[tuple[str, ...]] = ()
    # The entries of the state that are one number, where a rule cannot go on without them.
    _counters: ClassVar[tuple[str, ...]] = ()

    def __new__(cls, *given: Any, **options: Any) -> Self:
        """Raise for parameters, as an optimizer takes, and for options that the rule does not have."""
        first = given[0] if given else options.get("lr")
        if first is not None and not isinstance(first, Real | str):
            raise TypeError(
                f"{cls.__name__} got a {type(first).__name__} as its lr: expected a number, as "
                f"{cls.__name__}(lr=1e-3). It is a set of options, for muon_for(model, "
                f"others={cls.__name__}(…)) or a group of Muon, and takes no parameters; an lr in a "
                'tensor goes into the group, as group["lr"] = lr'
            )
        known = inspect.signature(cls.__init__).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            check_arguments(cls.__name__, options, [name for name in known if name != "self"])
        return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        """Enter a class with an ``algorithm`` of its own into :data:`ELEMENTWISE`."""
        super().__init_subclass__(**options)
        if "algorithm" in vars(cls):
            _enter(cls)

    @staticmethod
    @abstractmethod
    def new_state(p: Tensor) -> ParameterState:
        """The state that ``p`` starts with: tensors by name; buffers as ``torch.zeros_like(p)``."""

    @staticmethod
    @abstractmethod
    def update(
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[ParameterState],
        found_inf: Tensor | None = None,
    ) -> None:
        """Change ``params`` and the tensors in ``states`` in place, by one step.

        Of a sharded parameter they hold this rank's part. ``found_inf``, a number in a tensor, is given
        with ``nonfinite="skip"``: if it is one, nothing may change.
        """


# The rules by their name in group["algorithm"].
ELEMENTWISE: dict[str, type[Elementwise]] = {}


def _enter(rule: type[Elementwise]) -> None:
    """Enter ``rule`` into :data:`ELEMENTWISE`; a class that is defined again replaces the older one."""
    title, name = rule.__name__, getattr(rule, "algorithm", None)
    own = f"as algorithm = {title.lower()!r}"
    if not isinstance(name, str) or not name:
        raise TypeError(
            f"{title} has algorithm={name!r}: expected its name in groups and checkpoints, {own}"
        )
    known = ELEMENTWISE.get(name)
    if name == "muon" or (known is not None and not _is_defined_again(known, rule)):
        owner = "Muon" if known is None else f"{known.__module__}.{known.__qualname__}"
        raise ValueError(
            f"{title} has algorithm={name!r}, which is the name of {owner}: expected a name that no "
            f"other rule has, {own}"
        )
    if isinstance(rule.buffers, str) or not all(isinstance(each, str) for each in rule.buffers):
        raise TypeError(
            f"{title} has buffers={rule.buffers!r}: expected a tuple of names in the state, "
            'as ("momentum_buffer",)'
        )
    for member in ("new_state", "update"):
        found = inspect.getattr_static(rule, member)
        missing = getattr(found, "__isabstractmethod__", False)
        if missing or not isinstance(found, staticmethod | classmethod):
            arguments = ", ".join(inspect.signature(getattr(Elementwise, member)).parameters)
            raise TypeError(
                f"{title} has no static method {member}: expected {member}({arguments}) under "
                "@staticmethod, without self: hyperparameters change during a run, so update reads them "
                'as group["lr"]'
            )
    ELEMENTWISE[name] = rule


def _is_defined_again(before: type[Any], now: type[Any]) -> bool:
    """Whether ``now`` is the same definition as ``before``, as after a cell ran twice."""
    return (before.__module__, before.__name__) == (now.__module__, now.__name__)


def group_of(rule: Elementwise) -> dict[str, Any]:
    """The hyperparameters of ``rule`` as a parameter group holds them."""
    kind = type(rule)
    known = ELEMENTWISE.get(getattr(kind, "algorithm", ""))
    if known is None or not _is_defined_again(known, kind):
        _enter(kind)
    _check_fields(kind)
    return _as_group(rule)


def beside(rule: Elementwise, lr: float | Tensor, factor: float | None) -> Group:
    """The options of a group that ``rule`` updates in an optimizer whose learning rate is ``lr``.

    ``factor`` is for a rule without a rate of its own; ``None`` if it is still to be measured.

    >>> from polarstep import SGD
    >>> beside(SGD(lr=0.1), 0.02, None)["lr_factor"]
    5.0
    """
    options = group_of(rule)
    if options["lr"] is None:
        return options | {"lr": lr, "lr_factor": factor}
    return in_proportion(options, lr, f"{type(rule).__name__}(lr={options['lr']:g})")


def defaults_of(rule: type[Any]) -> dict[str, Any]:
    """The defaults of a group that is updated by ``rule``."""
    _check_fields(rule)
    return _as_group(rule())


def options_of(rule: type[Any]) -> tuple[str, ...]:
    """The names of the hyperparameters of ``rule``."""
    if not is_dataclass(rule):
        return ()
    return tuple(each.name for each in fields(rule) if each.init)


def _as_group(rule: Any) -> dict[str, Any]:
    options = {name: copy.deepcopy(getattr(rule, name)) for name in options_of(type(rule))}
    return {"algorithm": rule.algorithm, **options}


def _check_fields(rule: type[Any]) -> None:
    """Raise if the fields of ``rule`` cannot be options of a group.

    This is checked at the first use: ``@dataclass`` adds the fields after the class is defined.
    """
    title = rule.__name__
    if not is_dataclass(rule):
        raise TypeError(
            f"{title} is no dataclass: expected @dataclass(frozen=True) above the class"
        )
    for each in fields(rule):
        if each.name in RESERVED:
            raise TypeError(
                f"{title} has a field {each.name!r}, which is a key of every parameter group: expected "
                "another name; algorithm and buffers are constants, without a type"
            )
        if each.init and each.default is MISSING and each.default_factory is MISSING:
            raise TypeError(
                f"{title}.{each.name} has no default: expected a default for every hyperparameter, as "
                f"{each.name}: float = 0.1, for groups that do not give it"
            )
    if "lr" not in options_of(rule):
        raise TypeError(
            f"{title} has no field lr: expected lr: float = 1e-3, which schedulers change"
        )


def no_rule(option: str, given: object, otherwise: str = "") -> TypeError:
    """The error for ``given``, which is no rule, in the place of one; ``otherwise`` is a remedy."""
    kind = given if isinstance(given, type) else type(given)
    told, remedy = repr(given), otherwise
    if isinstance(given, torch.optim.Optimizer):
        told = f"a {kind.__name__}"  # its text has many lines
        options = ", ".join(
            f"{name}={given.defaults[name]}"
            for name in options_of(AdamW)
            if name in given.defaults and kind is torch.optim.AdamW
        )
        remedy = f"; an optimizer is no rule, so write polarstep.AdamW({options or 'lr=1e-3'})"
    elif given is kind and issubclass(kind, torch.optim.Optimizer):
        remedy = "; an optimizer is no rule, so write polarstep.AdamW(lr=1e-3)"
    elif given is kind and issubclass(kind, Elementwise):
        remedy = f"; give an instance, as {kind.__name__}()"
    return TypeError(
        f"{option}{told}: expected polarstep.AdamW(...), polarstep.SGD(...) or another "
        f"polarstep.Elementwise{remedy}"
    )


@dataclass(frozen=True)
class AdamW(Elementwise):
    """AdamW (Loshchilov and Hutter 2019) for the parameters that are not Muon's.

    This is a set of options, which :func:`polarstep.muon_for` takes, as ``others=AdamW(lr=1e-3)``. The
    step is torch's own, fused where the device has a fused step.

    Args:
        lr: the learning rate. By default :func:`polarstep.muon_for` finds it from its own ``lr`` and
            from the size of the entries (:mod:`polarstep.rates`); a group of a plain
            :class:`polarstep.Muon` gives its own.
        betas: β₁ and β₂, in [0, 1). torch's default is (0.9, 0.999), with which rows of an embedding
            that are rarely met move seven times as far.
        eps: ε, added to the root of the second moment.
        weight_decay: decoupled weight decay. torch's default is 0.01.
    """

    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0

    algorithm: ClassVar[str] = "adamw"
    buffers: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    _counters: ClassVar[tuple[str, ...]] = ("step",)

    def __post_init__(self) -> None:
        if self.lr is not None:
            check_at_least_zero("lr", self.lr, "without it, muon_for finds one")
        check_at_least_zero("eps", self.eps, "1e-8 is the default")
        check_at_least_zero("weight_decay", self.weight_decay, WITHOUT_DECAY)
        form = "expected two numbers in [0, 1), as (0.9, 0.95)"
        if not isinstance(self.betas, Sequence) or not all(map(is_number, self.betas)):
            raise TypeError(f"betas={self.betas!r}: {form}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: {form}")

    @staticmethod
    def new_state(p: Tensor) -> ParameterState:
        """The state that ``torch.optim.AdamW`` starts with, fused where the device has a fused step."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=counter_device(p)),
            "exp_avg": torch.zeros_like(p, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(p, memory_format=torch.preserve_format),
        }

    @staticmethod
    def update(
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[ParameterState],
        found_inf: Tensor | None = None,
    ) -> None:
        """One step of every parameter, or no step at all if ``found_inf`` is one."""
        fused = _has_fused(params[0])
        if found_inf is not None and not fused:  # only the fused rule knows found_inf
            if bool(found_inf):
                return
            found_inf = None
        beta1, beta2 = group["betas"]
        # OneCycleLR and CyclicLR would cycle β₁ of torch's own AdamW. An optimizer with a default
        # "momentum" gets that key cycled in every group, beside a key "base_momentum". A group without
        # "base_momentum" keeps its β₁: a loop may have written Muon's momentum to all groups.
        if "base_momentum" in group:
            beta1 = group.get("momentum", beta1)
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        with _side_by_side(params, grads, means, squares) as (p, g, m, v):
            adamw(
                p,
                g,
                m,
                v,
                [],
                [state["step"] for state in states],
                fused=fused,
                found_inf=found_inf,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


@dataclass(frozen=True)
class SGD(Elementwise):
    """SGD with momentum for the parameters that are not Muon's.

    This is a set of options, which :func:`polarstep.muon_for` takes, as ``others=SGD(lr=0.1)``. The step
    is torch's own, fused where the device has a fused step.

    Args:
        lr: the learning rate.
        momentum: β in [0, 1).
        nesterov: Nesterov or Polyak momentum; must be ``False`` if ``momentum`` is zero.
        weight_decay: λ; as in torch, λX is added to the gradient.
    """

    lr: float = 1e-2
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0

    algorithm: ClassVar[str] = "sgd"
    buffers: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    def __post_init__(self) -> None:
        check_at_least_zero("lr", self.lr, "1e-2 is the default")
        check_at_least_zero("weight_decay", self.weight_decay, WITHOUT_DECAY)
        check_bool("nesterov", self.nesterov, "False is Polyak's momentum")
        check_fraction("momentum", self.momentum, "0.9 is the default")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov=True needs momentum > 0; set nesterov=False for plain SGD")

    @staticmethod
    def new_state(p: Tensor) -> ParameterState:
        """A buffer of zeros. The first step is torch's, which starts without a buffer."""
        return {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format)}

    @staticmethod
    def update(
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[ParameterState],
        found_inf: Tensor | None = None,
    ) -> None:
        """One step of every parameter, or no step at all if ``found_inf`` is one."""
        # On a CPU torch's fused SGD leaves most 16-bit parameters as they are, and writes something else
        # than the momentum to their buffers (torch 2.13; pytorch/pytorch#191763).
        in_16_bits = any(p.device.type == "cpu" and p.dtype.itemsize < 4 for p in params)
        fused = _has_fused(params[0]) and not in_16_bits
        if found_inf is not None and not fused:  # only the fused rule knows found_inf
            if bool(found_inf):
                return
            found_inf = None
        buffers = [state["momentum_buffer"] for state in states]
        with _side_by_side(params, grads, buffers) as (p, g, m):
            sgd(
                p,
                g,
                m,  # type: ignore[arg-type]  # list[Tensor | None] to torch
                fused=fused,
                found_inf=found_inf,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=group["nesterov"],
                maximize=False,
            )


@contextmanager
def _side_by_side(
    params: list[Tensor], grads: list[Tensor], *states: list[Tensor]
) -> Iterator[list[list[Tensor]]]:
    """The tensors as torch's fused rules need them: the k-th numbers in memory belong together.

    The rules walk through memory and do not look at strides. A parameter may have gaps in memory, or a
    gradient in another order: a CPU would then update the wrong entries, and a GPU refuses. Such a
    parameter is updated in a contiguous copy.
    """
    aligned = [list(params), list(grads), *map(list, states)]
    copied = []
    for i, p in enumerate(params):
        beside = [each[i] for each in aligned]
        if all(X.is_contiguous() for X in beside):
            continue
        without_gaps = torch.empty_like(p, device="meta").stride()
        if any(X.stride() != without_gaps for X in beside):
            copied.append(i)
            for each in aligned:
                each[i] = each[i].contiguous()
    yield aligned
    for i in copied:
        for written, held in zip((params, *states), (aligned[0], *aligned[2:]), strict=True):
            if held[i] is not written[i]:
                written[i].copy_(held[i])


def counter_device(p: Tensor) -> torch.device:
    """Where AdamW's counter of steps lies: with ``p`` for a fused step, else on the CPU, as in torch.

    A step that is not fused reads the counter; on a GPU that would wait for the device.
    """
    return p.device if _has_fused(p) else torch.device("cpu")


def _has_fused(p: Tensor) -> bool:
    return p.device.type in ("cpu", "cuda")


# Rules that step each parameter as if it were alone. Another rule may look at all gradients it is given.
BY_THEMSELVES = (AdamW.update, SGD.update)
# Entries of the parameters that are stepped at once where some may have to be skipped: a step holds two
# copies of them and of their states. A parameter that is stepped alone needs no copies.
MOST_TOGETHER = 2**22


class _Stepped(NamedTuple):
    """A parameter that is stepped unless its gradient is not finite, which a flag on the device says."""

    p: Tensor
    grad: Tensor
    of_parameter: ParameterState
    finite: Tensor


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
    stepped = list(map(_Stepped, params, grads, states, flags))
    for part in _parts(stepped, together=rule.update in BY_THEMSELVES):
        if len(part) == 1:
            p, grad, of_parameter, finite = part[0]
            rule.update(work.group, [p], [grad], [of_parameter], found_inf=1 - finite.float())
        else:
            _update_or_put_back(rule, work.group, part)


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


def _update_or_put_back(rule: type[Elementwise], group: Group, stepped: list[_Stepped]) -> None:
    """Step parameters at once, then put back on the device what the skipped ones had before.

    Launches are for each shape, not for each parameter.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for p, _, of_parameter, finite in stepped:
        for X in (p, *of_parameter.values()):
            alike.setdefault((X.shape, X.dtype, X.device), []).append((X, finite))
    before = [torch.stack([X for X, _ in pairs]) for pairs in alike.values()]
    params, grads, states, _ = map(list, zip(*stepped, strict=True))
    rule.update(group, params, grads, states)
    for pairs, old in zip(alike.values(), before, strict=True):
        tensors = [X for X, _ in pairs]
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
