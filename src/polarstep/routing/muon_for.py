"""``muon_for``: one optimizer for a whole model, every parameter sent to the rule that suits it.

:mod:`polarstep.routing.choices` decides which rule that is. This module checks the arguments,
makes the optimizer, and leaves with it what it knows of the model (:mod:`polarstep.routing.choices`).
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Literal, ParamSpec, Protocol, overload

import torch
from torch import Tensor, nn

from polarstep.checked_values import check_arguments, with_known_names
from polarstep.groups import Nonfinite, Rounding, check_unflattened
from polarstep.maps import PolarMap
from polarstep.matrix import Layout
from polarstep.momentum import Momentum
from polarstep.optimizer import Muon
from polarstep.options import check_lr
from polarstep.others import AdamW, Elementwise, no_rule
from polarstep.ranks.distribution import BYTES_IN_FLIGHT
from polarstep.ranks.plans import AskedPlan
from polarstep.rates import ShapeScale
from polarstep.routing.anatomy import dissect, innermost
from polarstep.routing.choices import (
    Choices,
    Matcher,
    Origin,
    Parts,
    Routed,
    Target,
    check_shaped,
    is_muon,
)
from polarstep.routing.per_head import LETTERS
from polarstep.routing.routes import Route, left_out
from polarstep.transforms import NormalizedRows, Transform

__all__ = ["muon_for"]

P = ParamSpec("P")


class _ModelMayFollow(Protocol[P]):
    """A function of a model and options; without a model, it returns a function that takes one."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Muon: ...

    @overload
    def __call__(self, **options: Any) -> Callable[..., Muon]: ...


def _model_may_follow(build: Callable[P, Muon]) -> _ModelMayFollow[P]:
    """Let ``build`` be called with options alone; the result takes the model and further options."""

    known, checked = list(inspect.signature(build).parameters), with_known_names(build)

    @wraps(build)
    def call(*args: Any, **options: Any) -> Any:
        if args or "model" in options:
            return checked(*args, **options)
        check_arguments(build.__name__, options, known)
        return partial(checked, **options)

    return call


