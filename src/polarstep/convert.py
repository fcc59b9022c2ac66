"""Checkpoints of other Muon optimizers, as states of :class:`polarstep.Muon`.

:func:`options` reads the hyperparameters of a checkpoint, :func:`state_dict` its momentum::

    theirs = torch.load("checkpoint.pt")["optimizer"]
    optimizer = ps.Muon(params, **ps.convert.options(theirs))
    optimizer.load_state_dict(ps.convert.state_dict(theirs, optimizer))

Where the algorithms agree, the run goes on as it would have. What differs is in ``docs/coming-from.md``.

polarstep keeps C ← βC + G, a sum. Two of the others keep an average, B ← βB + (1 − β)G, and C is
B/(1 − β). T is the same for both, but the next gradients must be added in C's units.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polarstep.matrix import Layout, MatrixView
from polarstep.optim.groups import LR_SCALE, Group, labelled_params, scale_of, view_of
from polarstep.optim.muon import Muon
from polarstep.optim.routing.anatomy import unwrapped
from polarstep.polar import NewtonSchulz

__all__ = ["FORMATS", "Format", "options", "state_dict"]

JORDAN = (3.4445, -4.775, 2.0315)
# Options that only the Muon of these libraries has. They keep momentum as torch and KellerJordan do, but
# their scales, coefficients and weight decay have names or meanings of their own.
UNREAD = {"conv_mode": "timm", "use_adjusted_lr": "pytorch_optimizer"}


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
    # KellerJordan/Muon until January 2025: its groups have ns_steps, and neither weight_decay nor the
    # update_buffer of February 2025.
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


def options(theirs: Mapping[str, Any], *, source: str | None = None) -> dict[str, Any]:
    """The arguments of :class:`polarstep.Muon` and :func:`polarstep.muon_for` for a checkpoint's Muon.

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
    lr_scale spectral
    polar NewtonSchulz(steps=5, coefficients='jordan', delta='frobenius', dtype=None, form='auto')
    """
    _check_checkpoint(theirs, "of several optimizers give that of Muon")
    found = [
        _options(group, source) for group in theirs["param_groups"] if _is_muons(group, theirs)
    ]
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
    return found[0]


def state_dict(
    theirs: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    optimizer: Muon,
    *,
    params: Iterable[Tensor] | None = None,
    source: str | None = None,
) -> dict[str, Any]:
    """A checkpoint for ``optimizer.load_state_dict`` with the momentum of other optimizers.

    The options stay those of ``optimizer``. Parameters are matched by ``params`` if it is given, else
    by name if both sides have the same names, else by their order, which no name may contradict.

    Args:
        theirs: the ``state_dict()`` of the other optimizer, or of several, as of ``torch.optim.Muon``
            and ``torch.optim.AdamW`` that were used side by side.
        optimizer: the optimizer that goes on.
        params: the parameters in the order of the other optimizer's groups, where it is not the order
            in ``optimizer``: ``[p for group in other.param_groups for p in group["params"]]``.
        source: a name in :data:`FORMATS`; by default found from the keys of the groups.

    Raises:
        ValueError: if the parameters cannot be matched, or if a state has another shape than its
            parameter.
    """
    if not isinstance(optimizer, Muon):
        kind = type(optimizer)
        raise TypeError(
            f"optimizer is a {kind.__module__}.{kind.__name__}: expected the polarstep.Muon that goes "
            "on, as made by polarstep.muon_for(model, **polarstep.convert.options(theirs))"
        )
    checkpoints: Sequence[Any] = theirs if isinstance(theirs, list | tuple) else [theirs]
    if not checkpoints:
        raise ValueError("theirs is empty: expected the state_dict() of at least one optimizer")
    entries = [entry for each in checkpoints for entry in _entries(each, source)]
    labelled = zip(optimizer.param_groups, labelled_params(optimizer.param_groups), strict=True)
    places = [(name, p, group) for group, params_of in labelled for name, p in params_of]
    order = _order(entries, places, params)
    ours = optimizer.state_dict()
    converted: dict[int, dict[str, Any]] = {}
    anew = []
    for entry, index in zip(entries, order, strict=True):
        name, p, group = places[index]
        if entry.empty:
            continue
        found = entry.converted(group["algorithm"], p.shape)
        if found is None:
            anew.append(name)
            continue
        for key, value in found.items():
            if key != "step" and value.shape != p.shape:
                raise ValueError(
                    f"{key} of {name} has shape {tuple(value.shape)} in the checkpoint, and the "
                    f"parameter {tuple(p.shape)}: expected the same; give params= in the order of the "
                    "other optimizer's groups"
                )
        converted[index] = found
    if anew:
        warnings.warn(
            f"{_listed(anew)} had another rule in the checkpoint than in this optimizer, so its state "
            "starts anew; to keep it, give the parameter the rule it had, by rules=[…] of muon_for",
            stacklevel=2,
        )
    matched = [places[index] for index in order]
    _warn_of_other_ranks(entries, matched)
    _warn_of_layouts(entries, matched)
    _warn_of_filters(entries, matched)
    found_places = set(order)
    missing = [name for i, (name, _, _) in enumerate(places) if i not in found_places]
    if missing and converted:
        warnings.warn(
            f"none of the checkpoints has {_listed(missing)}, so their states start anew while others "
            "go on; if the other run had two optimizers, give a list of checkpoints, as "
            "[muon.state_dict(), adamw.state_dict()]",
            stacklevel=2,
        )
    steps = max((entry.steps for entry in entries if entry.steps is not None), default=0)
    for group in ours["param_groups"]:
        if group["algorithm"] == "muon":
            group["step"] = steps
    return ours | {"state": converted}


def _warn_of_other_ranks(
    entries: Sequence[_Entry], places: Sequence[tuple[str, Tensor, Group]]
) -> None:
    """Warn if a checkpoint of KellerJordan's Muon has the momentum of some of its matrices alone.

    A rank of a distributed run updates some of the matrices, and keeps no momentum of the others.
    """
    its = [
        (entry, name)
        for entry, (name, _, group) in zip(entries, places, strict=True)
        if group["algorithm"] == "muon" and entry.kept.by_rank and entry.is_muons
    ]
    without = [name for entry, name in its if entry.empty]
    if without and len(without) < len(its):
        warnings.warn(
            f"the checkpoint has no momentum of {_listed(without)}, so it starts anew while that of "
            "other matrices goes on; each rank of KellerJordan's Muon keeps the momentum of its own "
            'matrices alone: after a run on several ranks put the "state" of all their checkpoints '
            "together, and convert again",
            stacklevel=3,
        )


def _warn_of_layouts(
    entries: Sequence[_Entry], places: Sequence[tuple[str, Tensor, Group]]
) -> None:
    """Warn of tensors that were other matrices in the checkpoint's Muon than they are here."""
    changed = []
    for entry, (name, p, group) in zip(entries, places, strict=True):
        layout = entry.layout(p.dim())
        if group["algorithm"] != "muon" or not entry.is_muons or layout is None:
            continue
        theirs, ours = MatrixView.of(p.shape, layout=layout), view_of(group, p, name)
        if theirs.shapes != ours.shapes and not ours.is_cut:
            changed.append((name, theirs, ours, layout))
    if changed:
        name, theirs, ours, layout = changed[0]
        warnings.warn(
            f"{_listed([name for name, *_ in changed])}: the Muon of the checkpoint read {name} as "
            f"{theirs}, and this optimizer reads it as {ours}, so that its steps are others; to go on "
            f'as before, give such tensors a group with layout="{layout}"',
            stacklevel=3,
        )


