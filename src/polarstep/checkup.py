"""Did Muon run? The routes of an optimizer inside its wrappers, and what some steps of it do."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from polarstep.checked_values import check_integer
from polarstep.context import user_stacklevel
from polarstep.groups import labelled_params
from polarstep.mistakes import LOWEST, OF_LOW_RATES, highest_rate
from polarstep.optimizer import Muon
from polarstep.ranks.layout import local
from polarstep.routing.routes import Routes

__all__ = ["Check", "check", "routes"]

# Where wrappers hold an optimizer: Accelerate, Lightning, DeepSpeed, torchtitan, ZeRO, schedulers and
# trainers.
HELD_AS = ("optimizer", "_optimizer", "optim", "optimizers")
DEEPEST = 4  # wrappers around wrappers
# A step that changes a parameter by a smaller or a larger share of its norm is reported. At the default
# rate Muon's steps are from 1e-3 to 1e-1.
HARDLY, TOO_FAR = 1e-5, 0.5
NAMES = 3  # names that a line of the page lists


def routes(held: object) -> Routes:
    """The routing table of the Muon in ``held``, which may be any wrapper around an optimizer.

    That is the optimizer itself, or what holds it: an optimizer or a trainer of Accelerate, Hugging
    Face, Lightning, torchtitan or DeepSpeed, a learning rate scheduler, or a list of optimizers. Of
    several Muons the rows follow each other.

    >>> from polarstep import muon_for
    >>> optimizer = muon_for(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    >>> schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    >>> routes(schedule)["0.weight"].algorithm
    'Muon'
    """
    if told := _unread_arguments(held):
        warnings.warn(told, stacklevel=user_stacklevel())
    return Routes(tuple(row for optimizer in _muons(held) for row in optimizer.routes))


def _unread_arguments(held: object) -> str | None:
    """A warning of what Hugging Face's ``TrainingArguments`` say and no optimizer but its own reads."""
    given = getattr(held, "args", None)
    if not type(given).__name__.endswith("TrainingArguments") or not is_dataclass(given):
        return None
    usual = {each.name: each.default for each in fields(given)}
    changed = [
        f"{name}={getattr(given, name)!r}"
        for name in ("learning_rate", "weight_decay")
        if getattr(given, name, None) != usual.get(name)
    ]
    if not changed:
        return None
    return (
        f"{', '.join(changed)} of {type(given).__name__} does not reach polarstep.Muon: expected its "
        'options beside muon_for, as optimizer_cls_and_kwargs=(ps.muon_for, {"lr": 0.02, '
        '"weight_decay": 0.05})'
    )


def check(model: object, optimizer: object = None, *, steps: int = 10) -> Check:
    """Watch the next steps of an optimizer; print the result for one page on what they did.

    The page has, for each role, the rule, the number of parameters and the size of a step beside the
    size of the parameter, ‖ΔX‖/‖X‖; what is frozen, in no group or without a gradient; the share of the
    optimizer in the time of a training step; and what looks wrong. A step that is watched needs the
    memory of one more copy of the parameters. On several ranks each rank watches its own part.

    Args:
        model: the model, whose frozen parameters and parameters in no group are listed, too. It may be
            left out, as in ``check(optimizer)``.
        optimizer: the optimizer, or what holds it (:func:`routes`).
        steps: how many steps are watched.

    >>> from polarstep import muon_for
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    >>> optimizer = muon_for(model)
    >>> seen = check(model, optimizer, steps=2)
    >>> for _ in range(2):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(4, 8)).square().mean().backward()
    ...     optimizer.step()
    >>> seen.problems
    ()
    """
    if optimizer is None and not isinstance(model, nn.Module):
        model, optimizer = None, model
    if optimizer is None:
        raise TypeError(
            "optimizer is missing: expected check(model, optimizer), or check(optimizer)"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}: expected a torch.nn.Module and then its optimizer, as "
            "check(model, optimizer), or the optimizer alone"
        )
    check_integer("steps", steps, 1, "10 steps are enough")
    found = _muons(optimizer)
    if len(found) > 1:
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(found)} Muon optimizers: expected one; check each "
            "of them"
        )
    return Check(found[0], model, steps)


