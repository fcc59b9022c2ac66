"""The options of parameter groups: the keys of each algorithm, their defaults and accepted values.

A call checks everything before it changes anything.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor

from polarstep.checked_values import (
    check_at_least_zero,
    check_bool,
    check_fraction,
    check_integer,
    is_integer,
    is_number,
)
from polarstep.groups import PER_PARAMETER, Group, Nonfinite, Rounding, check_params
from polarstep.maps import Auto, PolarMap
from polarstep.matrix import Layout
from polarstep.misnamed import REMEDIES, SYNONYMS
from polarstep.others import ELEMENTWISE, RESERVED, WITHOUT_DECAY, defaults_of, options_of
from polarstep.ranks.plans import check_plan
from polarstep.rates import resolve_scale
from polarstep.transforms import Transform

__all__ = [
    "CheckedOptions",
    "check_and_normalize",
    "check_lr",
    "check_ours",
    "complete",
    "known_options",
    "restored",
]

# The precisions in which momentum can be kept; None is the parameter's own.
MOMENTA = (None, torch.float32, torch.bfloat16, torch.int8)
# Options of other optimizers that would change a step, and that no rule here has.
WITHOUT = ("maximize", "amsgrad", "differentiable", "cautious_wd")
# A scheduler that multiplies and adds its way to zero may end a rounding error below it: torch's
# LinearLR(end_factor=0) at −3.7e-19. That counts as zero.
ROUNDING = 1e-12
# The rate of a group whose rule leaves it to muon_for, where the group was not made by muon_for.
ALONE = 3e-4
# What a group counts itself, and no option that a user gives.
COUNTED = {"step"}
# What a group holds beside options.
NO_OPTIONS = {"params", *PER_PARAMETER, *COUNTED}
# torch raises an error of its own where it multiplies by a larger number in 32 or 16 bits.
LARGEST = torch.finfo(torch.bfloat16).max


def complete(group: Group, muon_defaults: Group) -> Group:
    """``group`` with its algorithm's defaults filled in and every value checked."""
    group = {"algorithm": "muon"} | group
    defaults = _defaults_of(group["algorithm"], muon_defaults)
    _check_keys(group, muon_defaults)
    group = defaults | group
    _check_and_normalize_new(group)
    return group


def restored(group: Group, now: Group | None, muon_defaults: Group) -> Group:
    """A checkpoint's ``group``, checked; missing keys come from ``now``, the group it replaces.

    What ``now`` lacks too comes from the defaults. Schedulers store keys of their own in a group, so
    unknown keys are kept.
    """
    check_ours(group)
    defaults = _defaults_of(group["algorithm"], muon_defaults)
    if now is not None and now.get("algorithm", group["algorithm"]) == group["algorithm"]:
        defaults = defaults | {key: now[key] for key in defaults if key in now}
    if now is not None and "name" in now:
        defaults = defaults | {"name": now["name"]}
    group = defaults | group
    _check_and_normalize_new(group)
    check_params(group)
    return group


def check_ours(group: Group) -> None:
    """Raise if a checkpoint's ``group`` was saved by another optimizer."""
    if "algorithm" not in group:
        if "betas" in group and "momentum" not in group:
            raise ValueError(
                "the checkpoint is AdamW's: expected the state_dict() of a polarstep.Muon. To go over "
                "from AdamW, its weights are enough: Muon's momentum begins at zero, so warm up again. "
                "To keep AdamW's moments of the parameters that AdamW goes on updating: "
                "optimizer.load_state_dict(polarstep.convert.state_dict(theirs, optimizer, "
                "params=model.parameters()))"
            )
        only = ", ".join(map(str, group))
        raise ValueError(
            f"a parameter group of the checkpoint has no 'algorithm', only {only}: "
            "expected the state_dict() of a polarstep.Muon; polarstep.convert reads that of other Muon "
            "optimizers, as load_state_dict(polarstep.convert.state_dict(theirs, optimizer))"
        )


def _check_and_normalize_new(group: Group) -> None:
    """:func:`check_and_normalize`, with the value of an lr in a tensor, and sizes of parts as tuples."""
    check_and_normalize(group)
    check_lr(float(group["lr"]))
    for option in ("split_sizes", "split_columns"):
        if group.get(option) is not None:
            group[option] = tuple(group[option])


