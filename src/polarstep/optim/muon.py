"""Muon, the optimizer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT
from torch.utils.hooks import RemovableHandle

from polarstep import polar as maps
from polarstep import sketch as sketches
from polarstep.cuda_graphs import in_a_graph
from polarstep.matrix import Layout
from polarstep.optim.by_tensors import PlainStep
from polarstep.optim.collect import State, Work, collect, momentum_dtype
from polarstep.optim.groups import ELEMENTWISE, check_params, complete, restored
from polarstep.optim.replay import ReplayedStep
from polarstep.optim.resting import let_rest
from polarstep.optim.routes import Route, Routes, routes_of
from polarstep.optim.scaling import LrScale
from polarstep.optim.step import PolarHook
from polarstep.optim.transforms import NormalizedRows, Transform
from polarstep.polar import Finder, NewtonSchulz, PolarMap, Warm
from polarstep.sharded import local, whole
from polarstep.sketch import Sketch
from polarstep.torch_compile import as_it_is

__all__ = ["Muon"]

# Entries of a parameter's state that may be above float16's largest number: C, and its largest entry.
KEPT_BEYOND_FLOAT16 = ("momentum_buffer", "peak")

# A polar map is part of the hyperparameters and so of a checkpoint: let torch.load read it with
# weights_only=True, its default.
torch.serialization.add_safe_globals(
    [
        part
        for room in (maps, sketches)
        for part in map(vars(room).get, room.__all__)
        if isinstance(part, type) and issubclass(part, PolarMap | Finder | Sketch)
    ]
)
# A transform, and Warm under its module path of version 0.1.
torch.serialization.add_safe_globals([NormalizedRows, (Warm, "polarstep.sketch.warm.Warm")])


class Muon(Optimizer):
    r"""Muon with Nesterov or Polyak momentum and any polar map T (equation (1) of the paper).

    For every matrix X with gradient G, momentum β, learning rate η and weight decay λ::

        C ← βC + G
        M = βC + G   (Nesterov)   or   M = C   (Polyak)
        X ← (1 − ηλ)X − η · scale(m, n) · T(M)

    The momentum buffer holds C itself, a sum and not a moving average, in the precision of X, or in
    float32 for float16 parameters. Entries of C are at most max|G|/(1 − β), so gradients up to
    (1 − β)·max, with max the largest number of C's precision (1.7e37 for float32 at β = 0.95), keep C
    and T(M) finite. Larger gradients may end in an infinite C, as they would with torch's optimizers.
    Matrices of equal shape go through T as one batch, whichever groups they are in. A matrix whose
    gradient has become zero for good stops moving when its momentum has faded
    (:mod:`polarstep.optim.resting`).

    Args:
        params: parameters, named parameters or parameter groups. A group may override everything
            below, and a group with ``algorithm="adamw"`` or ``"sgd"`` is updated by that rule with
            its own options (:class:`polarstep.AdamW`, :class:`polarstep.SGD`): one optimizer for a
            whole model. :func:`polarstep.muon_for` builds such groups.
        lr: η.
        momentum: β in [0, 1).
        nesterov: Nesterov (the default) or Polyak momentum.
        polar: T; by default five PolarExpress steps in full space. ``"auto"`` is
            :class:`polarstep.Auto`, which chooses a map for each shape.
        weight_decay: λ, decoupled.
        lr_scale: ``"none"``; ``"spectral"``, √max(1, m/n); ``"rms"``, with which the entries of an
            update have a root mean square of 0.2·lr, so that AdamW's learning rates carry over; or a
            function of (m, n). ``"rms"`` is 0.2·√(mn/k) for a map with k singular values near one:
            0.2·√max(m, n) in full space, and more for a low-rank map, where k = ℓ.
        layout: how tensors of more than two dimensions are matrices
            (:meth:`polarstep.matrix.MatrixView.of`): ``"conv"``, ``"stack"`` or ``"auto"``.
        split_sizes: rows of the matrices of a fused projection; each gets its own polar factor.
        transform: a change of T before it is applied, as :class:`polarstep.NormalizedRows`.
        nonfinite: ``"propagate"`` behaves as torch does. ``"skip"`` does not update a parameter
            whose gradient has a NaN or an infinity: parameter and momentum stay, without weight
            decay. The check runs on the device, without waiting for it.
        seed: seed of the sketches, which are a function of (seed, shape, step).
        fused: on a GPU with Triton, update all matrices of a shape by a few launches, replayed as a
            CUDA graph (:mod:`polarstep.optim.replay`), in bfloat16 where plain torch operations
            would use bfloat16 products too. ``False``: plain torch operations.

    Inside a CUDA graph of your own (``with torch.cuda.graph(g): optimizer.step()``, after a few steps
    outside) a replay cannot know its step, so the sketches are drawn from torch's default generator of
    the GPU: fresh at every replay, and seeded by ``torch.manual_seed`` instead of ``seed``.

    A checkpoint holds the hyperparameters, polar maps included, and everything a sketch depends on.
    ``torch.load`` reads it back with ``weights_only=True``, its default, as long as ``polarstep`` is
    imported; a polar map or an ``lr_scale`` function of your own must be named to
    ``torch.serialization.add_safe_globals`` first.

    >>> from polarstep import Exact
    >>> W = torch.nn.Parameter(torch.eye(3))
    >>> W.grad = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> Muon([W], lr=0.5, polar=Exact()).step()
    >>> W.data
    tensor([[0.5000, 0.0000, 0.0000],
            [0.0000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.5000]])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        polar: PolarMap | Literal["auto"] | None = None,
        weight_decay: float = 0.0,
        lr_scale: LrScale = "spectral",
        *,
        layout: Layout = "auto",
        split_sizes: Sequence[int] | None = None,
        transform: Transform | None = None,
        nonfinite: str = "propagate",
        seed: int = 0,
        fused: bool = True,
    ) -> None:
        defaults = {
            "algorithm": "muon",
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "polar": NewtonSchulz(5, "polar-express") if polar is None else polar,
            "weight_decay": weight_decay,
            "lr_scale": lr_scale,
            "layout": layout,
            "split_sizes": split_sizes,
            "transform": transform,
            "nonfinite": nonfinite,
            "seed": seed,
            "fused": fused,
            "step": 0,
        }
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"params is a {type(params).__name__}, a whole model: let polarstep.muon_for(model) "
                "choose its hidden matrices, or give parameters"
            )
        defaults = complete({}, defaults)
        self._polar_hooks: OrderedDict[int, PolarHook] = OrderedDict()
        self._replayed = ReplayedStep()
        self._plain = PlainStep()
        self._left_out: tuple[Route, ...] = ()  # parameters that muon_for put in no group
        super().__init__(params, defaults)

    @property
    def routes(self) -> Routes:
        """How each parameter is updated, and why; ``print(optimizer.routes)`` shows a table."""
        return routes_of(self.param_groups, self._left_out)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, checked and completed with the defaults of its algorithm."""
        if not isinstance(param_group, dict):
            raise TypeError(f"a parameter group is a dict, got {type(param_group).__name__}")
        group = complete(_as_listed(param_group), self.defaults)
        check_params(group)
        # torch fills every default into every group; an AdamW group must not get Muon's.
        defaults, self.defaults = self.defaults, {}
        try:
            super().add_param_group(group)
        finally:
            self.defaults = defaults

    @overload
    def step(self, closure: None = ...) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
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
        works = [collect(group) for group in self.param_groups]
        muon = [work for work in works if work.group["algorithm"] == "muon"]
        hooks = tuple(self._polar_hooks.values())
        replayed = self._replayed
        if in_a_graph():
            _check_started(works, self.state)
            replayed = ReplayedStep()  # its tensors belong to the graph; no later step changes them
        let_rest(muon, self.state)
        updated = replayed(muon, self.state, hooks)
        self._plain(muon, self.state, hooks, skip=updated)
        for work in muon:
            work.group["step"] += 1
        for work in works:
            if work.group["algorithm"] in ELEMENTWISE:
                self._elementwise(work)

    @as_it_is(reason="a step of polarstep.Muon has kernels and a CUDA graph of its own")
    def _update_uncompiled(self) -> None:
        """:meth:`_update` outside torch.compile, which would recompile it at every step."""
        self._update()

    def _elementwise(self, work: Work) -> None:
        """AdamW or SGD on one group; parameter by parameter if some may have to be skipped."""
        if not work.params:
            return
        rule = ELEMENTWISE[work.group["algorithm"]]
        for p in work.params:
            if not self.state[p]:
                self.state[p].update(rule.new_state(p))
        params, grads = ([local(X) for X in each] for each in (work.params, work.grads))
        states = [{k: local(X) for k, X in self.state[p].items()} for p in work.params]
        if work.finite is None:
            rule.update(work.group, params, grads, states)
            return
        for p, grad, state, finite in zip(params, grads, states, work.finite, strict=True):
            rule.update(work.group, [p], [grad], [state], found_inf=1 - whole(finite).float())

    def register_polar_hook(self, hook: PolarHook) -> RemovableHandle:
        """Call ``hook(bucket)`` after each polar map with its input M and output T.

        For measuring: a hook may read everything and must change nothing.
        """
        handle = RemovableHandle(self._polar_hooks)
        self._polar_hooks[handle.id] = hook
        return handle

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint, as every optimizer of torch does.

        torch casts what it loads to the precision of the parameter. For float16 parameters the
        momentum C, which may be above float16's largest number, is loaded without that cast.
        """
        seen: list[dict[str, Any]] = []
        # The last of the hooks sees what the hooks of the user have made of the checkpoint.
        handle = self.register_load_state_dict_pre_hook(lambda _, given: seen.append(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for saved, group in zip(seen[0]["param_groups"], self.param_groups, strict=True):
            for key, p in zip(saved["params"], group["params"], strict=True):
                if p.dtype != torch.float16 or group["algorithm"] != "muon":
                    continue
                for name in KEPT_BEYOND_FLOAT16:
                    value = seen[0]["state"].get(key, {}).get(name)
                    if isinstance(value, Tensor):
                        self.state[p][name] = value.to(p.device, momentum_dtype(p.dtype), copy=True)

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle; hooks are left out, as in torch."""
        return super().__getstate__() | {"_left_out": self._left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled optimizer, without hooks; loading a checkpoint ends here too."""
        known = state.get("defaults") or self.defaults
        defaults = {key: known[key] for key in known if key != "differentiable"}  # torch's
        groups = state["param_groups"]
        now = self.__dict__.get("param_groups", [None] * len(groups))
        filled = [restored(group, old, defaults) for group, old in zip(groups, now, strict=True)]
        _check_buffers(state.get("state", {}))
        for group, options in zip(groups, filled, strict=True):  # all groups passed the checks
            group.update(options)
        super().__setstate__(state)
        for p, of_parameter in self.state.items():
            # torch leaves AdamW's counter on the device the checkpoint was read to.
            if isinstance(of_parameter.get("step"), Tensor):
                of_parameter["step"] = of_parameter["step"].to(p.device)
        self.__dict__.setdefault("_polar_hooks", OrderedDict())
        self.__dict__.setdefault("_replayed", ReplayedStep())
        self.__dict__.setdefault("_plain", PlainStep())
        self.__dict__.setdefault("_left_out", ())


def _check_buffers(state: State) -> None:
    """Raise for momentum that cannot be that of its parameter; one that is None counts as missing."""
    for p, of_parameter in state.items():
        if not isinstance(p, Tensor) or not isinstance(of_parameter, dict):
            continue
        if of_parameter.get("momentum_buffer", ...) is None:
            del of_parameter["momentum_buffer"]
        buffer = of_parameter.get("momentum_buffer")
        if buffer is not None and getattr(buffer, "shape", None) != p.shape:
            found = tuple(buffer.shape) if isinstance(buffer, Tensor) else type(buffer).__name__
            raise ValueError(
                f"momentum_buffer of a parameter of shape {tuple(p.shape)} is {found} in the "
                "checkpoint: expected the same shape; the checkpoint is of another model, or of "
                "one whose parameters came in another order"
            )


def _check_started(works: list[Work], state: State) -> None:
    """Raise if a graph captures the creation of a state, which every replay would repeat."""
    for work in works:
        for name, p in zip(work.names, work.params, strict=True):
            if not state.get(p):
                raise RuntimeError(
                    f"the first step of {name} is being captured in a CUDA graph, and every replay "
                    "would start from a state of zeros; call step() a few times before the capture, on "
                    "a side stream, as torch's notes on CUDA graphs do"
                )


def _as_listed(group: dict[str, Any]) -> dict[str, Any]:
    """``group`` with its parameters as a list, and names as a list of their own, as in torch."""
    if "params" not in group:
        raise ValueError(
            f"a parameter group has no 'params', only {', '.join(group)}; "
            "expected {'params': [...], ...}"
        )
    params = group["params"]
    if isinstance(params, Tensor):
        params = [params]
    elif isinstance(params, set):
        raise TypeError("parameters in a set have no order, which a checkpoint needs; give a list")
    else:
        params = list(params)
    if params and all(isinstance(p, tuple) for p in params):
        names = [name for name, _ in params]
        return group | {"params": [p for _, p in params], "param_names": names}
    return group | {"params": params}