def _muons(held: object) -> list[Muon]:
    """Every :class:`polarstep.Muon` inside ``held``."""
    found = list(dict.fromkeys(_muons_inside(held, DEEPEST)))
    if not found:
        raise TypeError(
            f"{type(held).__name__} holds no polarstep.Muon: expected an optimizer that muon_for made, "
            "or what holds one, as a scheduler or a trainer after it has made its optimizer"
        )
    return found


def _muons_inside(held: object, depth: int) -> Iterator[Muon]:
    if isinstance(held, Muon):
        yield held
    elif depth:
        inner = (
            held if isinstance(held, list | tuple) else [getattr(held, n, None) for n in HELD_AS]
        )
        for each in inner:
            if each is not None and not callable(each):
                yield from _muons_inside(each, depth - 1)


class Check:
    """What the watched steps of an optimizer did; ``print`` it for the page.

    It is of the optimizer as it is when it is printed, and may be printed before all steps are made.
    """

    def __init__(self, optimizer: Muon, model: nn.Module | None, steps: int) -> None:
        self.optimizer, self.model = optimizer, model
        self._left = steps
        self._shares: dict[int, list[float]] = {}  # ‖ΔX‖/‖X‖ of each step, by the id of X
        self._before: list[tuple[Tensor, Tensor]] = []
        self._started = self._ended = 0.0
        # Of each step, and from the end of a step to the next.
        self._times: list[tuple[float, float]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(self._end),
        ]

    @property
    def steps(self) -> int:
        """How many steps have been watched."""
        return max(map(len, self._shares.values()), default=0)

    def _begin(self, optimizer: Optimizer, *_: Any) -> None:
        self._before = [
            (p, local(p).detach().clone())
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        self._started = _now()

    def _end(self, *_: Any) -> None:
        ended = _now()
        if self._ended:
            self._times.append((ended - self._started, self._started - self._ended))
        for p, before in self._before:
            size, moved = (
                torch.linalg.vector_norm(X.double()).item()
                for X in (before, local(p).detach() - before)
            )
            share = moved / size if size else math.inf if moved else 0.0
            self._shares.setdefault(id(p), []).append(share)
        self._before = []
        self._left -= 1
        if self._left == 0:
            for hook in self._hooks:
                hook.remove()
        self._ended = _now()

    @property
    def problems(self) -> tuple[str, ...]:
        """What looks wrong, a sentence each; empty where nothing does, or no step was watched yet."""
        return tuple(self._problems(self._rows())) if self._shares else ()

    def _problems(self, rows: Sequence[_Row]) -> Iterator[str]:
        if not any(row.sizes() for row in rows if row.rule == "Muon"):
            yield (
                "Muon moved no parameter: if backward() ran, make the optimizer after the last call "
                "that replaces parameters, and see the rules in print(optimizer.routes)"
            )
        highest = highest_rate(self.optimizer.param_groups) or 0.0
        if 0 < highest < LOWEST:
            yield f"Muon's learning rate is {highest:g}: {OF_LOW_RATES}"
        for row in rows:
            yield from row.problems()
        for words, names, remedy in self._apart():
            if remedy and names:
                yield f"{_listed(names)}: {words}; {remedy}"

    def _rows(self) -> list[_Row]:
        """What the steps did, by role and rule."""
        rows: dict[tuple[str, str], _Row] = {}
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        for route, p in zip(self.optimizer.routes, params, strict=False):  # left-out rows are last
            key = (route.role or "–", route.algorithm)
            row = rows.setdefault(key, _Row(*key, route.lr or 0.0, route.base_lr or 0.0))
            row.entries += p.numel()
            row.tensors += 1
            if id(p) in self._shares:
                row.shares[route.name] = median(self._shares[id(p)])
        return list(rows.values())

    def _apart(self) -> list[tuple[str, list[str], str]]:
        """(what, names, remedy) of parameters that no step moved; no remedy where it may be meant."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        labelled = [each for part in labelled_params(self.optimizer.param_groups) for each in part]
        without = [n for n, p in labelled if id(p) not in self._shares and p.requires_grad]
        frozen = [n for n, p in labelled if not p.requires_grad]
        missing: list[str] = []
        if self.model is not None:
            outside = [(n, p) for n, p in self.model.named_parameters() if id(p) not in held]
            frozen += [n for n, p in outside if not p.requires_grad]
            missing = [n for n, p in outside if p.requires_grad]
        return [
            ("frozen", frozen, ""),
            ("without a gradient", without, ""),
            (
                "trainable, and in no group of this optimizer",
                missing,
                "add them by optimizer.add_param_group, or let another optimizer update them",
            ),
        ]

    def __str__(self) -> str:
        if not self._shares:
            return "No step with a gradient was watched yet: make some, then print this again."
        lines = [f"{self.steps} steps of polarstep.Muon", ""]
        header = ("role", "rule", "parameters", "tensors", "‖ΔX‖/‖X‖ a step", "lr")
        table: list[tuple[str, ...]] = [header]
        rows = self._rows()
        table += [row.cells() for row in rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for cells in table:
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
        lines.append("")
        lines += [f"{words}: {_listed(names)}" for words, names, _ in self._apart() if names]
        if self._times:
            step, rest = (median(times) for times in zip(*self._times, strict=True))
            lines.append(
                f"time: {1000 * step:.3g} ms a step of the optimizer, "
                f"{step / (step + rest):.0%} of a training step"
            )
        problems = [f"- {problem}" for problem in self._problems(rows)]
        lines += ["", "Looks wrong:", *problems] if problems else ["", "Nothing looks wrong."]
        return "\n".join(lines)

    __repr__ = __str__


@dataclass
class _Row:
    """The parameters of one role that one rule updates."""

    role: str
    rule: str
    lr: float
    base_lr: float
    entries: int = 0
    tensors: int = 0
    shares: dict[str, float] = field(default_factory=dict)  # the median over steps, by name

    def sizes(self) -> list[float]:
        """The sizes of steps, of parameters that moved and were not zero before."""
        return [share for share in self.shares.values() if 0 < share < math.inf]

    def cells(self) -> tuple[str, ...]:
        """The line of the page."""
        size, sizes = "–", self.sizes()
        if sizes:
            size = f"{median(sizes):.1e}"
        if len(sizes) > 1:
            size += f" ({min(sizes):.0e} … {max(sizes):.0e})"
        now = "" if self.lr == self.base_lr else f", now {self.lr:.3g}"
        return (
            self.role,
            self.rule,
            f"{self.entries:,}",
            f"{self.tensors:,}",
            size,
            f"{self.base_lr:g}{now}",
        )

    def problems(self) -> Iterator[str]:
        """What looks wrong, each with the names of the parameters."""
        # At the start of a warm-up every step is short. Steps are in proportion to the rate.
        height = self.base_lr / self.lr if self.lr > 0 else 1.0
        rate = f"the rate of {self.base_lr:g} is %s; 0.02 is usual for muon_for"
        still = "its gradient is zero, or its lr_factor" if self.lr > 0 else "lr is 0 now"
        kinds: list[tuple[Callable[[float], bool], str]] = [
            (
                math.isnan,
                'has entries that are not finite: lower the rate, or give nonfinite="skip"',
            ),
            (lambda share: share == 0, f"does not move: {still}"),
            (
                lambda share: 0 < share * height < HARDLY,
                f"moves by less than {HARDLY:g} of its norm a step: {rate % 'low'}",
            ),
            (
                lambda share: TOO_FAR < share < math.inf,
                f"moves by more than {TOO_FAR:g} of its norm a step: {rate % 'high'}",
            ),
        ]
        for is_kind, words in kinds:
            if names := [name for name, share in self.shares.items() if is_kind(share)]:
                title = self.rule if self.role == "–" else f"{self.role} by {self.rule}"
                yield f"{_listed(names)} ({title}) {words}"


def _now() -> float:
    """The time on the host, when all that was asked of a GPU is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    return ", ".join(names[:NAMES]) + more
