"""Element-wise rules: what updates the parameters that are not hidden matrices.

AdamW and SGD are such rules (:mod:`polarstep.elementwise`), and users may write others. A rule is
a class. Its definition enters it into :data:`ELEMENTWISE`, and parameter groups and checkpoints name it
by its ``algorithm``.
"""

from __future__ import annotations

import copy
import inspect
import sys
from abc import ABC, abstractmethod
from dataclasses import MISSING, fields, is_dataclass
from types import GeneratorType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from polarstep.misnamed import check_arguments

__all__ = [
    "ELEMENTWISE",
    "RESERVED",
    "Elementwise",
    "ParameterState",
    "defaults_of",
    "group_of",
    "meant",
    "options_of",
    "shown",
]

ParameterState = dict[str, Any]

# Keys of a group that are not hyperparameters; they would overwrite a rule's field of the same name.
RESERVED = (
    "algorithm",
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

    def __new__(cls, *given: Any, **options: Any) -> Self:
        """Raise if parameters are given, as to an optimizer, or options that the rule does not have."""
        title = cls.__name__
        if any(map(_are_parameters, (*given, *options.values()))):
            torchs = hasattr(torch.optim, title)
            raise TypeError(
                f"{title} got parameters: expected hyperparameters alone, as {title}(lr=1e-3), since it "
                f"is a set of options, for muon_for(model, others={title}(…)) or a group of Muon"
                f"{f'; the optimizer is torch.optim.{title}' if torchs else ''}"
            )
        known = inspect.signature(cls.__init__).parameters
        if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
            check_arguments(title, options, [name for name in known if name != "self"])
        return super().__new__(cls)

    algorithm: ClassVar[str]
    buffers: ClassVar[tuple[str, ...]] = ()
    # The entries of the state that are one number, where a rule cannot go on without them.
    _counters: ClassVar[tuple[str, ...]] = ()

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
        if getattr(found, "__isabstractmethod__", False):
            raise TypeError(
                f"{title} has no {member}: expected "
                f"{member}{inspect.signature(getattr(Elementwise, member))}, a static method"
            )
        if not isinstance(found, staticmethod | classmethod):
            raise TypeError(
                f"{title}.{member} is no static method: expected @staticmethod above it and no self, "
                'since hyperparameters change during a run; update reads them as group["lr"]'
            )
    _check_call(rule)
    ELEMENTWISE[name] = rule


def _check_call(rule: type[Elementwise]) -> None:
    """Raise if ``update`` cannot be called as a step calls it, with and without ``found_inf``."""
    try:
        signature = inspect.signature(rule.update)
    except ValueError:  # compiled code may have none
        return
    tensors: tuple[list[Tensor], ...] = ([], [], [])
    try:
        signature.bind({}, *tensors)
        signature.bind({}, *tensors, found_inf=None)
    except TypeError as reason:
        raise TypeError(
            f"{rule.__name__}.update{signature} cannot be called as a step does ({reason}): expected "
            "update(group, params, grads, states, found_inf=None); found_inf is given with "
            'nonfinite="skip"'
        ) from None


def _is_defined_again(before: type[Any], now: type[Any]) -> bool:
    """Whether ``now`` is the same definition as ``before``, as after a second run of a notebook's cell.

    A script that is also imported by one of its modules is one file under two module names.
    """
    if before is now:
        return True
    modules = before.__module__, now.__module__
    files = [getattr(sys.modules.get(module), "__file__", None) for module in modules]
    same_place = modules[0] == modules[1] or (files[0] is not None and files[0] == files[1])
    return before.__name__ == now.__name__ and same_place


def group_of(rule: Elementwise) -> dict[str, Any]:
    """The hyperparameters of ``rule`` as a parameter group holds them."""
    kind = type(rule)
    known = ELEMENTWISE.get(getattr(kind, "algorithm", ""))
    if known is None or not _is_defined_again(known, kind):
        _enter(kind)
    _check_fields(kind)
    return _as_group(rule)


def defaults_of(rule: type[Any]) -> dict[str, Any]:
    """The defaults of a group that is updated by ``rule``."""
    _check_fields(rule)
    return _as_group(rule())


def _as_group(rule: Any) -> dict[str, Any]:
    options = {name: copy.deepcopy(getattr(rule, name)) for name in options_of(type(rule))}
    return {"algorithm": rule.algorithm, **options}


def _are_parameters(given: object) -> bool:
    """Whether ``given`` is what an optimizer takes: parameters, names with parameters, or groups."""
    if isinstance(given, GeneratorType):
        return True
    first = given[0] if isinstance(given, list | tuple) and given else given
    members = first if isinstance(first, tuple) else (first,)
    return any(
        "params" in each if isinstance(each, dict) else isinstance(each, nn.Parameter)
        for each in members
    )


def options_of(rule: type[Any]) -> tuple[str, ...]:
    """The names of the hyperparameters of ``rule``."""
    if not is_dataclass(rule):
        return ()
    return tuple(each.name for each in fields(rule) if each.init)


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
        if each.name in ("algorithm", "buffers"):
            raise TypeError(
                f"{title}.{each.name} is a field: expected a constant of the class, as "
                f"{each.name} = {each.default!r} without a type, or with ClassVar"
            )
        if each.name in RESERVED:
            raise TypeError(
                f"{title} has a field {each.name!r}, which is a key of every parameter group: expected "
                "another name"
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


def _instead_of(found: object, kind: type[torch.optim.Optimizer]) -> str:
    """The code of the rule that does what torch's optimizer ``found`` does, or its class ``kind``."""
    rule = next((each for each in ELEMENTWISE.values() if each.__name__ == kind.__name__), None)
    if rule is None or not isinstance(found, kind):
        return f"polarstep.{'AdamW' if rule is None else rule.__name__}(lr=1e-3)"
    given = {name: found.defaults[name] for name in options_of(rule) if name in found.defaults}
    return (
        f"polarstep.{rule.__name__}({', '.join(f'{name}={each}' for name, each in given.items())})"
    )


def shown(found: object) -> str:
    """What was given in place of a rule; of an optimizer its class, as its text has many lines."""
    return f"a {type(found).__name__}" if isinstance(found, torch.optim.Optimizer) else repr(found)


def meant(found: object) -> str:
    """A remedy to add to the error if ``found`` was given in place of a rule; empty if there is none."""
    if isinstance(found, type) and issubclass(found, Elementwise):
        return f"; give an instance, as {found.__name__}()"
    kind = found if isinstance(found, type) else type(found)
    if issubclass(kind, torch.optim.Optimizer):
        return f"; an optimizer is no rule, so write {_instead_of(found, kind)}"
    if all(hasattr(kind, name) for name in ("algorithm", "new_state", "update")):
        return f"; derive {kind.__name__} from polarstep.Elementwise"
    return ""
