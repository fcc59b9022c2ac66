"""Errors for keyword arguments that ``Muon``, ``muon_for``, ``AdamW`` and ``SGD`` do not have.

Python's own error names the argument and no remedy. Users of other optimizers try the names they know.
Each of these names has an equivalent here, or is not needed.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, ParamSpec, TypeVar

__all__ = ["REMEDIES", "SYNONYMS", "check_arguments", "with_known_names"]

P = ParamSpec("P")
R = TypeVar("R")

# Names that other libraries, torch.optim.Muon among them, give to our options.
SYNONYMS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "decay": "weight_decay",
    "beta": "momentum",
    "mu": "momentum",
    "ns_steps": "polar",
    "steps": "polar",
    "ns_coefficients": "polar",
    "lr_scale": "shape_scale",
    "adjust_lr_fn": "shape_scale",
    "adjust_lr": "shape_scale",
    "use_polar_express": "polar",
    "newton_schulz_func": "polar",
    "flatten": "layout",
    "epsilon": "eps",
    "beta1": "betas",
    "beta2": "betas",
    "muon_params": "params",
    "layout": "layouts",
    "split_sizes": "splits",
    "split_columns": "splits",
    "split_repeats": "splits",
    "params": "model",
}
# The remedy to show for an argument, where the name of our option is not enough.
REMEDIES = {
    "ns_steps": "give polar=polarstep.NewtonSchulz(steps, coefficients)",
    "steps": "give polar=polarstep.NewtonSchulz(steps, coefficients)",
    "ns_coefficients": "give polar=polarstep.NewtonSchulz(steps, coefficients)",
    "adjust_lr_fn": 'give shape_scale="spectral" for "original", "rms" for "match_rms_adamw"',
    "adjust_lr": 'give shape_scale="fan-ratio" for "spectral_norm", "rms" for "rms_norm"',
    "adamw_params": 'give a group {"params": …, "algorithm": "adamw"} beside Muon\'s',
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
# Options of torch's optimizers with the values that ask for nothing; a script may pass them on.
HARMLESS = {"foreach": (None, False), "maximize": (False,), "differentiable": (False,)}
# Options of AdamW that Muon does not have, by the names that other libraries give them.
ADAMW = {
    "betas": "betas",
    "eps": "eps",
    "epsilon": "eps",
    **{
        f"{prefix}_{name}": option
        for prefix in ("adamw", "adam")
        for name, option in (
            ("lr", "lr"),
            ("betas", "betas"),
            ("eps", "eps"),
            ("wd", "weight_decay"),
            ("weight_decay", "weight_decay"),
        )
    },
}


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
    if name in REMEDIES:
        return REMEDIES[name]
    if name in ADAMW:
        option = ADAMW[name]
        if "betas" in known:  # the call is of AdamW itself
            return f"did you mean {option}?"
        group = f'a group {{"params": …, "algorithm": "adamw", "{option}": {value!r}}}'
        rule = f"others=polarstep.AdamW({option}={value!r})"
        return f"it is AdamW's; give {rule if 'others' in known else group}"
    if SYNONYMS.get(name) in known:
        return f"did you mean {SYNONYMS[name]}?"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    listed = ", ".join(each for each in known if each != "params")
    return f"did you mean {close[0]}?" if close else f"expected some of {listed}"
