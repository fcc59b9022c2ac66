"""Muon, the optimizer."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim.optimizer import ParamsT
from torch.utils.hooks import RemovableHandle

from polarstep import kernels
from polarstep.bucket import Draws, PolarHook
from polarstep.checked_values import with_known_names
from polarstep.checkpoints.checkpoint import Checkpointed
from polarstep.context import (
    in_a_graph,
    inference_mode_off,
    not_compiled,
    numeric_context,
    on_device,
)
from polarstep.engines.replay import ReplayedStep
from polarstep.gradients import Work, collect
from polarstep.groups import (
    CheckedGroups,
    Group,
    Nonfinite,
    Rounding,
    check_new,
    check_params,
    listed_group,
    listed_params,
    named_uniquely,
    with_names,
)
from polarstep.maps import NewtonSchulz, PolarMap
from polarstep.matrix import Layout as MatrixLayout
from polarstep.mistakes import (
    LOOKED_AT,
    LOOKS_EVERY,
    MistakeWarnings,
    check_draws,
    check_started,
    check_state_shapes,
    refuse_measuring,
    refuse_shared,
    unheld_params,
)
from polarstep.momentum import Momentum
from polarstep.muon import step
from polarstep.options import check_and_normalize, complete
from polarstep.others import ELEMENTWISE, prepare_elementwise, step_elementwise
from polarstep.ranks.distribution import BYTES_IN_FLIGHT, Distribution, StepOverRanks
from polarstep.ranks.plans import AskedPlan
from polarstep.rates import ShapeScale, measure, measured_factor, to_be_measured
from polarstep.routing.choices import Origin, Routed, split_by_rule
from polarstep.routing.routes import Routes, routes_of
from polarstep.transforms import Transform

__all__ = ["Muon"]

# What a closure returns. torch's optimizers declare a float; most closures return a tensor.
Loss = TypeVar("Loss")


class Muon(Checkpointed):
    r"""Muon with Nesterov or Polyak momentum and any polar map T (equation (1) of the paper).

    For every matrix X with gradient G, momentum β, learning rate η and weight decay λ::

        C ← βC + G
        M = βC + G   (Nesterov)   or   M = C   (Polyak)
        X ← (1 − ηλ)X − η · scale(m, n) · T(M)

    The momentum buffer holds the sum C (``torch.optim.Muon`` keeps a moving average), in the precision
    of X, or in float32 for float16 parameters. Entries of C are at most max|G|/(1 − β). So C and T(M)
    stay finite for gradients up to 1 − β times the largest number of C's precision: 1.7e37 for float32
    at β = 0.95. Larger gradients may make C infinite, as they would with torch's optimizers.

    Matrices of equal shape go through T as one batch, whichever groups they are in. A matrix whose
    gradient has become zero for good stops moving when its momentum has faded
    (:mod:`polarstep.stale_momentum`).

    Args:
        params: parameters, named parameters or parameter groups. A group may override every option
            below but ``process_group``. A group with ``algorithm="adamw"``, ``"sgd"`` or the name of
            another :class:`polarstep.Elementwise` is updated by that rule, with the rule's own
            options, so that one optimizer serves a whole model. :func:`polarstep.muon_for` builds
            such groups.
        lr: η. A group may have an ``lr_factor`` on it (:mod:`polarstep.rates`).
        momentum: β in [0, 1).
        nesterov: Nesterov (the default) or Polyak momentum.
        momentum_rule: another way to make M (:class:`polarstep.Momentum`).
        polar: T; by default five PolarExpress steps in full space. ``"auto"`` is
            :class:`polarstep.Auto`, which chooses a map for each shape.
        weight_decay: λ, decoupled.
        shape_scale: the factor scale(m, n) on η. ``"none"``: 1. ``"spectral"``: √max(1, m/n).
            ``"fan-ratio"``: √(m/n), with which wide matrices take shorter steps. ``"rms"``: the factor
            with which the entries of an update have a root mean square (RMS) of 0.2·lr, as AdamW's
            updates have, roughly. Or a function of (m, n).
            ``"rms"`` is 0.2·√max(m, n) for maps in full space. For sketched maps, which compute ‖T‖_F,
            it is 0.2·√(mn)/‖T‖_F, but at most 0.6·√(mn/ℓ), since momentum of few directions would
            otherwise take very long steps. The RMS is smaller where ‖T‖²_F < ℓ/9, and in full space
            where some singular values are not lifted to one (:mod:`polarstep.rates` has
            figures).
        layout: how tensors are matrices (:meth:`polarstep.matrix.MatrixView.of`): ``"conv"``,
            ``"stack"``, ``"transposed"`` for weights stored inputs × outputs, or ``"auto"``.
        split_sizes: the number of outputs (rows) of each matrix in a fused projection. Each matrix gets
            a polar factor of its own.
        split_columns: the number of inputs (columns) of each matrix, as for the heads of an output
            projection.
        split_repeats: how often the parts of ``split_sizes`` come in turn. Where a weight has q, k and
            v of one head, then of the next, ``split_sizes=(64, 64, 64), split_repeats=12`` reads all
            rows of q as one matrix, and k and v alike.
        lr_factor: one more factor on η, of any rule. :func:`polarstep.muon_for` sets it for adapters
            (LoRA) and for the groups that are not Muon's.
        momentum_dtype: the precision in which C is kept: ``None`` for the parameter's own (float32 if
            that is float16), ``torch.float32``, ``torch.bfloat16``, or ``torch.int8`` for eight bits
            with a scale for each 128 entries.
        rounding: ``"compensated"`` keeps the rounding error of each entry of a parameter in bfloat16 or
            float16 for the next step, in two more bytes (:mod:`polarstep.state`).
            ``"nearest"`` drops it, as torch's optimizers do. Parameters in float32 are stepped alike.
        transform: a change of T before it is applied, as :class:`polarstep.NormalizedRows`.
        nonfinite: ``"propagate"`` behaves as torch does. ``"skip"`` does not update a parameter
            whose gradient has a NaN or an infinity: parameter and momentum stay, without weight
            decay. The check runs on the device, without waiting for it.
        seed: seed of the sketches, which are a function of (seed, shape, step).
        fused: ``True``: on NVIDIA GPUs from Ampere on, with Triton, a few kernels update all matrices of
            a shape, and a CUDA graph replays them (:mod:`polarstep.engines.replay`). Maps that
            do not round M to bfloat16, as :class:`polarstep.Exact`, are left out. Where ranks compute
            matrices for one another, the graph has the polar map alone
            (:mod:`polarstep.ranks.owned_graph`). ``False``: plain torch operations, no graph.
        plan: how ranks share the work on sharded and replicated parameters (docs/distributed.md):
            ``"auto"`` takes the cheapest plan for each parameter; ``"local"``, ``"owner"``,
            ``"replicated"`` or ``"gather"`` is taken wherever it is possible. A group may have a
            ``"plan"`` of its own. The result of a step does not depend on it.
        bytes_in_flight: how much memory matrices may hold together while they wait for other ranks.
            While some wait, others are computed. Less memory may make a step slower; the result is the
            same.
        process_group: the ranks that hold copies of the plain parameters, as with DDP; they then share
            the work. ``torch.distributed.group.WORLD`` for all ranks. By default each process updates
            its plain parameters by itself. The ranks of a ``DTensor`` are those of its mesh.

    Inside a CUDA graph of your own (``with torch.cuda.graph(g): optimizer.step()``, after a few steps
    outside) a replay cannot know its step, so the sketches are drawn from torch's default generator of
    the GPU: fresh at every replay, and seeded by ``torch.manual_seed`` instead of ``seed``.

    ``copy.deepcopy((model, optimizer))`` steps as the original would, but has neither its hooks nor its
    process group. A pickle also lacks what :func:`polarstep.muon_for` left with the optimizer: the
    model, and the rules for parameters that are added later.

    A checkpoint holds the hyperparameters, polar maps included, and everything a sketch depends on.
    :meth:`state_dict` is plain data (:mod:`polarstep.checkpoints.plain`), which ``torch.load``
    reads with ``weights_only=True``, its default. Define the class of a map or a rule of your own before
    :meth:`load_state_dict`. Of a ``shape_scale`` function a checkpoint has the name alone: give a
    function of that name to the new optimizer.

    >>> from polarstep import Exact
    >>> W = torch.nn.Parameter(torch.eye(3))
    >>> W.grad = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> Muon([W], lr=0.5, polar=Exact()).step()
    >>> W.data
    tensor([[0.5000, 0.0000, 0.0000],
            [0.0000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.5000]])
    """

    @with_known_names
    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.02,
        *,  # torch.optim.Muon has weight_decay here, and torch.optim.SGD momentum
        momentum: float = 0.95,
        nesterov: bool = True,
        momentum_rule: Momentum = Momentum(),  # noqa: B008 — frozen
        polar: PolarMap | Literal["auto"] | None = None,
        weight_decay: float = 0.0,
        shape_scale: ShapeScale = "spectral",
        layout: MatrixLayout = "auto",
        split_sizes: Sequence[int] | None = None,
        split_columns: Sequence[int] | None = None,
        split_repeats: int = 1,
        lr_factor: float = 1.0,
        momentum_dtype: torch.dtype | None = None,
        rounding: Rounding = "nearest",
        transform: Transform | None = None,
        nonfinite: Nonfinite = "propagate",
        seed: int = 0,
        fused: bool = True,
        plan: AskedPlan = "auto",
        process_group: Any = None,
        bytes_in_flight: int = BYTES_IN_FLIGHT,
    ) -> None:
        defaults = {
            "algorithm": "muon",
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "momentum_rule": momentum_rule,
            "polar": NewtonSchulz() if polar is None else polar,
            "weight_decay": weight_decay,
            "shape_scale": shape_scale,
            "layout": layout,
            "split_sizes": split_sizes,
            "split_columns": split_columns,
            "split_repeats": split_repeats,
            "lr_factor": lr_factor,
            "momentum_dtype": momentum_dtype,
            "rounding": rounding,
            "transform": transform,
            "nonfinite": nonfinite,
            "seed": seed,
            "fused": fused,
            "step": 0,
        }
        self._start(plan, process_group, bytes_in_flight=bytes_in_flight)
        self._is_made = False
        super().__init__(listed_params(params), complete({}, defaults))
        self._is_made = True

    def _start(  # type: ignore[override]
        self,
        plan: AskedPlan = "auto",
        process_group: Any = None,
        origin: Origin | None = None,
        measured: dict[str, float | None] | None = None,
        bytes_in_flight: int = BYTES_IN_FLIGHT,
    ) -> None:
        self._polar_hooks: OrderedDict[int, PolarHook] = OrderedDict()
        self._everywhere: set[int] = set()  # the hooks that all ranks must have
        self._replayed = ReplayedStep()
        self._draws = Draws()
        self._distribution = Distribution(plan, process_group, bytes_in_flight)
        self._over_ranks = StepOverRanks(self._distribution)
        self._checked = CheckedGroups()
        self._steps = 0  # that this object has taken
        self._unheld: list[str] = []  # parameters with a gradient that no group holds
        self._has_kernels = False  # whether kernels run on the device of some parameter
        self._has_news = True  # whether something has changed since the last step
        self._is_made = True  # False while the first groups are added
        self._origin = Origin() if origin is None else origin  # muon_for puts another one here
        # The measured lr_factor by the name of a group.
        self._measured: dict[str, float | None] = {} if measured is None else measured
        self._warnings = MistakeWarnings()

    def _kept(self) -> dict[str, Any]:
        # A process group cannot be pickled, nor need a model be.
        its, origin = self._distribution, self._origin.pickled()
        return {
            "plan": its.plan,
            "bytes_in_flight": its.bytes_in_flight,
            "origin": origin,
            "measured": self._measured,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> Muon:
        """A copy that steps as the original would.

        If the model is copied along, as in ``copy.deepcopy((model, optimizer))`` or where the model
        holds its optimizer, the copy knows the copied model, and :func:`polarstep.muon_for`'s rules for
        layers that are added later.
        """
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._origin = self._origin.copied(memo)
        return twin

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint; options that it lacks stay as they are here.

        Parameters are matched by name where both sides have the same names, and by their order where
        they have no name in common (:mod:`polarstep.checkpoints.matching`). A checkpoint that is
        refused changes nothing.

        Raises:
            ValueError: if some names are the same and others are not, or if the checkpoint has other
                numbers of parameters, states of other shapes, or options that are not accepted.
        """
        super().load_state_dict(state_dict)
        self._checked = CheckedGroups()
        self._warnings.loaded(self.param_groups, self.state)
        for group in self.param_groups:
            if group.get("name") in self._measured:
                self._measured[group["name"]] = measured_factor(group)

    @property
    def routes(self) -> Routes:
        """How each parameter is updated, and why; ``print(optimizer.routes)`` shows a table."""
        choice = self._distribution.choice
        known = self._origin
        return routes_of(self.param_groups, known.reasons, known.left_out, choice, self._measured)

    def __repr__(self) -> str:
        """A line for each role and rule; :attr:`routes` has a row for each parameter."""
        found: dict[tuple[str, str], list[Tensor]] = {}
        for group in self.param_groups:
            algorithm, factor = group["algorithm"], group["lr_factor"]
            if algorithm == "muon":
                parts = [group["polar"], *([group["transform"]] if group["transform"] else [])]
                rule = f"Muon with {', '.join(type(part).__name__ for part in parts)}"
            else:
                rule = ELEMENTWISE[algorithm].__name__
            times = " × a factor to be measured" if factor is None else f" × {factor:.3g}"
            told = f"{rule}, lr {float(group['lr']):g}{'' if factor == 1 else times}"
            found.setdefault((group.get("role") or algorithm, told), []).extend(group["params"])
        lines = []
        for (role, told), params in found.items():
            entries, tensors = sum(p.numel() for p in params), "tensors" if params[1:] else "tensor"
            lines.append(f"  {role}: {told}, {entries:,} parameters in {len(params)} {tensors}")
        return "\n".join([f"{type(self).__name__} (", *lines, ")"])

    def _repr_html_(self) -> str:
        return self.routes._repr_html_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checked and completed with the defaults of its algorithm.

        A group without ``"algorithm"`` that is added to an existing optimizer may hold any parameters.
        If :func:`polarstep.muon_for` made the optimizer, each parameter of its model gets the rule that
        ``muon_for`` has for it, whether it was frozen then or has come into the model since. Of all
        other parameters, vectors get the rule ``vectors`` of ``muon_for``, or AdamW, and matrices get
        Muon. The group becomes one group for each rule, with the options that the rule knows
        (:mod:`polarstep.routing.choices`).
        """
        if not isinstance(param_group, dict):
            raise TypeError(
                f"the parameter group is a {type(param_group).__name__}: expected a dict, as "
                '{"params": parameters, "lr": 0.02}'
            )
        listed = listed_group(param_group)
        groups, found = [listed], dict[int, Routed]()
        if self._is_made:
            found = self._origin.routed(listed["params"])
            groups = split_by_rule(listed, found, self._origin, self.defaults)
        known = {key: routed.site.name for key, routed in found.items()}
        ready: list[Group] = []
        for group in groups:
            group = complete(group, self.defaults)
            before = [*self.param_groups, *ready]
            check_params(group, before)
            check_new(group, before)
            if self._is_made:
                group = with_names(group, before, known)
            ready.append(named_uniquely(group, before))
        for group in ready:
            self._add(group)
        self._origin.note(ready, found)

    def _add(self, group: Group) -> None:
        # torch fills every default into every group; an AdamW group must not get Muon's.
        defaults, self.defaults = self.defaults, {}
        try:
            super().add_param_group(group)
        finally:
            self.defaults = defaults
        if group["lr_factor"] is None:
            self._measured[group["name"]] = None

    @overload
    def step(self, closure: None = ...) -> None: ...

    @overload
    def step(self, closure: Callable[[], Loss]) -> Loss: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss | None:
        """Update every parameter that has a gradient; ``closure``, if given, computes them first.

        Returns what ``closure`` returns: the loss, a number or a tensor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            self._update_uncompiled()
        else:
            self._update()
        return loss

    def _update(self) -> None:
        # A step chooses its own precision. Tensors of a state that were made in torch.inference_mode()
        # could not be changed by later steps outside it. Buckets on further GPUs enter their own.
        gpu = self._first_gpu()
        with numeric_context(), on_device(gpu), inference_mode_off():
            self._update_groups(captured=gpu is not None and in_a_graph())

    def _first_gpu(self) -> torch.device | None:
        """The GPU of the first parameter that is on one."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return None
        params = (p for group in self.param_groups for p in group["params"])
        return next((p.device for p in params if p.is_cuda), None)

    def _update_groups(self, *, captured: bool) -> None:
        error = self._error_of_changes()  # on ranks all raise it together
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        spread = self._distribution.spread(self.param_groups) if ranks else []
        if spread and captured:
            refuse_shared()
        hooks = tuple(self._polar_hooks.values())
        if spread:
            works = self._over_ranks.collected(
                self.param_groups,
                self.state,
                spread,
                error=error,
                hooked=bool(hooks),
                everywhere=len(self._everywhere & self._polar_hooks.keys()),
            )
        else:
            if error is not None:
                raise error
            works = [
                collect(group, captured=captured, on_ranks=ranks) for group in self.param_groups
            ]
        if any(group["lr_factor"] is None for group in self.param_groups):
            self._measure(captured=captured, errors=self._over_ranks.errors if spread else None)
        if not spread:
            self._warn(works)
        self._update_works(works, hooks, ranks=ranks, shared=bool(spread))
        # Kernels and torch's fused rules write where autograd does not see it. Without a new version, a
        # backward pass through a graph from before the step would use the changed weights in silence.
        increment_version(p for work in works for p in work.params)
        if spread:
            # Last, as a filter may turn a warning into an error on one rank alone.
            self._over_ranks.end_step(self.param_groups)
            self._warn(works)

    def _measure(self, *, captured: bool, errors: list[Exception] | None) -> None:
        """Set the factors on the learning rate that depend on the size of entries."""
        if unmeasured := to_be_measured(self.param_groups):
            if captured:
                refuse_measuring(unmeasured)
            sized = measure(unmeasured, errors)
            self._measured |= {group["name"]: group["lr_factor"] for group in sized}

    def _error_of_changes(self) -> Exception | None:
        """Check what has changed since the last step, and return what is wrong with it, if anything."""
        groups = self.param_groups
        self._unheld, self._has_news = [], self._steps + 1 == LOOKED_AT
        try:
            has_gradient = any(p.grad is not None for group in groups for p in group["params"])
            if self._steps % LOOKS_EVERY == 0 or not has_gradient:
                known = self._origin
                model = None if known.model is None else known.model()
                self._unheld = unheld_params(groups, model, known.elsewhere)
            for number, group in enumerate(groups):
                if self._checked.has_changed(number, group):
                    check_and_normalize(group)
                    check_state_shapes(group, self.state)
                    self._checked.note(number, group)
                    self._has_news = True
            if self._has_news:
                devices = {p.device for group in groups for p in group["params"]}
                self._has_kernels = any(map(kernels.available, devices))
        except Exception as found:
            return found
        self._steps += 1
        return None

    def _warn(self, works: list[Work]) -> None:
        """Warn of mistakes in a step on ``works``, where there may be any."""
        updated = any(work.params for work in works)
        if self._has_news or self._unheld or not updated:
            self._warnings.of_step(self.param_groups, self._steps, self._unheld, updated=updated)

    def _update_works(
        self, works: list[Work], hooks: tuple[PolarHook, ...], *, ranks: bool, shared: bool
    ) -> None:
        """Update Muon's matrices, then all other parameters.

        ``ranks``: torch.distributed is initialized; ``shared``: other ranks take part in this step.
        """
        muon = [work for work in works if work.group["algorithm"] == "muon"]
        others = [work for work in works if work.group["algorithm"] in ELEMENTWISE]
        replayed = self._replayed if self._has_kernels else None
        if any(work.captured for work in works):
            check_started(works, self.state)
            check_draws(muon, self.state)
            # Its tensors belong to the graph, and no later step changes them.
            replayed = ReplayedStep() if self._has_kernels else None
        if not shared:
            for work in others:
                prepare_elementwise(work, self.state)
        if shared:
            self._over_ranks.update_shares(muon, self.state, replayed, self._draws, hooks)
        elif ranks and self._distribution.whole(self.param_groups):
            self._over_ranks.update_alone(muon, self.state, replayed, self._draws, hooks)
        else:
            step(muon, self.state, self._draws, replayed, hooks)
        for work in muon:
            work.group["step"] += 1
        for work in others:
            if shared:
                self._over_ranks.update_elementwise(work, self.state)
            else:
                step_elementwise(work, self.state)

    @not_compiled(reason="a step of polarstep.Muon has kernels and a CUDA graph of its own")
    def _update_uncompiled(self) -> None:
        """:meth:`_update` outside torch.compile, which would recompile it at every step."""
        self._update()

    def register_polar_hook(self, hook: PolarHook, *, everywhere: bool = False) -> RemovableHandle:
        """Call ``hook(bucket)`` after each polar map with its input M and output T.

        For measuring: a hook may read everything and must change nothing. ``everywhere``: all ranks
        must have such a hook, as it or its owner gathers tensors from them; a step of ranks that have
        not raises an error, where they would wait for one another.
        """
        handle = RemovableHandle(self._polar_hooks)
        self._polar_hooks[handle.id] = hook
        if everywhere:
            self._everywhere = {*self._everywhere & self._polar_hooks.keys(), handle.id}
        return handle