def _warn_of_filters(
    entries: Sequence[_Entry], places: Sequence[tuple[str, Tensor, Group]]
) -> None:
    """Warn of convolution filters whose steps have another scale here than in the checkpoint's Muon.

    KellerJordan's ``muon_update`` takes the scale √max(1, m/n) of the gradient's last two dimensions,
    which are kh and kw for a filter; here m × n is the matrix out × in·kh·kw.
    """
    changed = []
    for entry, (name, p, group) in zip(entries, places, strict=True):
        filters = entry.kept.by_kernel and p.dim() == 4 and group["algorithm"] == "muon"
        if not filters or group[LR_SCALE] != "spectral":
            continue
        theirs = math.sqrt(max(1.0, p.shape[2] / p.shape[3]))
        (_, m, n), *_ = view_of(group, p, name).shapes
        ours = scale_of(group, p.device)(m, n)
        if not math.isclose(ours, theirs):
            changed.append((name, theirs, ours))
    if changed:
        name, theirs, ours = changed[0]
        factor = "" if theirs == 1 else f" and lr_factor={theirs:.4g}"
        warnings.warn(
            f"{_listed([name for name, _, _ in changed])}: KellerJordan's Muon scales the steps of a "
            "convolution filter by √max(1, kh/kw), polarstep by √max(1, out/(in·kh·kw)), so that those "
            f"of {name} are multiplied by {ours:.4g} where they were by {theirs:.4g}; to go on as "
            f'before, give such filters a group with lr_scale="none"{factor}',
            stacklevel=3,
        )


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