@_model_may_follow
def muon_for(
    model: nn.Module,
    lr: float | Tensor = 0.02,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    momentum_rule: Momentum = Momentum(),  # noqa: B008 — frozen
    polar: PolarMap | Literal["auto"] | None = "auto",
    weight_decay: float = 0.05,
    shape_scale: ShapeScale = "fan-ratio",
    transform: Transform | None = NormalizedRows(),  # noqa: B008 — frozen
    others: Elementwise = AdamW(),  # noqa: B008 — frozen
    embeddings: Elementwise | None = None,
    heads: Elementwise | None = None,
    routers: Elementwise | None = None,
    vectors: Elementwise | None = None,
    splits: Mapping[str, Parts] | None = None,
    per_head: bool | Sequence[str] = False,
    layouts: Mapping[str, Layout] | None = None,
    rules: Sequence[tuple[Matcher, Target]] = (),
    momentum_dtype: torch.dtype | None = None,
    rounding: Rounding = "nearest",
    nonfinite: Nonfinite = "propagate",
    seed: int = 0,
    fused: bool = True,
    plan: AskedPlan = "auto",
    process_group: Any = None,
    bytes_in_flight: int = BYTES_IN_FLIGHT,
) -> Muon:
    """Muon for the hidden matrices of ``model``, AdamW or another rule for the rest, in one optimizer.

    Embeddings and output heads are found by the type of the layer, by weight tying and by position.
    Convolutions (also grouped), attention, recurrent gates and stacked experts are read as the
    matrices they consist of. ``print(optimizer.routes)`` shows how each parameter is updated and why.
    Every group has a ``"role"``, by which its ``"lr_factor"`` can be changed later.

    The defaults are a recipe: a cheap map for each shape, normalized rows, a rate by the ratio of the
    sides of a matrix, weight decay on hidden matrices, and AdamW's rates by the size of the entries. The
    defaults of :class:`polarstep.Muon` are the paper's plain equation.

    Without a model, ``muon_for(**options)`` returns a function that takes the model and builds the
    optimizer, for trainers that make the optimizer themselves.

    Args:
        model: any module. A module inside ``torch.compile`` or DDP gives the same groups and names.
        lr: the learning rate of all groups. Each role has a factor beside it, the group's
            ``lr_factor`` (:mod:`polarstep.rates`): 1 for Muon, and the square root of the
            positions of a convolution's kernel with ``"fan-ratio"``; 7.5 times the size of the entries
            (their root mean square at the first step) for AdamW on embeddings and routers; for heads
            √(768/n) times this for n inputs; 0.15 for vectors.
        momentum: Muon's β. This and the next five arguments are :class:`polarstep.Muon`'s.
        nesterov: Nesterov or Polyak momentum in Muon.
        momentum_rule: another way to make M (:class:`polarstep.Momentum`).
        polar: Muon's polar map; ``"auto"`` is :class:`polarstep.Auto`, which chooses a map for each
            shape, and ``None`` the map of :class:`polarstep.Muon`.
        weight_decay: Muon's weight decay; ``others`` has its own, by default none. In every group a step
            takes ``lr · weight_decay`` of each entry.
        shape_scale: how Muon's learning rate depends on the shape of a matrix.
        transform: a change of T before it is applied; by default each row is divided by the root of its
            second moment over steps. ``None`` applies T as it is.
        others: the rule for all parameters that are not Muon's: ``AdamW(...)``, ``SGD(...)`` or another
            :class:`polarstep.Elementwise`. A rule with a rate of its own, as ``AdamW(lr=1e-3)``, begins
            at that rate, which stays in proportion to ``lr``.
        embeddings: instead of ``others``, for embeddings and the heads tied to them.
        heads: instead of ``others``, for output heads.
        routers: instead of ``others``, for the layers that choose experts.
        vectors: instead of ``others``, for biases, norms, gains and depthwise filters.
        splits: which weights are several matrices, as a projection to q, k and v. Keys are patterns of
            :mod:`fnmatch` on parameter names. A value is the number of equal parts along the outputs, or
            a tuple with the size of each part. It may also be a dict: ``{"rows": …}`` for parts along
            the outputs, ``{"columns": …}`` for parts along the inputs, as the heads of an output
            projection, and ``{"rows": (64, 64, 64), "repeats": 12}`` for parts that come in turn, head
            by head. Fused weights whose shapes say how they are fused are cut without an entry here; the
            value ``1`` leaves them whole.
        per_head: ``True`` gives each head of attention a polar factor of its own: q, k and v are cut
            along their outputs, the projection back along its inputs. A tuple of ``"q"``, ``"k"``,
            ``"v"`` and ``"o"`` cuts these alone. Start with ``("q", "k", "v")``: in small models cutting
            the projection back cost quality (docs/asked.md). ``splits`` win where both are about a
            weight.
        layouts: weights that are to be read otherwise than their module suggests, by such patterns:
            ``{"*.proj.weight": "transposed"}`` for weights stored inputs × outputs, or another
            ``layout`` of :class:`polarstep.Muon`.
        rules: exceptions, each a pair (which, target); the first that matches wins, and they come
            before the built-in :data:`polarstep.routing.roles.RULES`. *Which* is a pattern of
            names; a module of the model or a class of modules, for all parameters inside; or a function
            of (name, parameter). *Target* is ``AdamW(...)``, ``SGD(...)`` or another
            :class:`polarstep.Elementwise`; ``"muon"``, or a dict of options for a Muon group of its own;
            or ``None``, to leave the parameter out of the optimizer. Rules with a Muon target skip
            parameters of fewer than two dimensions.
        momentum_dtype: the precision in which Muon keeps its momentum. This and the arguments below
            are :class:`polarstep.Muon`'s.
        rounding: how parameters in bfloat16 and float16 are rounded, whichever rule updates them.
        nonfinite: what happens to a parameter whose gradient is not finite.
        seed: seed of the sketches.
        fused: whether a GPU uses Triton kernels and a CUDA graph.
        plan: how ranks share the work on sharded and replicated parameters.
        process_group: the ranks that hold copies of the plain parameters, as with DDP.
        bytes_in_flight: how much memory matrices may hold together while they wait for other ranks.

    Raises:
        ValueError: if no parameter would go to Muon, if a pattern matches no parameter, or if a
            parameter is not initialized yet.

    >>> from polarstep import Exact
    >>> layers = [nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)]
    >>> model = nn.Sequential(*layers)
    >>> optimizer = muon_for(model, polar=Exact(), transform=None, heads=AdamW(lr=1e-3))
    >>> print(optimizer.routes)
    parameter  as matrices  algorithm                 polar map         why
    0.weight   32×32        Muon, lr 0.02             Exact(rtol=None)  hidden: Linear
    2.weight   3×32         AdamW, 0.001 = lr × 0.05  –                 head: the model's last layer
    0.bias     32           AdamW, 0.003 = lr × 0.15  –                 vector: bias of Linear
    2.bias     3            AdamW, 0.003 = lr × 0.15  –                 vector: bias of Linear
    <BLANKLINE>
    Muon   1,024 parameters  in 1 tensor   88.7%
    AdamW    131 parameters  in 3 tensors  11.3%
    >>> for group in optimizer.param_groups:
    ...     if group["role"] == "head":
    ...         group["lr_factor"] /= 2

    The same optimizer from options first, model later:

    >>> build = muon_for(lr=0.02, polar=Exact())
    >>> build(nn.Sequential(*layers), heads=AdamW(lr=1e-3)).param_groups[0]["lr"]
    0.02
    """
    _check_model(model)
    by_role = {"embedding": embeddings, "head": heads, "router": routers, "vector": vectors}
    given = {f"{role}s": rule for role, rule in by_role.items()}
    _check_elementwise({"others": others} | given)
    anatomy = dissect(model)
    if not anatomy.sites:
        raise ValueError(
            f"{type(model).__name__} has no parameters: expected a model with layers; build them before "
            "the optimizer, and hold a list of layers in a torch.nn.ModuleList"
        )
    check_lr(lr)
    choices = Choices(
        lr,
        others,
        by_role,
        {} if splits is None else splits,
        {} if layouts is None else layouts,
        rules,
        shape_scale,
        _letters(per_head),
    )
    everything = choices.routed(anatomy)
    routed = [r for r in everything if r.site.parameter.requires_grad]
    frozen = [r for r in everything if not r.site.parameter.requires_grad]
    _check_cuts(routed)
    if not any(is_muon(r.target) for r in routed):
        raise ValueError(_nothing_for_muon(model, routed, len(frozen)))
    optimizer = Muon(
        choices.grouped(routed),
        lr,
        momentum=momentum,
        nesterov=nesterov,
        momentum_rule=momentum_rule,
        polar=polar,
        weight_decay=weight_decay,
        shape_scale=shape_scale,
        transform=transform,
        momentum_dtype=momentum_dtype,
        rounding=rounding,
        nonfinite=nonfinite,
        seed=seed,
        fused=fused,
        plan=plan,
        process_group=process_group,
        bytes_in_flight=bytes_in_flight,
    )
    # Copies, as the caller's list and dicts may change before a parameter is added.
    kept = replace(choices, splits={**choices.splits}, layouts={**choices.layouts}, rules=(*rules,))
    optimizer._origin = Origin(
        weakref.ref(innermost(model)),
        kept,
        reasons={r.site.name: r.why for r in routed},
        left_out=tuple(_left_out(everything)),
        elsewhere=frozenset(id(r.site.parameter) for r in routed if r.target is None),
        vectors=vectors or others,
    )
    return optimizer


