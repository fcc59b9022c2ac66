"""Random configurations of the optimizer, a few steps each, against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tests.fuzz.cases import Choices, Outcome, Violation
from tests.fuzz.maps import random_map
from tests.fuzz.reference import Reference
from tests.fuzz.shrink import smallest
from torch import Tensor, nn

from polarstep import Exact, LowRank, Muon, NewtonSchulz, NormalizedRows, rng

__all__ = [
    "Configuration",
    "Group",
    "Parameter",
    "Run",
    "differences",
    "random_configuration",
    "shrunk",
    "tried",
]

EVENTS = ("normal",) * 12 + ("none", "none", "zero", "nan", "inf")
# Differences from the reference, in units of the learning rate.
ALLOWED = {torch.float64: 1e-5, torch.float32: 2e-2}


@dataclass(frozen=True)
class Parameter:
    """A tensor, where it lies in memory, and what gradient each step brings it."""

    shape: tuple[int, ...]
    layout: str = "contiguous"
    events: tuple[str, ...] = ()

    def event(self, step: int) -> str:
        return self.events[step] if step < len(self.events) else "normal"


@dataclass(frozen=True)
class Group:
    """A parameter group; options that are not given are the optimizer's own."""

    parameters: tuple[Parameter, ...]
    options: dict[str, Any] = field(default_factory=dict)
    tensor_lr: bool = False


@dataclass(frozen=True)
class Configuration:
    """An optimizer and the steps it takes. Its repr is a program."""

    groups: tuple[Group, ...]
    dtype: torch.dtype = torch.float64
    steps: int = 3
    seed: int = 0
    factors: tuple[float, ...] = ()  # on every learning rate, by step, as a scheduler does it

    def factor(self, step: int) -> float:
        return self.factors[step] if step < len(self.factors) else 1.0


class Run:
    """The parameters and the optimizer of a configuration."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.parameters = [p for group in configuration.groups for p in group.parameters]
        self.tensors = [
            nn.Parameter(_laid_out(each, _values(configuration, i, each.shape)))
            for i, each in enumerate(self.parameters)
        ]
        tensors = iter(self.tensors)
        groups, self.rates = [], []
        for group in configuration.groups:
            options = dict(group.options)
            if group.tensor_lr:
                options["lr"] = torch.tensor(options.get("lr", 0.02), dtype=torch.float64)
            groups.append({"params": [next(tensors) for _ in group.parameters], **options})
        self.optimizer = Muon(groups)
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def gradient(self, index: int, step: int) -> Tensor | None:
        """The gradient of a parameter at a step; it depends on where the parameter is."""
        p, event = self.tensors[index], self.parameters[index].event(step)
        if event == "none":
            return None
        G = _values(self.configuration, index, p.shape, "gradient", step)
        G = (G + 0.1 * p.detach().nan_to_num()).to(p.dtype)
        if event == "zero":
            return torch.zeros_like(p)
        if event in ("nan", "inf") and G.numel() > 0:
            G.view(-1)[step % G.numel()] = float(event)
        return _laid_out(self.parameters[index], G)

    def step(self, step: int) -> None:
        """One step of the optimizer."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            rate = rate * self.configuration.factor(step)
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        for i, p in enumerate(self.tensors):
            p.grad = self.gradient(i, step)
        self.optimizer.step()


def _values(configuration: Configuration, index: int, shape: Any, *key: int | str) -> Tensor:
    generator = rng.generator("fuzz", configuration.seed, index, *key)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(
        configuration.dtype
    )


def _laid_out(parameter: Parameter, X: Tensor) -> Tensor:
    if parameter.layout == "transposed" and X.ndim >= 2:
        return X.mT.contiguous().mT
    if parameter.layout == "channels last" and X.ndim == 4:
        return X.contiguous(memory_format=torch.channels_last)
    if parameter.layout == "strided":
        return torch.stack([X, X], -1)[..., 0]
    return X


