"""How :class:`polarstep.Muon` is saved, loaded and pickled.

A checkpoint is plain data: state tensors under the parameters' numbers, as torch has them, and every
option of a group as text or numbers (:mod:`polarstep.checkpoints.plain`). Loading checks all
groups before it changes any.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from polarstep import maps, momentum, transforms
from polarstep.checkpoints.matching import (
    check_order,
    check_ours,
    check_sizes,
    named_in_order,
    told_of_mixed,
)
from polarstep.checkpoints.plain import KINDS, decoded_group, encoded, encoded_group
from polarstep.checkpoints.unstarted import with_all_entries
from polarstep.context import user_stacklevel
from polarstep.groups import Group, check_params, named_params
from polarstep.maps import sketches
from polarstep.mistakes import check_shapes
from polarstep.options import check_new_options, defaults_for, known_options
from polarstep.others import ELEMENTWISE, check_buffers, counter_device
from polarstep.ranks.collectives import has_ranks
from polarstep.state import KEPT_AS_MOMENTUM, OF_RULE, State, momentum_dtype, name_of, stored_dtype

__all__ = ["Checkpointed"]

# Other code may pickle the groups themselves, with the maps and transforms in them: Lightning's
# BackboneFinetuning does so in the state of its callback, beside a state_dict in one file. These classes
# are plain records, so torch.load may read them with weights_only=True, its default.
torch.serialization.add_safe_globals(
    [
        part
        for room in (maps, sketches, transforms, momentum)
        for part in map(vars(room).get, room.__all__)
        if isinstance(part, type) and issubclass(part, KINDS)
    ]
)

KEPT = "_kept"  # where a pickle has the arguments of _start


class Checkpointed(Optimizer):
    """An optimizer whose groups hold polar maps, and whose momentum may have a precision of its own.

    A pickle holds the state, the groups, the defaults, and what :meth:`_kept` returns. The subclass
    makes all other attributes in :meth:`_start`, which an unpickled copy calls with what was kept.
    """

    _being_loaded: Sequence[dict[str, Any]] = ()  # the checkpoint, while load_state_dict runs

    def _start(self, **kept: Any) -> None:
        """Set the attributes that torch's optimizers do not have."""

    def _kept(self) -> dict[str, Any]:
        """The arguments of :meth:`_start` that a pickle holds."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state and the groups, as torch has them, with every option as plain data.

        Hooks of ``register_state_dict_post_hook`` get this plain data, and what they return is returned.
        """
        self._check_held()

        def first(_: Optimizer, content: dict[str, Any]) -> dict[str, Any]:
            """Make plain data of what torch has, before the user's hooks."""
            if has_ranks():
                content = content | {"state": self._with_all_entries(content["state"])}
            groups = [encoded_group(group) for group in content["param_groups"]]
            return content | {"param_groups": groups}

        handle = self.register_state_dict_post_hook(first, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _check_held(self) -> None:
        """Raise if a parameter with a state is in no group, where torch would raise a ``KeyError``."""
        held = {id(p) for group in self.param_groups for p in group["params"]}
        left = [p for p in self.state if isinstance(p, Tensor) and id(p) not in held]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise ValueError(
                f"optimizer.state has a parameter of shape {tuple(left[0].shape)}{more} that is in no "
                "group: expected every parameter with a state in a group. Where a parameter was taken "
                "out of its group, take its state out too, by optimizer.state.pop(parameter)"
            )

    def _with_all_entries(self, state: dict[int, Any]) -> dict[int, Any]:
        """``state`` with the entries that a checkpoint of several ranks must have.

        The parameters come in the order of the groups on every rank, since ranks gather them one after
        the other. In ``state`` itself they are in the order of their first steps, which may differ.
        """
        numbered = enumerate((group, p) for group in self.param_groups for p in group["params"])
        found = {
            index: with_all_entries(group, p, state.get(index, {}))
            for index, (group, p) in numbered
            if p.requires_grad or state.get(index)
        }
        return found | {key: its for key, its in state.items() if key not in found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint, as :meth:`polarstep.Muon.load_state_dict` says.

        torch casts every tensor it loads to the precision of its parameter. Tensors that are kept in
        another precision are loaded without that cast: momentum, buffers, carries, and what an
        element-wise rule keeps beside its buffers. If such a tensor was saved in yet another precision,
        the next step casts it.
        """
        check_groups(state_dict)
        saved = [named_in_order(group) for group in state_dict["param_groups"]]
        if not self._optimizer_load_state_dict_pre_hooks:  # a hook may correct the groups
            check_sizes(self.param_groups, saved)
        seen: list[dict[str, Any]] = []

        def last(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            """Check and decode the checkpoint as the user's hooks have left it."""
            check_groups(given)
            check_state(given)
            check_order(self.param_groups, given["param_groups"])
            seen.append(given | {"param_groups": self._decoded(given["param_groups"])})
            return seen[0]

        before = [dict(group) for group in self.param_groups]
        handle = self.register_load_state_dict_pre_hook(last)
        self._being_loaded = seen
        try:
            super().load_state_dict(state_dict | {"param_groups": saved})
        finally:
            self._being_loaded = ()
            handle.remove()
        for told in (
            told_of_changes(before, self.param_groups, self.defaults),
            told_of_mixed(state_dict["param_groups"]),
        ):
            if told is not None:
                warnings.warn(told, stacklevel=user_stacklevel())

    def _undo_casts(self, content: dict[str, Any]) -> None:
        """Take from ``content``, a checkpoint just loaded, what torch has cast but a step keeps.

        :meth:`__setstate__` calls this, which torch calls before the user's post hooks: what a hook
        writes to the state stays.
        """
        for saved, group in zip(content["param_groups"], self.param_groups, strict=True):
            for key, p in zip(saved["params"], group["params"], strict=True):
                of_parameter = content["state"].get(key, {})
                for name in _kept_as_saved(group, p, of_parameter):
                    value = of_parameter.get(name)
                    if isinstance(value, Tensor):
                        self.state[p][name] = value.to(p.device, copy=True)

    def _decoded(self, saved: Sequence[Group]) -> list[Group]:
        """The groups of a checkpoint with maps and other objects, and with this optimizer's names.

        A function as ``shape_scale`` is left out, so that it stays as it is here: torch would copy it
        with everything it encloses.
        """
        found = []
        for index, group in enumerate(saved):
            now = self.param_groups[index] if index < len(self.param_groups) else {}
            known = self.defaults | now
            options = decoded_group(group, known)
            options.pop("param_names", None)
            if "param_names" in now:
                options["param_names"] = now["param_names"]
            scale = options.get("shape_scale")
            if callable(scale) and scale is known.get("shape_scale"):
                del options["shape_scale"]
            found.append(options)
        return found

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle; hooks are left out, as in torch."""
        return super().__getstate__() | {KEPT: self._kept()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled optimizer, without hooks; loading a checkpoint ends here too."""
        known = state.get("defaults") or self.defaults
        defaults = {key: known[key] for key in known if key != "differentiable"}  # torch's
        groups = state["param_groups"]
        unpickled = "param_groups" not in self.__dict__
        now = [None] * len(groups) if unpickled else self.param_groups
        filled = [_restored(group, old, defaults) for group, old in zip(groups, now, strict=True)]
        _check_buffers(groups, state.get("state", {}))
        for group, options in zip(groups, filled, strict=True):  # all groups passed the checks
            group.update(options)
        state = dict(state)
        kept = state.pop(KEPT, {})
        if unpickled:
            self._start(**kept)
        super().__setstate__(state)
        for content in self._being_loaded:
            self._undo_casts(content)
        for p, of_parameter in self.state.items():
            # torch leaves AdamW's counter on the device the checkpoint was read to.
            if isinstance(of_parameter.get("step"), Tensor):
                of_parameter["step"] = of_parameter["step"].to(counter_device(p))


def _kept_as_saved(group: Group, p: Tensor, of_parameter: Mapping[str, Any]) -> Sequence[str]:
    """The entries of the state of ``p`` that are kept in another precision than ``p``.

    Of an element-wise rule these are all entries that are not buffers, such as a count, which would be
    wrong from 257 on in bfloat16. The buffers of a float16 parameter, which are in float32, belong to
    them, too. ``"step"`` is left to torch, which does not cast it.
    """
    if group["algorithm"] in ELEMENTWISE:
        cast: tuple[str, ...] = ("rounding_error", "step")
        if momentum_dtype(p.dtype) == p.dtype:
            cast = (*ELEMENTWISE[group["algorithm"]].buffers, *cast)
        return [name for name in of_parameter if name not in cast]
    wide = {OF_RULE, *group["polar"].traits.wide_carries}
    if group["transform"] is not None:
        wide |= {*group["transform"].wide_carries}
    momentum = () if stored_dtype(group, p) == p.dtype else KEPT_AS_MOMENTUM
    return [*momentum, *(key for key in of_parameter if name_of(key) in wide)]


def _check_buffers(groups: Sequence[Group], state: State) -> None:
    """Raise if the state of a parameter does not fit it."""
    for group in groups:
        for name, p in named_params(group):
            of_parameter = state.get(p)
            if not isinstance(of_parameter, dict):
                continue
            if of_parameter and group["algorithm"] in ELEMENTWISE:
                check_buffers(name, of_parameter, ELEMENTWISE[group["algorithm"]])
            check_shapes(name, p, of_parameter, group)


def _restored(group: Group, now: Group | None, muon_defaults: Group) -> Group:
    """A checkpoint's ``group``, checked; missing keys come from ``now``, the group it replaces.

    What ``now`` lacks too comes from the defaults. Schedulers store keys of their own in a group, so
    unknown keys are kept.
    """
    check_ours(group)
    defaults = defaults_for(group["algorithm"], muon_defaults)
    if now is not None and now.get("algorithm", group["algorithm"]) == group["algorithm"]:
        defaults = defaults | {key: now[key] for key in defaults if key in now}
    if now is not None and "name" in now:
        defaults = defaults | {"name": now["name"]}
    group = defaults | group
    check_new_options(group)
    check_params(group)
    return group


# Options that change during a run, so that a checkpoint may well have others.
CHANGING = {"lr", "lr_factor", "momentum", "betas", "step"}


def told_of_changes(
    before: Sequence[Group], now: Sequence[Group], muon_defaults: Group
) -> str | None:
    """A warning if a checkpoint has replaced options of this optimizer; else ``None``."""
    changed, keys = list[str](), list[str]()
    for old, new in zip(before, now, strict=True):
        if old.get("algorithm") != new["algorithm"]:
            changed.append(f"algorithm={old.get('algorithm')} → {new['algorithm']}")
            continue
        for key in sorted(known_options(new["algorithm"], muon_defaults) - CHANGING):
            if key in old and encoded(old[key]) != encoded(new[key]):
                changed.append(f"{key}={old[key]} → {new[key]}")
                keys.append(key)
    if not changed:
        return None
    told = (
        "the checkpoint had other options than this optimizer, which goes on with those of the "
        f"checkpoint: {', '.join(dict.fromkeys(changed))}"
    )
    if not keys:
        return f"{told}. For this optimizer's rules load the weights of the model alone"
    return (
        f"{told}. To keep this optimizer's, take them out of the checkpoint before it is loaded: "
        'for group in state_dict["param_groups"]: '
        f"[group.pop(key, None) for key in {list(dict.fromkeys(keys))}]"
    )


def check_groups(state_dict: object) -> None:
    """Raise if ``state_dict`` is not an optimizer's, or its groups cannot be parameter groups."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        only = ""
        if isinstance(state_dict, Mapping) and state_dict:
            only = f", only {', '.join(map(repr, list(state_dict)[:6]))}"
        raise TypeError(
            f"state_dict is a {type(state_dict).__name__} without 'state' and 'param_groups'{only}: "
            "expected what optimizer.state_dict() returned; in a checkpoint of a whole run it is one of "
            'the entries, as checkpoint["optimizer"]'
        )
    groups = state_dict["param_groups"]
    _check_is(list | tuple, "a list", "'param_groups' of the checkpoint", groups)
    for index, group in enumerate(groups):
        title = f"group {index} of the checkpoint"
        _check_is(dict, "a dict", title, group)
        _check_is(list | tuple, "a list", f"'params' of {title}", group.get("params"))
        names = group.get("param_names")
        _check_is(list | tuple | None, "a list", f"'param_names' of {title}", names)
        for key in group["params"]:
            _check_is(Hashable, "a number", f"one of the 'params' of {title}", key)


def check_state(state_dict: Mapping[str, Any]) -> None:
    """Raise if the state of a parameter in the groups of ``state_dict`` is not a dict."""
    state = state_dict["state"]
    _check_is(Mapping, "a dict", "'state' of the checkpoint", state)
    for group in state_dict["param_groups"]:
        for key in group["params"]:
            if key in state:
                title = f"the state of parameter {key!r} in the checkpoint"
                _check_is(Mapping, "a dict", title, state[key])


def _check_is(kind: Any, what: str, title: str, found: object) -> None:
    if not isinstance(found, kind):
        told = "None" if found is None else f"a {type(found).__name__}"
        raise TypeError(
            f"{title} is {told}, and not {what}: expected what optimizer.state_dict() returned; where "
            "the file is damaged or was edited, load an earlier checkpoint"
        )