def _defaults_of(algorithm: str, muon_defaults: Group) -> Group:
    if algorithm == "muon":
        return muon_defaults
    _check_algorithm(algorithm)
    common = {option: muon_defaults[option] for option in ("nonfinite", "rounding")}
    defaults = defaults_of(ELEMENTWISE[algorithm])
    if defaults["lr"] is None:
        defaults["lr"] = ALONE
    return defaults | common | {"lr_factor": 1.0}


def known_options(algorithm: str, muon_defaults: Group) -> set[str]:
    """The names of the options that a group with ``algorithm`` has, as users give them."""
    return set(_defaults_of(algorithm, muon_defaults))


def check_and_normalize(group: Group) -> None:
    """Raise a ``ValueError`` or ``TypeError`` for the first bad or missing option of a group.

    Options that may be written in several ways are rewritten to the way that a step reads: an ``lr`` a
    rounding error below zero, and ``polar="auto"``. Users may write to a group between
    steps, so a step calls this for a group in which something has changed (:class:`CheckedOptions`).
    """
    try:
        _check_and_normalize(group)
    except KeyError as missing:
        raise ValueError(
            f"a group with algorithm={group.get('algorithm')!r} has no {missing}: expected all options "
            "of its rule, which add_param_group fills in; to give a group another rule, also give it "
            "that rule's options, as polarstep.AdamW() has them"
        ) from None