def differences(configuration: Configuration) -> list[tuple[str, str]]:
    """What the optimizer does otherwise than the reference: promise and finding."""
    run = Run(configuration)
    options = [group for group in run.optimizer.param_groups for _ in group["params"]]
    references = [Reference(p, o) for p, o in zip(run.tensors, options, strict=True)]
    found = []
    lengths = [0.0] * len(references)
    for step in range(configuration.steps):
        gradients = [run.gradient(i, step) for i in range(len(references))]
        before = [p.detach().clone() for p in run.tensors]
        run.step(step)
        for i, (its, G) in enumerate(zip(references, gradients, strict=True)):
            lr = float(its.options["lr"])
            if its.X.numel() > 0:
                its.step(G, lr, step)
            lengths[i] += lr * max(1.0, max(its.X.shape, default=1) ** 0.5)
            if G is None and not torch.equal(run.tensors[i].nan_to_num(), before[i].nan_to_num()):
                found.append(("no gradient, no step", f"parameter {i} moved at step {step}"))
    for i, (p, its) in enumerate(zip(run.tensors, references, strict=True)):
        if not its.known or p.numel() == 0:
            continue
        buffer = run.optimizer.state[p].get("momentum_buffer")
        pairs = [("parameter", p.detach(), its.X, lengths[i])]
        if buffer is not None and its.options["momentum"] > 0:  # torch's SGD does not write to it
            pairs.append(("momentum", buffer, its.C, float(its.C.abs().max()) + 1))
        for name, X, expected, size in pairs:
            distance = float((X.double() - expected).abs().max())
            if not distance <= ALLOWED[configuration.dtype] * max(size, 1e-3):
                found.append((f"{name} as in float64", f"{name} {i} is off by {distance:.3g}"))
    return found


# --- random choices -----------------------------------------------------------------------------


def random_configuration(choose: Choices, dtypes: tuple[torch.dtype, ...]) -> Configuration:
    """A few groups that share shapes, so that buckets cross groups."""
    steps = choose.random.randint(1, 6)
    shapes = [_shape(choose) for _ in range(choose.random.randint(1, 3))]
    groups = tuple(_group(choose, shapes, steps) for _ in range(choose.random.randint(1, 3)))
    factors = (
        tuple(choose.one_of(1.0, 1.0, 0.5, 0.0) for _ in range(steps))
        if choose.whether(0.3)
        else ()
    )
    return Configuration(
        groups, choose.one_of(*dtypes), steps, choose.random.randrange(2**31), factors
    )


def _shape(choose: Choices) -> tuple[int, ...]:
    m, n = (choose.one_of(1, 2, 3, 4, 6, 8, 9, 12, 16) for _ in range(2))
    more = choose.one_of(*[()] * 8, (2,), (3,), (2, 3))
    if more == (2, 3):
        return (m, n, 2, 3)  # a convolution
    return (*more, m, n) if choose.whether(0.98) else (0, n)


def _group(choose: Choices, shapes: list[tuple[int, ...]], steps: int) -> Group:
    chosen = [choose.random.choice(shapes) for _ in range(choose.random.randint(1, 4))]
    algorithm = choose.one_of("muon", "muon", "muon", "muon", "adamw", "sgd")
    options: dict[str, Any] = {"algorithm": algorithm, "lr": choose.one_of(0.02, 0.3, 1e-3)}
    if algorithm == "muon":
        options |= _muon_options(choose)
        if choose.whether(0.2) and _rows(chosen, options) is not None:
            options["split_sizes"] = _split(choose, _rows(chosen, options))
    elif algorithm == "sgd":
        options |= choose.one_of(
            {"momentum": 0.0, "nesterov": False}, {"momentum": 0.9}, {"nesterov": False}
        )
    if choose.whether(0.4):
        options["weight_decay"] = choose.one_of(0.1, 1.0)
    options["nonfinite"] = choose.one_of("propagate", "skip")
    if algorithm != "muon":
        chosen = [choose.one_of(s, s[-1:]) for s in chosen]
    parameters = tuple(
        Parameter(
            s,
            choose.one_of("contiguous", "contiguous", "transposed", "channels last", "strided"),
            tuple(choose.one_of(*EVENTS) for _ in range(steps)) if choose.whether(0.5) else (),
        )
        for s in chosen
    )
    return Group(parameters, options, choose.whether(0.15))


