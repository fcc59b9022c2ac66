"""The formats of checkpoints: what each optimizer keeps, and what its options say of its steps.

:data:`FORMATS` has an entry for each optimizer that can be read; :func:`source_of` finds a group's
format, and :func:`options` returns the hyperparameters of a checkpoint's Muon, as arguments of
:class:`polarstep.Muon`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from polarstep.groups import Group
from polarstep.maps import NewtonSchulz
from polarstep.routing.anatomy import unwrapped

__all__ = ["FORMATS", "Format", "check_checkpoint", "names_in", "option_of", "options", "source_of"]


@dataclass(frozen=True)
class Format:
    """How an optimizer names and scales what it keeps."""

    averages: bool  # whether the momentum is B = (1 − β)C
    momentum: str = "momentum_buffer"
    beta: str = "momentum"
    weight_decay: str = "weight_decay"
    first: str = "exp_avg"  # AdamW's moments and counter
    second: str = "exp_avg_sq"
    counter: str = "step"
    by_kernel: bool = False  # whether the scale of a convolution filter is √max(1, kh/kw)
    by_rank: bool = False  # whether a rank keeps the momentum of its own matrices alone
    as_matrix: bool = False  # whether the momentum of a filter is kept as out × in·kh·kw


FORMATS: dict[str, Format] = {
    # torch.optim.Muon, and torch.optim.AdamW beside it.
    "torch": Format(averages=True),
    # KellerJordan/Muon: Muon, MuonWithAuxAdam and their versions for a single device.
    "keller": Format(averages=True, by_kernel=True, by_rank=True),
    # KellerJordan/Muon until January 2025.
    "keller-2024": Format(
        averages=False, first="moment1", second="moment2", by_rank=True, as_matrix=True
    ),
    # MoonshotAI/Moonlight.
    "moonlight": Format(averages=False, weight_decay="wd", first="moment1", second="moment2"),
    # microsoft/dion: its Muon.
    "dion": Format(
        averages=False,
        momentum="momentum",
        beta="mu",
        first="momentum",
        second="variance",
        counter="step_dev",
    ),
}

# A group has the first of these formats whose options are all in the group.
RECOGNIZED: list[tuple[set[str], str]] = [
    ({"ns_coefficients"}, "torch"),
    ({"betas", "amsgrad"}, "torch"),  # torch.optim.AdamW
    ({"mu", "epsilon"}, "dion"),
    ({"wd", "adamw_betas"}, "moonlight"),
    # KellerJordan/Muon of 2025 has weight_decay or update_buffer, the version of 2024 neither.
    ({"ns_steps", "nesterov", "weight_decay"}, "keller"),
    ({"ns_steps", "nesterov", "update_buffer"}, "keller"),
    ({"ns_steps", "nesterov"}, "keller-2024"),
    ({"use_muon"}, "keller"),
]
# The newest Muon of KellerJordan has these options alone, and none that only it has.
BARE = {"lr", "momentum", "weight_decay"}
NO_OPTIONS = {"params", "param_names", "initial_lr"}  # the last is torch's schedulers'

OURS = (
    "the checkpoint is polarstep's own: expected another optimizer's; give it to "
    "optimizer.load_state_dict as it is"
)
# A group with all of these options is refused, though a row of RECOGNIZED may fit it.
REFUSED: list[tuple[set[str], str]] = [
    (
        {"qk_clip_threshold"},
        "a group of the checkpoint is of pytorch_optimizer's MuonClip, which keeps a sum where "
        "its Muon keeps an average: expected the format of its state; source='keller-2024' reads "
        "the sum, and AdamW's moments start anew",
    ),
    ({"algorithm", "polar"}, OURS),
    ({"algorithm", "nonfinite"}, OURS),
]


def source_of(group: Group, source: str | None) -> str:
    """The name of a group's format: ``source`` if it is given, else found by the group's options."""
    if source is not None:
        if source not in FORMATS:
            raise ValueError(f"source={source!r}: expected one of {', '.join(FORMATS)}")
        return source
    keys = set(group)
    for marks, message in REFUSED:
        if marks <= keys:
            raise ValueError(message)
    for marks, name in RECOGNIZED:
        if marks <= keys:
            return name
    if keys - NO_OPTIONS <= BARE:
        return "keller"
    if "dampening" in keys:
        raise ValueError(
            "a group of the checkpoint is of torch.optim.SGD: expected Muon's, or AdamW's beside "
            "it; leave the checkpoint of SGD out, and its momentum starts anew"
        )
    raise ValueError(
        f"a group of the checkpoint has the options {', '.join(sorted(keys))}: expected a format of "
        f"{', '.join(FORMATS)}; name the format that keeps its state alike, as source='keller'"
    )


def option_of(group: Group, key: str, source: str) -> Any:
    """``group[key]``; raises if the group lacks it, which a group of the format ``source`` has."""
    if key not in group:
        raise ValueError(
            f"a group of the checkpoint has no {key!r}, only {', '.join(sorted(group))}: expected the "
            f"format {source!r}; leave source= out, or name another of {', '.join(FORMATS)}"
        )
    return group[key]


def check_checkpoint(theirs: object, several: str = "or a list of them") -> None:
    """Raise if ``theirs`` is no ``state_dict()``; ``several``: what the error says about lists."""
    if isinstance(theirs, Mapping) and {"state", "param_groups"} <= set(theirs):
        return
    only = (
        f", only {', '.join(map(repr, list(theirs)[:6]))}"
        if isinstance(theirs, dict) and theirs
        else ""
    )
    raise TypeError(
        f"theirs is a {type(theirs).__name__} without 'state' and 'param_groups'{only}: expected what "
        f"state_dict() of the other optimizer returns, {several}; in a checkpoint of a whole run it is "
        'one of the entries, as checkpoint["optimizer"]'
    )


def names_in(group: Group) -> list[str | None]:
    """The names of a group's parameters, or ``None`` for each of them if the group has no names.

    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` lists names in place of numbers.
    """
    keys = group["params"]
    named = bool(keys) and all(isinstance(key, str) and not key.isdigit() for key in keys)
    names = group.get("param_names") or (keys if named else [])
    return list(names) or [None] * len(keys)


# --- hyperparameters

JORDAN = (3.4445, -4.775, 2.0315)
# Options by which the Muon of other libraries is recognized. These keep momentum as torch and
# KellerJordan do, but their scales, coefficients and weight decay have names or meanings of their own.
UNREAD = {"conv_mode": "timm", "use_adjusted_lr": "pytorch_optimizer"}


@dataclass(frozen=True)
class _Refusal:
    """An option that changes the steps of a format's Muon and that ours lacks, and what to do."""

    option: str
    harmless: tuple[object, ...]  # the values with which it changes nothing
    remedy: str


@dataclass(frozen=True)
class _Steps:
    """What the options of a format say of a step, in the names of :class:`polarstep.Muon`."""

    scales: Mapping[str | None, str]  # our shape_scale by the value of scaled_by
    scaled_by: str | None = None  # the option with the scale; None: always scales[None]
    optional: bool = (
        False  # whether a group may lack the option scaled_by, which then counts as None
    )
    polar: NewtonSchulz | None = None  # None: by the group's ns_steps and ns_coefficients
    refusals: tuple[_Refusal, ...] = ()


# Options of dion's groups by which matrices are cut along their rows, with the values that cut nothing.
CUT_BY = {"num_heads": (None, 1), "split_sizes": (None,)}
STEPS: dict[str, _Steps] = {
    "torch": _Steps(
        {None: "spectral", "original": "spectral", "match_rms_adamw": "rms"},
        scaled_by="adjust_lr_fn",
        optional=True,
    ),
    "keller": _Steps({None: "spectral"}),
    "keller-2024": _Steps({None: "spectral"}),
    "moonlight": _Steps({None: "rms"}),
    "dion": _Steps(
        {"spectral_norm": "fan-ratio", "rms_norm": "rms", None: "none"},
        scaled_by="adjust_lr",
        polar=NewtonSchulz(5, "polar-express"),
        refusals=(
            _Refusal(
                "cautious_wd",
                (None, False),
                "expected plain weight decay, which Muon here has; set weight_decay by hand and convert "
                "the state alone",
            ),
        ),
    ),
}


def options(theirs: Mapping[str, Any], *, source: str | None = None) -> dict[str, Any]:
    """The arguments of :class:`polarstep.Muon` and :func:`polarstep.muon_for` for a checkpoint's Muon.

    Where dion's Muon cuts matrices, by ``num_heads`` or ``split_sizes``, the argument ``splits`` of
    :func:`polarstep.muon_for` is among them.

    Args:
        theirs: the ``state_dict()`` of the other optimizer.
        source: a name in :data:`FORMATS`; by default found from the keys of the groups.

    >>> W = torch.nn.Parameter(torch.eye(3))
    >>> theirs = torch.optim.Muon([W], lr=0.02, weight_decay=0.1).state_dict()
    >>> for option, value in options(theirs).items():
    ...     print(option, value)
    lr 0.02
    momentum 0.95
    nesterov True
    weight_decay 0.1
    shape_scale spectral
    polar NewtonSchulz(steps=5, coefficients='jordan', delta='frobenius', dtype=None, form='auto')
    transform None
    """
    check_checkpoint(theirs, "of several optimizers give Muon's")
    groups = [group for group in theirs["param_groups"] if _has_muons_options(group, theirs)]
    found = [_options(group, source) for group in groups]
    if not found:
        raise ValueError(
            "no group of the checkpoint is updated by Muon: expected the state_dict() of a Muon "
            "optimizer; for AdamW's alone keep torch.optim.AdamW"
        )
    for other in found[1:]:
        for key, value in other.items():
            if value != found[0][key]:
                raise ValueError(
                    f"groups of the checkpoint have {key}={found[0][key]!r} and {value!r}: expected the "
                    "same for all; make groups of your own, and convert the state alone"
                )
    splits = {name: parts for group in groups for name, parts in _cuts(group)}
    return found[0] | ({"splits": splits} if splits else {})


def _cuts(group: Group) -> Iterator[tuple[str, Any]]:
    """The names of a group's parameters, if it cuts them, and the parts of each."""
    for option, whole in CUT_BY.items():
        parts: Any = group.get(option)
        if parts in whole:
            continue
        for name in names_in(group):
            if name is None:
                raise ValueError(
                    f"{option}={parts} in a group of the checkpoint without names of parameters: "
                    "expected names, by which muon_for finds them; make the optimizer with "
                    "muon_for(model, per_head=True) or with splits=, and convert the state alone"
                )
            yield unwrapped(name), parts if isinstance(parts, int) else tuple(parts)


def _has_muons_options(group: Group, theirs: Mapping[str, Any]) -> bool:
    """Whether the options of a group are Muon's, for some of its parameters at least.

    Some groups name their rule. Other groups are Muon's if they have an option ``momentum``, and states
    of Muon or none at all.
    """
    if "use_muon" in group:
        return bool(group["use_muon"])
    if "algorithm" in group:
        return bool(group["algorithm"] == "muon")
    states = [theirs["state"].get(key, {}) for key in group["params"]]
    of_muon = any("momentum_buffer" in s or s.get("use_muon") for s in states)
    return "momentum" in group and (of_muon or not any(states))


def _options(group: Group, source: str | None) -> dict[str, Any]:
    """The options of one group of Muon's."""
    name = source_of(group, source)
    its = FORMATS[name]
    for option in UNREAD.keys() & group.keys():
        raise ValueError(
            f"the checkpoint is of {UNREAD[option]}'s Muon, by its option {option}: expected one of "
            f"{', '.join(FORMATS)}, whose options are read here; make the optimizer with options of "
            "your own, and convert the state alone"
        )
    for each in STEPS[name].refusals:
        if (value := group.get(each.option)) not in each.harmless:
            raise ValueError(f"{each.option}={value} in the checkpoint: {each.remedy}")
    scale = _scale(group, name)
    # The Muon of 2024 had no weight decay at all.
    decays = any(each.weight_decay in group for each in FORMATS.values())
    return {
        "lr": _number(option_of(group, "lr", name)),
        "momentum": option_of(group, its.beta, name),
        "nesterov": group.get("nesterov", True),
        "weight_decay": _number(option_of(group, its.weight_decay, name)) if decays else 0.0,
        "shape_scale": scale,
        "polar": STEPS[name].polar or _newton_schulz(group),
        "transform": None,
    }


def _scale(group: Group, source: str) -> str:
    """Our ``shape_scale`` for the steps of a group."""
    its = STEPS[source]
    if its.scaled_by is None:
        return its.scales[None]
    asked = group.get(its.scaled_by) if its.optional else option_of(group, its.scaled_by, source)
    if asked not in its.scales:
        raise ValueError(
            f"{its.scaled_by}={asked!r} in the checkpoint: expected one of "
            f"{', '.join(map(repr, its.scales))}; make the optimizer with a shape_scale of your own, "
            "and convert the state alone"
        )
    return its.scales[asked]


def _newton_schulz(group: Group) -> NewtonSchulz:
    """The polar map of a group that may name its steps and coefficients."""
    steps, coefficients = group.get("ns_steps", 5), tuple(group.get("ns_coefficients", JORDAN))
    return NewtonSchulz(steps, "jordan" if coefficients == JORDAN else (coefficients,))


def _number(value: Any) -> Any:
    """``value`` as a number. dion has it as a tensor, which a scheduler would write to in place."""
    return value.item() if isinstance(value, torch.Tensor) else value
