"""Checks of what users give as arguments: names that exist, and numbers in their range.

A check of a number raises a ``TypeError`` for a value of another kind, as a string, and a
``ValueError`` for a number outside its range. Both say the option, the value, what was expected and what
to give instead. True and False count as no numbers here, although Python computes with them:
``rank=True`` is a mistake.

>>> check_fraction("momentum", 1.2, "0.95 is usual")
Traceback (most recent call last):
    ...
ValueError: momentum=1.2: expected 0 ≤ momentum < 1; 0.95 is usual
>>> check_integer("rank", True, 1, "the paper takes 128–200")
Traceback (most recent call last):
    ...
TypeError: rank=True: expected an integer ≥ 1; the paper takes 128–200
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeGuard, TypeVar

__all__ = [
    "REMEDIES",
    "check_arguments",
    "check_at_least_zero",
    "check_bool",
    "check_fraction",
    "check_integer",
    "check_number",
    "check_one_of",
    "check_positive",
    "is_integer",
    "is_number",
    "with_known_names",
]

P = ParamSpec("P")
R = TypeVar("R")

# Options of torch's optimizers with the values that ask for nothing; a script may pass them on.
HARMLESS = {
    "foreach": (None, False),
    "maximize": (False,),
    "differentiable": (False,),
    "capturable": (False,),
    "fused": (None,),
}
# What to do about an argument that other optimizers have, torch's, dion's and KellerJordan's Muon among
# them, and that we do not.
REMEDIES = {
    "learning_rate": "give lr",
    "wd": "give weight_decay",
    "epsilon": "give eps",
    "lr_scale": "give shape_scale for a factor by the shape of a matrix, lr_factor for a number",
    "adamw_params": 'give a group {"params": …, "algorithm": "adamw"} beside Muon\'s',
    "flatten": 'give layout="conv", where "auto" does not read filters so',
    "use_polar_express": "leave it out, as polarstep.NewtonSchulz() takes PolarExpress steps",
    "steps": "give polar=polarstep.NewtonSchulz(steps, coefficients)",
    "ns_steps": "give polar=polarstep.NewtonSchulz(steps, coefficients)",
    "ns_coefficients": "give polar=polarstep.NewtonSchulz(steps, coefficients)",
    "adjust_lr_fn": 'give shape_scale="spectral" for "original", "rms" for "match_rms_adamw"',
    "adjust_lr": 'give shape_scale="fan-ratio" for "spectral_norm", "rms" for "rms_norm"',
    "distributed_mesh": "leave it out, as a DTensor brings its mesh along; with DDP, give process_group",
    "use_triton": "leave it out, as kernels are used wherever they run; fused=False is without them",
    "cautious_wd": "leave it out, as weight decay here is without it",
    "foreach": "leave it out, as matrices of one shape are always updated together",
    "capturable": "leave it out, as a step can be captured in a CUDA graph without it",
    "differentiable": "leave it out, as no gradient flows through a step",
    "maximize": "leave it out, and negate the loss",
    "amsgrad": "leave it out, as AdamW here is without it",
    "dampening": "leave it out, as SGD here is without it",
    "fused": "leave it out, as the step is torch's fused one wherever there is one",
}
# Options of other optimizers that ask for nothing here, whatever their value.
MEANINGLESS = ("foreach", "capturable", "fused")
# Options of AdamW, which other Muons take beside their own; most have "adamw_" before the name.
ADAMW = {"betas": "betas", "eps": "eps", "epsilon": "eps"}
WITH_PREFIX = ADAMW | {"lr": "lr", "wd": "weight_decay", "weight_decay": "weight_decay"}


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a real number of Python or NumPy, and not True or False."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether ``value`` is an integer of Python or NumPy, and not True or False; 3.0 is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_number(
    option: str, value: Any, fits: Callable[[float], bool], expected: str, remedy: str
) -> None:
    """Raise unless ``value`` is a number that ``fits``; ``expected`` says which numbers do."""
    if not is_number(value):
        raise TypeError(_told(option, value, f"a number, {expected}", remedy))
    if not fits(value):
        raise ValueError(_told(option, value, expected, remedy))


def check_at_least_zero(option: str, value: Any, remedy: str) -> None:
    """Raise unless ``value`` is a finite number ≥ 0."""
    if not is_number(value):
        raise TypeError(_told(option, value, "a finite number ≥ 0", remedy))
    if not 0 <= value < math.inf:
        raise ValueError(_told(option, value, "a finite number ≥ 0", remedy))


def check_positive(option: str, value: Any, remedy: str) -> None:
    """Raise unless ``value`` is a finite number > 0."""
    if not is_number(value):
        raise TypeError(_told(option, value, "a finite number > 0", remedy))
    if not 0 < value < math.inf:
        raise ValueError(_told(option, value, "a finite number > 0", remedy))


def check_fraction(option: str, value: Any, remedy: str) -> None:
    """Raise unless ``value`` is in [0, 1)."""
    check_number(option, value, lambda x: 0 <= x < 1, f"0 ≤ {option} < 1", remedy)


def check_integer(option: str, value: Any, least: int, remedy: str) -> None:
    """Raise unless ``value`` is an integer ≥ ``least``."""
    if not is_integer(value):
        raise TypeError(_told(option, value, f"an integer ≥ {least}", remedy))
    if value < least:
        raise ValueError(_told(option, value, f"an integer ≥ {least}", remedy))


def check_bool(option: str, value: Any, remedy: str) -> None:
    """Raise unless ``value`` is True or False: ``"no"`` would count as True."""
    if not isinstance(value, bool):
        raise TypeError(_told(option, value, "True or False", remedy))


def _told(option: str, value: object, expected: str, remedy: str) -> str:
    return f"{option}={value!r}: expected {expected}; {remedy}"


def check_one_of(option: str, value: Any, choices: Iterable[Any], remedy: str = "") -> None:
    """Raise unless ``value`` is one of ``choices``."""
    choices = tuple(choices)
    if value not in choices:
        remedy = f"; {remedy}" if remedy else ""
        raise ValueError(
            f"{option}={value!r}: expected one of {', '.join(map(str, choices))}{remedy}"
        )


def with_known_names(build: Callable[P, R]) -> Callable[P, R]:
    """``build``, with an error that names the remedy for an argument it does not have."""
    parameters = inspect.signature(build).parameters
    known = [name for name in parameters if name != "self"]
    places = [name for name, each in parameters.items() if each.kind is not each.KEYWORD_ONLY]
    title = build.__qualname__.partition(".")[0]

    @wraps(build)
    def call(*args: P.args, **options: P.kwargs) -> R:
        for name, values in HARMLESS.items():
            if name in options and any(options[name] is each for each in values):
                del options[name]
        check_arguments(title, options, known)
        if len(args) > len(places):
            raise TypeError(
                f"{args[len(places)]!r} has no name in the call of {title}: expected names after "
                f"{places[-1]}, as momentum=0.95 and weight_decay=0.1, which other optimizers have in "
                "other places"
            )
        return build(*args, **options)

    return call


def check_arguments(title: str, options: dict[str, Any], known: Collection[str]) -> None:
    """Raise a ``TypeError`` for the first of ``options`` whose name is not among ``known``."""
    for name, value in options.items():
        if name not in known:
            raise TypeError(
                f"{name}={value!r} is no argument of {title}: {_remedy(name, value, known)}"
            )


def _remedy(name: str, value: Any, known: Collection[str]) -> str:
    bare = name.removeprefix("adamw_").removeprefix("adam_")
    option = ADAMW.get(name) if bare == name else WITH_PREFIX.get(bare)
    if option is not None and "betas" not in known:
        if "others" in known:
            return f"it is AdamW's; give others=polarstep.AdamW({option}={value!r})"
        group = f'{{"params": …, "algorithm": "adamw", "{option}": {value!r}}}'
        return f"it is AdamW's; give a group {group}"
    if name in REMEDIES:
        return REMEDIES[name]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    listed = ", ".join(each for each in known if each != "params")
    return f"did you mean {close[0]}?" if close else f"expected some of {listed}"