def _rows(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> int | None:
    """The number of rows that all matrices of a group have, if it can be split."""
    flat = all(len(s) == 2 or (len(s) == 3 and options.get("layout") != "conv") for s in shapes)
    rows = {s[-2] for s in shapes}
    return rows.pop() if flat and len(rows) == 1 and rows != {0} else None


def _muon_options(choose: Choices) -> dict[str, Any]:
    polar = choose.one_of(None, _map_with_reference(choose), _map_with_reference(choose))
    options = {
        "polar": polar or NewtonSchulz(5, "polar-express"),
        "momentum": choose.one_of(0.0, 0.5, 0.9, 0.95),
        "nesterov": choose.whether(0.6),
        "shape_scale": choose.one_of("none", "spectral", "fan-ratio", "rms"),
        "transform": choose.one_of(None, None, None, NormalizedRows(choose.one_of(0.0, 0.5, 0.95))),
        "seed": choose.random.randrange(3),
    }
    if choose.whether(0.15):
        options["layout"] = choose.one_of("conv", "stack")
    return options


def _map_with_reference(choose: Choices):
    """A map that computes in the precision of its matrices, so that the reference can be close."""
    while True:
        polar = random_map(choose)
        text = repr(polar)
        # A number for δ needs matrices below it. A sketch of Exact() depends on rounding errors.
        rounding = isinstance(polar, LowRank) and isinstance(polar.inner, Exact)
        steep = "cifar10" in text  # without a safety factor
        if "dtype=torch" not in text and polar.traits.ignores_scale and not rounding and not steep:
            return polar


def _split(choose: Choices, rows: int) -> tuple[int, ...]:
    parts = choose.random.randint(1, max(1, min(3, rows)))
    cuts = sorted(choose.random.sample(range(1, rows), parts - 1)) if rows > 1 else []
    ends = [*cuts, rows]
    return tuple(end - start for start, end in zip([0, *cuts], ends, strict=True))


def tried(choose: Choices) -> Outcome:
    """One configuration."""
    configuration = random_configuration(choose, (torch.float64,) * 4 + (torch.float32,))
    outcome = Outcome()
    outcome.tried["configurations"] += 1
    outcome.tried["steps"] += configuration.steps
    outcome.violations += shrunk(configuration, differences)
    return outcome


# --- smaller configurations ---------------------------------------------------------------------

Check = Callable[[Configuration], list[tuple[str, str]]]


def shrunk(configuration: Configuration, check: Check) -> list[Violation]:
    """The first violation that ``check`` finds, of the smallest configuration that has it."""
    for promise, _ in check(configuration):
        small = smallest(
            configuration, smaller, lambda c, promise=promise: promise in dict(check(c))
        )
        return [Violation(promise, dict(check(small))[promise], program(small, check.__name__))]
    return []


def smaller(c: Configuration):
    """Simpler configurations than ``c``, the simplest first."""
    for i in range(len(c.groups)):
        if len(c.groups) > 1:
            yield replace(c, groups=c.groups[:i] + c.groups[i + 1 :])
    for i, group in enumerate(c.groups):
        for simpler in _smaller_groups(group):
            yield replace(c, groups=(*c.groups[:i], simpler, *c.groups[i + 1 :]))
    if c.steps > 1:
        yield replace(c, steps=c.steps - 1)
    if c.factors:
        yield replace(c, factors=())
    if c.seed:
        yield replace(c, seed=0)


def _smaller_groups(group: Group):
    for i in range(len(group.parameters)):
        if len(group.parameters) > 1:
            yield replace(group, parameters=group.parameters[:i] + group.parameters[i + 1 :])
    for key in group.options:
        if key != "algorithm":
            yield replace(group, options={k: v for k, v in group.options.items() if k != key})
    if group.tensor_lr:
        yield replace(group, tensor_lr=False)
    for i, parameter in enumerate(group.parameters):
        for simpler in (replace(parameter, layout="contiguous"), replace(parameter, events=())):
            if simpler != parameter:
                yield replace(
                    group, parameters=(*group.parameters[:i], simpler, *group.parameters[i + 1 :])
                )


def program(configuration: Configuration, function: str) -> str:
    """A program that shows what a configuration does."""
    room = "configurations" if function == "differences" else "checkpoints"
    return (
        "import torch\n"
        "from polarstep import *\n"
        "from polarstep.maps import Warm\n"
        "from tests.fuzz.configurations import Configuration, Group, Parameter\n"
        f"from tests.fuzz.{room} import {function}\n\n"
        f"print({function}({configuration!r}))\n"
    )