@dataclass(frozen=True)
class _Entry:
    """One parameter of another optimizer's checkpoint."""

    name: str | None
    state: Mapping[str, Any]
    group: Group
    kept: Format

    @property
    def empty(self) -> bool:
        """Whether there is nothing to convert; Moonlight's states have a flag before a tensor."""
        return not any(isinstance(value, Tensor) for value in self.state.values())

    @property
    def steps(self) -> int | None:
        """The number of steps, where the checkpoint knows it."""
        known = self.state.get(self.kept.counter, self.group.get("step"))
        return None if known is None else int(known)

    @property
    def is_muons(self) -> bool:
        """Whether the momentum is a sum of gradients, or their average.

        Groups of dion's optimizers name their rule. Lion's and Dion's momentum has the key of Muon's,
        but is no sum of gradients; NorMuon's is.
        """
        if not self.group.get("use_muon", self.state.get("use_muon", True)):
            return False
        summed = self.group.get("algorithm", "muon") in ("muon", "normuon")
        return summed and self.kept.second not in self.state

    def layout(self, dimensions: int) -> Layout | None:
        """How the other Muon read a tensor of three or more dimensions; ``None`` if it read none."""
        flat = self.kept.as_matrix or (self.kept.by_kernel and dimensions == 4)
        known = self.kept.by_rank or "flatten" in self.group
        if dimensions < 3 or not known:
            return None
        return "conv" if self.group.get("flatten", flat) else "stack"

    def converted(self, algorithm: str, shape: torch.Size) -> dict[str, Any] | None:
        """The state of a parameter of ``shape`` as our ``algorithm`` has it; ``None`` if another's."""
        its = self.kept
        if algorithm == "adamw" and {its.first, its.second} <= set(self.state):
            step = torch.tensor(float(self.steps or 0), dtype=torch.float32, device="cpu")
            # Copies, as torch loads a state without one, and both optimizers would write to it.
            first, second = (self.state[moment].clone() for moment in (its.first, its.second))
            return {"step": step, "exp_avg": first, "exp_avg_sq": second}
        if algorithm == "muon" and self.is_muons and its.momentum in self.state:
            buffer: Tensor = self.state[its.momentum]
            if its.as_matrix and buffer.shape == (shape[0], math.prod(shape[1:])):
                buffer = buffer.reshape(shape)
            # 1/(1 − β) times a float16 average may be infinite in float16; here C is in float32.
            buffer = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
            return {"momentum_buffer": buffer / self._share}
        return None

    @property
    def _share(self) -> float:
        """The momentum of the checkpoint as a share of C: 1 − β of an average, 1 of a sum."""
        if not self.kept.averages:
            return 1.0
        beta = self.group[self.kept.beta]
        if not 0 <= beta < 1:
            raise ValueError(
                f"{self.kept.beta}={beta} in a group of the checkpoint: expected 0 ≤ β < 1, as its "
                "momentum is an average with the share 1 − β of every gradient; let the momentum start "
                "anew, by loading no state for Muon"
            )
        return float(1 - beta)


def _check_checkpoint(theirs: object, several: str = "or a list of them") -> None:
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


def _entries(theirs: Mapping[str, Any], source: str | None) -> list[_Entry]:
    _check_checkpoint(theirs)
    entries = []
    for group in theirs["param_groups"]:
        kept = FORMATS[_source(group, source)]
        _check_direction(group)
        for name, key in zip(_names(group), group["params"], strict=True):
            state = theirs["state"].get(key, {})
            state = {what: value for what, value in state.items() if value is not None}
            for what in {kept.momentum, kept.first, kept.second} & set(state):
                if not isinstance(state[what], Tensor):
                    raise TypeError(
                        f"{what} of parameter {name or key} is a {type(state[what]).__name__} in the "
                        "checkpoint: expected a tensor, as torch.load returns it"
                    )
            entries.append(_Entry(name, state, group, kept))
    _check_keys(theirs)
    return entries


def _names(group: Group) -> list[str | None]:
    """The names of a group's parameters; ``None`` for each where it has no names.

    ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` has names in place of numbers.
    """
    keys = group["params"]
    named = bool(keys) and all(isinstance(key, str) and not key.isdigit() for key in keys)
    names = group.get("param_names") or (keys if named else [])
    return list(names) or [None] * len(keys)