def _letters(per_head: bool | Sequence[str]) -> tuple[str, ...]:
    """The projections that the argument ``per_head`` names."""
    if isinstance(per_head, bool):
        return LETTERS if per_head else ()
    if (
        not isinstance(per_head, Sequence)
        or isinstance(per_head, str)
        or set(per_head) - {*LETTERS}
    ):
        raise ValueError(
            f"per_head={per_head!r}: expected True, False or some of "
            f"""{", ".join(map(repr, LETTERS))}, as ("q", "k")"""
        )
    return tuple(per_head)


def _check_cuts(routed: Sequence[Routed]) -> None:
    """Raise if a pattern in ``splits`` matches only parameters that Muon does not update."""
    used = {r.cut for r in routed if is_muon(r.target)}
    for r in routed:
        if r.cut is not None and r.cut not in used:
            goes = "is left out" if r.target is None else f"goes to {type(r.target).__name__}"
            raise ValueError(
                f"{r.cut} has no effect: {r.site.name} {goes} ({r.why}), and only Muon "
                f'reads matrices; send it there with rules=[("{r.site.name}", "muon")], or leave it '
                "out of splits"
            )


def _left_out(everything: Sequence[Routed]) -> Iterator[Route]:
    """Table rows for parameters in no group: frozen, or left out by a rule."""
    for r in everything:
        if not r.site.parameter.requires_grad:
            yield left_out(r.site.name, r.site.parameter, "frozen: requires_grad=False")
        elif r.target is None:
            yield left_out(r.site.name, r.site.parameter, r.why)