class CheckedOptions:
    """The options of an optimizer's groups when they were last checked."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, Any]] = {}  # by the number of the group

    def check(self, number: int, group: Group) -> None:
        """:func:`check_and_normalize` for a group that has another option, or another value of one."""
        known, now = self._known.get(number), _options_in(group)
        if known is None or known.keys() != now.keys() or any(known[k] is not now[k] for k in now):
            self._known.pop(number, None)
            check_and_normalize(group)
            self._known[number] = _options_in(group)


def _options_in(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NO_OPTIONS}


def _check_and_normalize(group: Group) -> None:
    algorithm = group["algorithm"]
    _check_algorithm(algorithm)
    check_lr(group["lr"])
    if not isinstance(group["lr"], Tensor) and -ROUNDING <= group["lr"] < 0:
        group["lr"] = 0.0
    if group["lr_factor"] is not None or algorithm == "muon":
        check_at_least_zero("lr_factor", group["lr_factor"], "1 leaves lr as it is")
    for option, names in (("nonfinite", get_args(Nonfinite)), ("rounding", get_args(Rounding))):
        if group[option] not in names:
            raise ValueError(f"{option}={group[option]!r}: expected one of {', '.join(names)}")
    if group.get("plan") is not None:
        check_plan(group["plan"])
    own = () if algorithm == "muon" else options_of(ELEMENTWISE[algorithm])
    for option in WITHOUT:
        if group.get(option) and option not in own:
            raise ValueError(
                f"option {option}={group[option]!r} in a group with algorithm={algorithm!r}: "
                f"{REMEDIES[option]}"
            )
    if algorithm == "muon":
        _check_and_normalize_muon(group)
    else:
        build: Callable[..., Any] = ELEMENTWISE[algorithm]
        # A rule checks its options when it is built. lr is left out: in a group it may be a tensor.
        build(**{option: group[option] for option in own if option != "lr"})
    if algorithm in ("muon", "adamw"):
        _check_decay(group)
    _check_range(group)


def _check_decay(group: Group) -> None:
    """Raise for a decoupled weight decay that turns the sign of every entry: 1 − ηλ < 0."""
    lr, decay = group["lr"], group["weight_decay"]
    if not isinstance(lr, Tensor) and lr * decay > 1:
        raise ValueError(
            f"weight_decay={decay:g} with lr={lr:g}: a step would multiply every entry by "
            f"1 − lr·weight_decay = {1 - lr * decay:.3g}, and expected is a number from 0 to 1; "
            f"0.05 is usual, and 1/lr = {1 / lr:.3g} the largest"
        )


def _check_range(group: Group) -> None:
    """Raise for a step that no precision but float64 can take, unless all parameters are in float64."""
    lr, factor = group["lr"], group["lr_factor"] or 0
    if isinstance(lr, Tensor) or lr * max(factor, 1) <= LARGEST:
        return
    narrow = {p.dtype for p in group.get("params", ()) if isinstance(p, Tensor)} - {torch.float64}
    if narrow:
        dtypes = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in narrow))
        raise ValueError(
            f"lr={lr}{f' times lr_factor={factor}' * (factor > 1)} in a group with parameters in "
            f"{dtypes}: expected at most {LARGEST:.3g}, the largest number there; 0.02 is usual for Muon"
        )


def _check_algorithm(algorithm: str) -> None:
    if not isinstance(algorithm, str) or algorithm not in ("muon", *ELEMENTWISE):
        known = ", ".join(("muon", *ELEMENTWISE))
        raise ValueError(
            f"algorithm={algorithm!r}: expected one of {known}; a rule of your own is known once its "
            "class is defined, so import its module before"
        )


def _check_and_normalize_muon(group: Group) -> None:
    check_fraction("momentum", group["momentum"], "the paper's schedule for K=10,000 gives 0.99")
    check_at_least_zero("weight_decay", group["weight_decay"], WITHOUT_DECAY)
    check_bool("nesterov", group["nesterov"], "False is Polyak's momentum")
    check_bool("fused", group["fused"], "False is without the fused kernels")
    if group["polar"] == "auto":
        group["polar"] = Auto()
    if not isinstance(group["polar"], PolarMap):
        _refuse_polar(group["polar"])
    transform = group["transform"]
    if transform is not None and not isinstance(transform, Transform):
        raise TypeError(
            f"transform={transform!r}: expected None or a transform such as polarstep.NormalizedRows()"
        )
    for option in ("polar", "transform"):
        _check_hashable(option, group[option])
    resolve_scale(group["shape_scale"])
    if group["layout"] not in get_args(Layout):
        raise ValueError(
            f"layout={group['layout']!r}: expected one of {', '.join(get_args(Layout))}"
        )
    if not is_integer(group["seed"]):
        raise TypeError(f"seed={group['seed']!r}: expected an integer, as 0")
    for option, what in (("split_sizes", "rows"), ("split_columns", "columns")):
        split = group[option]
        if split is not None and not (isinstance(split, Sequence) and all(map(is_integer, split))):
            raise TypeError(
                f"{option}={split!r}: expected the {what} of each matrix, integers, "
                "as (768, 256, 256)"
            )
    check_integer(
        "split_repeats",
        group["split_repeats"],
        1,
        "it says how often the parts come in turn, as the number of heads, and is 1 if each part lies "
        "in one piece",
    )
    if group["momentum_dtype"] not in MOMENTA:
        raise ValueError(
            f"momentum_dtype={group['momentum_dtype']!r}: expected one of "
            f"{', '.join(map(str, MOMENTA))}; None keeps momentum in the precision of the parameter"
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
    """Raise for options of another algorithm, misspelt options, and synonyms of ours.

    torch lets a group carry any key, and so do we. But ``betas`` in a Muon group, ``momentun`` or
    ``wd`` would have no effect, unnoticed for a whole training run. A misspelt option of another
    algorithm is refused, too.
    """
    algorithm = group["algorithm"]
    if group.get("use_muon", algorithm == "muon") != (algorithm == "muon"):
        raise ValueError(
            f"use_muon={group['use_muon']} in a group with algorithm={algorithm!r}: expected no key "
            'use_muon, as algorithm decides; give "algorithm": "muon", or "adamw" for use_muon=False'
        )
    own, muon = (known_options(each, muon_defaults) for each in (algorithm, "muon"))
    others = muon.union(*map(options_of, ELEMENTWISE.values())) - own - set(RESERVED)
    for key in sorted(set(group) - own - set(RESERVED)):
        close = difflib.get_close_matches(key.lower(), own - COUNTED, n=1, cutoff=0.8)
        meant = SYNONYMS[key] if SYNONYMS.get(key) in own else close[0] if close else None
        hint = f"did you mean {meant!r}? " if meant else ""
        if not meant and key not in others:
            foreign = difflib.get_close_matches(key.lower(), others - COUNTED, n=1, cutoff=0.8)
            hint = (
                f"it is like {foreign[0]!r}, which only other algorithms have; " if foreign else ""
            )
        if key in others or hint:
            raise ValueError(
                f"option {key!r} in a group with algorithm={algorithm!r}: {hint}"
                f"expected some of {', '.join(sorted(own - COUNTED))}"
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