def _check_direction(group: Group) -> None:
    """Raise for options that change what an elementwise rule does, and that no rule has here."""
    remedies = {"maximize": "negate the loss", "amsgrad": "to go on without the largest moments"}
    for option, remedy in remedies.items():
        if group.get(option):
            raise ValueError(
                f"{option}=True in a group of the checkpoint: expected False, as no rule here has it; "
                f'{remedy}, set theirs["param_groups"][…]["{option}"] = False and convert again'
            )


def _check_keys(theirs: Mapping[str, Any]) -> None:
    """Raise if no parameter of the groups has a state under its key, while others have."""
    listed = [key for group in theirs["param_groups"] for key in group["params"]]
    keys = list(theirs["state"])
    if listed and keys and not set(keys) & set(listed):
        raise ValueError(
            f"the state of the checkpoint has the keys {', '.join(map(repr, keys[:3]))}, …, and its "
            f"groups name the parameters {', '.join(map(repr, listed[:3]))}, …: expected the same keys, "
            "or every momentum would start anew; a file format that turns numbers into strings, as "
            "JSON, needs them turned back"
        )


def _order(
    entries: Sequence[_Entry],
    places: Sequence[tuple[str, Tensor, Group]],
    params: Iterable[Tensor] | None,
) -> list[int]:
    """For each entry the index of its parameter in our optimizer."""
    if params is not None:
        given = list(params)
        index = {id(p): i for i, (_, p, _) in enumerate(places)}
        unknown = [i for i, p in enumerate(given) if id(p) not in index]
        distinct = len({id(p) for p in given})
        if unknown or distinct != len(entries):
            what = f"{distinct} different params"
            if unknown:
                what = f"params[{unknown[0]}] is not in the optimizer"
            raise ValueError(
                f"{what}: expected the {len(entries)} parameters of the checkpoint, each of them in the "
                "optimizer; leave out no parameter, and make the optimizer of the same model"
            )
        return [index[id(p)] for p in given]
    names = [entry.name for entry in entries if entry.name is not None]
    why = ""
    if entries and len(names) == len(entries):
        for called in (str, unwrapped):
            by_name = {called(name): i for i, (name, _, _) in enumerate(places)}
            found = [by_name[called(name)] for name in names if called(name) in by_name]
            if len(set(found)) == len(entries):
                return found
        missing = next((name for name in names if unwrapped(name) not in by_name), names[0])
        why = f" (the optimizer has no {missing!r}, so names do not match them)"
    if len(entries) != len(places):
        raise ValueError(
            f"the checkpoint has {len(entries)} parameters and the optimizer {len(places)}{why}: "
            "expected as many, in the same order; give params= in the order of the other optimizer's "
            "groups, or a list of checkpoints if the other run had two optimizers"
        )
    if any("role" in group for _, _, group in places):
        without = f"names{why}" if why else "no names of parameters"
        raise ValueError(
            f"the checkpoint has {without}, and muon_for has put them in an order of its "
            "own: expected params=, the parameters in the order of the other optimizer's groups"
        )
    by_name = {unwrapped(name): i for i, (name, _, _) in enumerate(places)}
    for i, entry in enumerate(entries):
        if entry.name is not None and by_name.get(unwrapped(entry.name), i) != i:
            raise ValueError(
                f"{entry.name!r} is number {i} in the checkpoint and number "
                f"{by_name[unwrapped(entry.name)]} in the optimizer{why}: expected the same names, or "
                "the same order; give params= in the order of the other optimizer's groups"
            )
    return list(range(len(places)))


def _is_muons(group: Group, theirs: Mapping[str, Any]) -> bool:
    """Whether a group has matrices of Muon's."""
    if "use_muon" in group:
        return bool(group["use_muon"])
    if "algorithm" in group:
        return bool(group["algorithm"] == "muon")
    states = [theirs["state"].get(key, {}) for key in group["params"]]
    of_muon = any("momentum_buffer" in s or s.get("use_muon") for s in states)
    return "momentum" in group and (of_muon or not any(states))


