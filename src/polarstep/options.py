"""The options of parameter groups: the keys of each algorithm, their defaults and accepted values.

A group is checked when it is made, loaded, or found changed by a step, before anything else happens.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from polarstep.checked_values import (
    MEANINGLESS,
    REMEDIES,
    check_at_least_zero,
    check_bool,
    check_fraction,
    check_integer,
    check_one_of,
    is_integer,
    is_number,
)
from polarstep.groups import COUNTED, Group, Nonfinite, Rounding
from polarstep.maps import Auto, PolarMap
from polarstep.matrix import Layout
from polarstep.momentum import Momentum
from polarstep.others import ELEMENTWISE, RESERVED, WITHOUT_DECAY, defaults_of, options_of
from polarstep.ranks.plans import check_plan
from polarstep.rates import resolve_scale
from polarstep.transforms import Transform

__all__ = [
    "check_and_normalize",
    "check_lr",
    "check_new_options",
    "complete",
    "defaults_for",
    "known_options",
]

# The precisions in which momentum can be kept; None is the parameter's own.
MOMENTA = (None, torch.float32, torch.bfloat16, torch.int8)
# A scheduler that multiplies and adds its way to zero may end a rounding error below it: torch's
# LinearLR(end_factor=0) at −3.7e-19. That counts as zero.
ROUNDING = 1e-12
# The rate of a group whose rule leaves it to muon_for, where the group was not made by muon_for.
ALONE = 3e-4

# How each option of a Muon group is checked, and the remedy in the error.
Check = Callable[[str, Any, str], None]
OF_MUON: dict[str, tuple[Check, str]] = {
    "momentum": (check_fraction, "the paper's schedule for K=10,000 gives 0.99"),
    "weight_decay": (check_at_least_zero, WITHOUT_DECAY),
    "lr_factor": (check_at_least_zero, "1 leaves lr as it is"),
    "nesterov": (check_bool, "False is Polyak's momentum"),
    "fused": (check_bool, "False is without the fused kernels"),
    "split_repeats": (
        lambda option, value, remedy: check_integer(option, value, 1, remedy),
        "it says how often the parts come in turn, as the number of heads; 1 is for parts in one piece",
    ),
}
# What an option may be, and the remedy in the error.
CHOICES: dict[str, tuple[tuple[Any, ...], str]] = {
    "layout": (get_args(Layout), ""),
    "momentum_dtype": (MOMENTA, "None keeps momentum in the precision of the parameter"),
}
CHOICES_OF_ALL: dict[str, tuple[tuple[Any, ...], str]] = {
    "nonfinite": (get_args(Nonfinite), ""),
    "rounding": (get_args(Rounding), ""),
}


def complete(group: Group, muon_defaults: Group) -> Group:
    """``group`` with its algorithm's defaults filled in and every value checked."""
    group = {"algorithm": "muon"} | group
    defaults = defaults_for(group["algorithm"], muon_defaults)
    _check_keys(group, muon_defaults)
    group = defaults | group
    check_new_options(group)
    return group


def defaults_for(algorithm: str, muon_defaults: Group) -> Group:
    """The defaults of a group with ``algorithm``."""
    if algorithm == "muon":
        return muon_defaults
    _check_algorithm(algorithm)
    common = {option: muon_defaults[option] for option in CHOICES_OF_ALL}
    defaults = defaults_of(ELEMENTWISE[algorithm])
    if defaults["lr"] is None:
        defaults["lr"] = ALONE
    return defaults | common | {"lr_factor": 1.0}


def known_options(algorithm: str, muon_defaults: Group) -> set[str]:
    """The names of the options that a group with ``algorithm`` has."""
    return set(defaults_for(algorithm, muon_defaults))


def check_new_options(group: Group) -> None:
    """:func:`check_and_normalize`, with the value of an lr in a tensor, and sizes of parts as tuples."""
    check_and_normalize(group)
    check_lr(float(group["lr"]))
    for option in ("split_sizes", "split_columns"):
        if group.get(option) is not None:
            group[option] = tuple(group[option])


def check_and_normalize(group: Group) -> None:
    """Raise a ``ValueError`` or ``TypeError`` for the first bad or missing option of a group.

    An ``lr`` a rounding error below zero, and ``polar="auto"``, are rewritten to what a step reads.
    """
    try:
        _check_and_normalize(group)
    except KeyError as missing:
        raise ValueError(
            f"a group with algorithm={group.get('algorithm')!r} has no {missing}: expected all options "
            "of its rule, which add_param_group fills in; to give a group another rule, also give it "
            "that rule's options, as polarstep.AdamW() has them"
        ) from None


def _check_and_normalize(group: Group) -> None:
    algorithm = group["algorithm"]
    _check_algorithm(algorithm)
    check_lr(group["lr"])
    if not isinstance(group["lr"], Tensor) and -ROUNDING <= group["lr"] < 0:
        group["lr"] = 0.0
    for option, (choices, remedy) in CHOICES_OF_ALL.items():
        check_one_of(option, group[option], choices, remedy)
    if group.get("plan") is not None:
        check_plan(group["plan"])
    if algorithm == "muon":
        _check_and_normalize_muon(group)
    else:
        if group["lr_factor"] is not None:  # None is still to be measured
            check_at_least_zero("lr_factor", group["lr_factor"], "1 leaves lr as it is")
        # A rule checks its options when it is built. lr is left out: in a group it may be a tensor.
        build: Callable[..., Any] = ELEMENTWISE[algorithm]
        own = options_of(ELEMENTWISE[algorithm])
        build(**{option: group[option] for option in own if option != "lr"})
    if algorithm in ("muon", "adamw"):
        _check_decay(group)