def _nothing_for_muon(model: nn.Module, routed: Sequence[Routed], frozen: int) -> str:
    """The error message if no parameter goes to Muon: why, role by role, and what to do."""
    lines = [f"no parameter of {type(model).__name__} would be updated by Muon:"]
    examples: dict[str, str] = {}
    for r in routed:
        examples.setdefault(r.why, r.site.name)
    for why, count in Counter(r.why for r in routed).items():
        more = f" and {count - 1} more" if count > 1 else ""
        lines.append(f"  {examples[why]}{more}: {why}")
    if frozen and not routed:
        lines.append(f"  all {frozen} parameters: frozen, requires_grad=False")
        lines.append("Unfreeze what is to be trained, by requires_grad_(True), then call muon_for.")
        return "\n".join(lines)
    if frozen:
        lines.append(f"  {frozen} more: frozen, requires_grad=False")
    matrix = next((r.site.name for r in routed if r.site.parameter.ndim >= 2), None)
    if matrix is None:
        lines.append("Muon updates matrices, and none is trainable here; use torch.optim.AdamW.")
    else:
        lines.append(
            f'If one is a hidden matrix after all, say so: rules=[("{matrix}", "muon")]; '
            "if not, this model is one for torch.optim.AdamW."
        )
    return "\n".join(lines)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        remedy = (
            "give the model itself, as muon_for(model); matrices alone go to polarstep.Muon(params)"
        )
        parts = list(model.values()) if isinstance(model, dict) else model
        if isinstance(parts, list | tuple) and parts and isinstance(parts[0], nn.Module):
            holder = "ModuleDict" if isinstance(model, dict) else "ModuleList"
            remedy = (
                f"of several models make one, as torch.nn.{holder}(…), or an optimizer for each"
            )
        elif isinstance(model, type) and issubclass(model, nn.Module):
            remedy = f"give an instance, as {model.__name__}(…)"
        raise TypeError(f"model is a {type(model).__name__}: expected a torch.nn.Module; {remedy}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"model is a {type(model).__name__}, in which TorchScript has hidden the types of layers: "
            "expected the module it was made from; its parameters are the same, so give that to muon_for"
        )
    for path, module in model.named_modules():
        if _is_exported(module):
            where = f"has at {path!r}" if path else "is"
            raise TypeError(
                f"model {where} a {type(module).__name__} made by torch.export, which has hidden the "
                "types of layers: expected the module that was exported, which has the same parameters; "
                "of a program that was loaded from a file, or unflattened, give groups to polarstep.Muon"
            )
    check_shaped(model, "then call muon_for")
    check_unflattened(model)


def _is_exported(module: nn.Module) -> bool:
    """Whether ``torch.export`` has put modules without a type of their own in the place of layers.

    A module that ``torch.fx.symbolic_trace`` made still has the layers themselves.
    """
    if type(module).__module__ == "torch.export.unflatten":
        return True
    if not isinstance(module, torch.fx.GraphModule):
        return False
    layers = [each for each in module.modules() if each is not module and each._parameters]
    return bool(layers) and all(type(each) is nn.Module for each in layers)


def _check_elementwise(given: Mapping[str, Elementwise | None]) -> None:
    for name, rule in given.items():
        if not isinstance(rule, Elementwise) and (rule is not None or name == "others"):
            remedy = (
                "; for another rate give polarstep.AdamW(lr=1e-3), "
                'for Muon rules=[("name.*", "muon")]'
            )
            raise no_rule(f"{name}=", rule, remedy)