def _options(group: Group, source: str | None) -> dict[str, Any]:
    name = _source(group, source)
    its = FORMATS[name]
    for option in UNREAD.keys() & group.keys():
        raise ValueError(
            f"the checkpoint is that of {UNREAD[option]}'s Muon, by its option {option}: expected that "
            f"of {', '.join(FORMATS)}, whose options are read here; make the optimizer with options of "
            "your own, and convert the state alone"
        )
    steps, coefficients = group.get("ns_steps", 5), tuple(group.get("ns_coefficients", JORDAN))
    polar = NewtonSchulz(steps, "jordan" if coefficients == JORDAN else (coefficients,))
    scale: Any = "rms" if name == "moonlight" else "spectral"
    if name == "torch" and group.get("adjust_lr_fn") == "match_rms_adamw":
        scale = "rms"
    if name == "dion":
        if group.get("cautious_wd"):
            raise ValueError(
                "cautious_wd=True in the checkpoint: expected plain weight decay, which Muon here has; "
                "set weight_decay by hand and convert the state alone"
            )
        for option, whole in (("num_heads", (None, 1)), ("split_sizes", (None,))):
            if (cut := group.get(option)) not in whole:
                raise ValueError(
                    f"{option}={cut} in the checkpoint: expected matrices that are not cut; make "
                    "a group with split_sizes=, or give muon_for its splits, and convert the state alone"
                )
        polar = NewtonSchulz(5, "polar-express")
        known = {"spectral_norm": "fan-ratio", "rms_norm": "rms", None: "none"}
        asked = _option(group, "adjust_lr", name)
        if asked not in known:
            raise ValueError(
                f"adjust_lr={asked!r} in the checkpoint: expected one of "
                f"{', '.join(map(repr, known))}; make the optimizer with an lr_scale of your own, and "
                "convert the state alone"
            )
        scale = known[asked]
    # The Muon of 2024 had no weight decay at all.
    decays = any(each.weight_decay in group for each in FORMATS.values())
    return {
        "lr": _number(_option(group, "lr", name)),
        "momentum": _option(group, its.beta, name),
        "nesterov": group.get("nesterov", True),
        "weight_decay": _number(_option(group, its.weight_decay, name)) if decays else 0.0,
        "lr_scale": scale,
        "polar": polar,
    }


def _number(value: Any) -> Any:
    """``value`` as a number. dion has it as a tensor, which a scheduler would write to in place."""
    return value.item() if isinstance(value, Tensor) else value


def _option(group: Group, key: str, source: str) -> Any:
    """``group[key]``, or an error if a group of the format ``source`` would have it and this has not."""
    if key not in group:
        raise ValueError(
            f"a group of the checkpoint has no {key!r}, only {', '.join(sorted(group))}: expected that "
            f"of the format {source!r}; leave source= out, or name another of {', '.join(FORMATS)}"
        )
    return group[key]


def _source(group: Group, source: str | None) -> str:
    """The format of a group, by the options it has."""
    if source is not None:
        if source not in FORMATS:
            raise ValueError(f"source={source!r}: expected one of {', '.join(FORMATS)}")
        return source
    keys = set(group)
    if "qk_clip_threshold" in keys:
        raise ValueError(
            "a group of the checkpoint is that of pytorch_optimizer's MuonClip, which keeps a sum where "
            "its Muon keeps an average: expected the format of its state; source='keller-2024' reads "
            "the sum, and AdamW's moments start anew"
        )
    if "algorithm" in keys and keys & {"polar", "nonfinite"}:
        raise ValueError(
            "the checkpoint is polarstep's own: expected another optimizer's; give it to "
            "optimizer.load_state_dict as it is"
        )
    if "ns_coefficients" in keys or {"betas", "amsgrad"} <= keys:
        return "torch"
    if {"mu", "epsilon"} <= keys:
        return "dion"
    if {"wd", "adamw_betas"} <= keys:
        return "moonlight"
    if {"ns_steps", "nesterov"} <= keys:  # those of 2025 have one of these, and keep an average
        return "keller" if keys & {"weight_decay", "update_buffer"} else "keller-2024"
    no_options = {"params", "param_names", "initial_lr"}  # the last is torch's schedulers'
    if "use_muon" in keys or {"lr", "momentum", "weight_decay"} >= keys - no_options:
        return "keller"
    if "dampening" in keys:
        raise ValueError(
            "a group of the checkpoint is that of torch.optim.SGD: expected Muon's, or AdamW's beside "
            "it; leave the checkpoint of SGD out, and its momentum starts anew"
        )
    raise ValueError(
        f"a group of the checkpoint has the options {', '.join(sorted(keys))}: expected those of "
        f"{', '.join(FORMATS)}; name the format that keeps its state alike, as source='keller'"
    )