def _check_and_normalize_muon(group: Group) -> None:
    for option, (check, remedy) in OF_MUON.items():
        check(option, group[option], remedy)
    for option, (choices, remedy) in CHOICES.items():
        check_one_of(option, group[option], choices, remedy)
    if group["polar"] == "auto":
        group["polar"] = Auto()
    if not isinstance(group["polar"], PolarMap):
        _refuse_polar(group["polar"])
    transform = group["transform"]
    if transform is not None and not isinstance(transform, Transform):
        raise TypeError(
            f"transform={transform!r}: expected None or a transform such as polarstep.NormalizedRows()"
        )
    if not isinstance(group["momentum_rule"], Momentum):
        raise TypeError(
            f"momentum_rule={group['momentum_rule']!r}: expected a rule such as polarstep.Momentum(), "
            "which is equation (1)'s; β is the option momentum"
        )
    for option in ("polar", "transform", "momentum_rule"):
        _check_hashable(option, group[option])
    resolve_scale(group["shape_scale"])
    if not is_integer(group["seed"]):
        raise TypeError(f"seed={group['seed']!r}: expected an integer, as 0")
    for option, what in (("split_sizes", "rows"), ("split_columns", "columns")):
        split = group[option]
        if split is not None and not (isinstance(split, Sequence) and all(map(is_integer, split))):
            raise TypeError(
                f"{option}={split!r}: expected the {what} of each matrix, integers, "
                "as (768, 256, 256)"
            )


def _check_algorithm(algorithm: str) -> None:
    if not isinstance(algorithm, str) or algorithm not in ("muon", *ELEMENTWISE):
        known = ", ".join(("muon", *ELEMENTWISE))
        raise ValueError(
            f"algorithm={algorithm!r}: expected one of {known}; a rule of your own is known once its "
            "class is defined, so import its module before"
        )


def check_lr(lr: float | Tensor) -> None:
    """Raise for a bad lr; the value of a tensor is not read, which would wait for its device."""
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"lr has shape {tuple(lr.shape)}: expected a number or one element")
    elif not is_number(lr):
        raise TypeError(f"lr={lr!r}: expected a finite number ≥ 0, or a tensor with one element")
    elif not -ROUNDING <= lr < math.inf:
        raise ValueError(
            f"lr={lr}: expected a finite number ≥ 0; 0.02 is usual for Muon, 3e-4 for AdamW"
        )


def _check_decay(group: Group) -> None:
    """Raise for a decoupled weight decay that turns the sign of every entry: 1 − ηλ < 0."""
    lr, decay = group["lr"], group["weight_decay"]
    if not isinstance(lr, Tensor) and lr * decay > 1:
        raise ValueError(
            f"weight_decay={decay:g} with lr={lr:g}: a step would multiply every entry by "
            f"1 − lr·weight_decay = {1 - lr * decay:.3g}, and expected is a number from 0 to 1; "
            f"0.05 is usual, and 1/lr = {1 / lr:.3g} the largest"
        )


def _refuse_polar(given: object) -> NoReturn:
    remedy = 'polarstep.Auto("cheap") has another budget'
    if given is None:
        remedy = "leave the key out, and a group has the map of the optimizer"
    elif isinstance(given, type) and issubclass(given, PolarMap):
        remedy = f"give an instance, as {given.__name__}()"
    raise TypeError(
        f"polar={given!r}: expected a polar map such as polarstep.NewtonSchulz(), or "
        f'"auto"; {remedy}'
    )


def _check_hashable(option: str, value: object) -> None:
    """Raise for a map or a transform of a user's own that cannot be a key, as buckets need it."""
    try:
        hash(value)
    except TypeError as reason:
        raise TypeError(
            f"{option}={value!r} cannot be hashed ({reason}): expected @dataclass(frozen=True) above "
            "the class, and tuples in place of lists and dicts"
        ) from None


def _check_keys(group: Group, muon_defaults: Group) -> None:
    """Raise for options of another algorithm, misspelt options, and those of other optimizers.

    torch lets a group carry any key, and so do we. But ``betas`` in a Muon group, ``momentun`` or
    ``wd`` would have no effect, unnoticed for a whole training run.
    """
    algorithm = group["algorithm"]
    if group.get("use_muon", algorithm == "muon") != (algorithm == "muon"):
        raise ValueError(
            f"use_muon={group['use_muon']} in a group with algorithm={algorithm!r}: expected no key "
            'use_muon, as algorithm decides; give "algorithm": "muon", or "adamw" for use_muon=False'
        )
    own = known_options(algorithm, muon_defaults)
    others = known_options("muon", muon_defaults).union(*map(options_of, ELEMENTWISE.values()))
    for key in sorted(set(group) - own - {*RESERVED}):
        if key in MEANINGLESS or (key in REMEDIES and not group[key]):
            continue  # torch's own groups have such keys
        if key == "lr_scale" and algorithm != "muon":
            continue  # a key of timm's schedulers
        close = [
            *difflib.get_close_matches(key.lower(), own - COUNTED, n=1, cutoff=0.8),
            *difflib.get_close_matches(key.lower(), others - COUNTED, n=1, cutoff=0.8),
        ]
        hint = f"did you mean {close[0]!r}? " if close else ""
        if key in REMEDIES:
            hint = f"{REMEDIES[key]}; "
        elif key in others:
            has = ", ".join(rule for rule in ELEMENTWISE if key in options_of(ELEMENTWISE[rule]))
            hint = f"it is an option of {has or 'muon'}; "
        if key in others or hint:
            raise ValueError(
                f"option {key!r} in a group with algorithm={algorithm!r}: {hint}"
                f"expected some of {', '.join(sorted(own - COUNTED))}"
            )
