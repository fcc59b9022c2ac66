"""The formats of checkpoints: what each optimizer keeps, and by which options its groups are recognized.

:data:`FORMATS` has an entry for each optimizer that can be read; :func:`source_of` finds a group's
format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polarstep.groups import Group

__all__ = ["FORMATS", "Format", "option_of", "source_of"]


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
