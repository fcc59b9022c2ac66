"""The phases of a Muon step: collect → momentum → polar of a bucket → apply.

Equation (1) of the paper, for every parameter X with gradient G:

    C ← βC + G,    M = βC + G (Nesterov) or M = C (Polyak),    X ← X − η·scale·T(M).

Each phase is a function on the work of one parameter group, but for the polar phase, which gathers
the matrices of equal shape from all groups into buckets and calls the polar map once a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from polarstep import rng
from polarstep.capture import in_a_graph
from polarstep.matrix import MatrixView
from polarstep.optim.groups import Group, check_options, named_params, view_of
from polarstep.optim.scaling import resolve_scale
from polarstep.polar import LowRank
from polarstep.polar.base import Factors, Kept, PolarMap
from polarstep.sharded import is_sharded, placed_like, whole
from polarstep.sketch.warm import Start

__all__ = [
    "Bucket",
    "Drawn",
    "PolarHook",
    "State",
    "Work",
    "apply",
    "basis_key",
    "collect",
    "ensure_buffers",
    "generator_key",
    "in_parts",
    "kept_key",
    "momentum",
    "polar",
    "start_entries",
    "whitening_key",
]

Item = TypeVar("Item")

# What an optimizer keeps per parameter, as torch has it.
State = dict[Tensor, dict[str, Any]]

# Random numbers by generator, width, device and precision.
Drawn = dict[tuple[Any, ...], Tensor]

# A block in a bucket: its work, the indices of parameter and block; and with the M of the block.
_Place = tuple["Work", int, int]
_Member = tuple["Work", int, int, Tensor]

# Bytes of M that are gathered from shards at a time; a larger bucket is worked off in parts.
LARGEST_GATHERED = 512 * 2**20


@dataclass
class Work:
    """What one step does to one parameter group."""

    group: Group
    names: list[str]
    params: list[Tensor]
    grads: list[Tensor]
    finite: list[Tensor] | None  # a flag on the device per parameter, where nonfinite="skip"
    views: list[MatrixView] = field(default_factory=list)
    M: list[Tensor] = field(default_factory=list)  # per parameter
    T: list[list[Tensor]] = field(default_factory=list)  # per parameter and block

    def select(self, indices: list[int]) -> Work:
        """The same for some of the parameters, before any phase has run."""
        return Work(
            self.group,
            [self.names[i] for i in indices],
            [self.params[i] for i in indices],
            [self.grads[i] for i in indices],
            None if self.finite is None else [self.finite[i] for i in indices],
            [self.views[i] for i in indices],
        )


@dataclass(frozen=True)
class Bucket:
    """The matrices of one shape that went through a polar map together.

    A hook receives it to look, not to touch: ``M`` may be the momentum buffer itself.
    """

    map: PolarMap
    step: int
    generator_key: tuple[int | str, ...]
    names: tuple[str, ...]  # of the parameter behind each matrix of the batch
    params: tuple[Tensor, ...]
    M: Tensor  # (batch, m, n)
    T: Tensor  # (batch, m, n)
    factors: Factors | None = None  # where the map works in a subspace


PolarHook = Callable[[Bucket], None]


def collect(group: Group) -> Work:
    """The parameters that have a gradient, checked; nothing is changed yet.

    A parameter without one is left alone altogether, weight decay included.
    """
    check_options(group)
    names, params, grads = [], [], []
    for name, p in named_params(group):
        grad = p.grad
        if grad is None:
            continue
        if grad.layout != torch.strided:
            raise TypeError(
                f"{name} has a gradient of layout {grad.layout}: expected a dense one; "
                "build its module with sparse=False"
            )
        if grad.shape != p.shape:
            raise ValueError(
                f"{name} has shape {tuple(p.shape)}, but its gradient has shape "
                f"{tuple(grad.shape)}; call zero_grad() after changing a parameter's shape"
            )
        names.append(name)
        params.append(p)
        grads.append(placed_like(grad, p))
    finite = None
    if group["nonfinite"] == "skip" and grads:
        finite = _are_finite(grads)
    views = []
    if group["algorithm"] == "muon":
        views = [view_of(group, p, name) for name, p in zip(names, params, strict=True)]
    return Work(group, names, params, grads, finite, views)


def _are_finite(grads: list[Tensor]) -> list[Tensor]:
    """A flag per gradient, on its device; nothing here waits for the device.

    The largest magnitude is NaN or infinite just where some entry is. One launch finds those of
    all gradients on a GPU; a CPU is twenty times as fast at finding extremes as at that norm.
    """
    if all(grad.is_cuda and grad.numel() > 0 for grad in grads):
        return [torch.isfinite(value) for value in torch._foreach_norm(grads, ord=float("inf"))]
    return [
        torch.isfinite(grad.amax()) & torch.isfinite(grad.amin())
        if grad.numel() > 0
        else torch.ones((), dtype=torch.bool, device=grad.device)
        for grad in grads
    ]


def ensure_buffers(work: Work, state: State) -> None:
    """``C = 0`` for parameters that have not been updated yet."""
    for p in work.params:
        if "momentum_buffer" not in state[p]:
            state[p]["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)


def momentum(work: Work, state: State) -> None:
    """``C ← βC + G`` in place, and M from it."""
    if not work.params:
        return
    ensure_buffers(work, state)
    C = [state[p]["momentum_buffer"] for p in work.params]
    beta, nesterov = work.group["momentum"], work.group["nesterov"]
    if work.finite is None:
        torch._foreach_mul_(C, beta)
        torch._foreach_add_(C, work.grads)
        if nesterov:
            work.M = list(torch._foreach_add(work.grads, C, alpha=beta))
        else:
            work.M = C
        return
    for c, grad, finite in zip(C, work.grads, work.finite, strict=True):
        c.copy_(torch.where(finite, beta * c + grad, c))
        m = torch.where(finite, beta * c + grad, 0) if nesterov else torch.where(finite, c, 0)
        work.M.append(m)  # zero where the gradient was not finite, and T(0) = 0


def basis_key(block: int) -> str:
    """Where the state of a parameter keeps S of a warm sketch for its ``block``-th block."""
    return "basis" if block == 0 else f"basis.{block}"


def whitening_key(block: int) -> str:
    """Where it keeps V, if there is one."""
    return "whitening" if block == 0 else f"whitening.{block}"


def kept_key(block: int) -> str:
    """Where it keeps a basis for the next steps."""
    return "kept" if block == 0 else f"kept.{block}"


def start_entries(block: int, start: Start | Kept) -> tuple[tuple[str, Tensor | None], ...]:
    """What the state of a parameter has of a start: keys, and what belongs there."""
    if isinstance(start, Kept):
        return ((kept_key(block), start.Qt),)
    return (basis_key(block), start.S), (whitening_key(block), start.V)


def generator_key(
    polar_map: PolarMap, seed: int, m: int, n: int, step: int
) -> tuple[int | str, ...]:
    """Of the generator of the sketch of m×n matrices, so that a resumed run draws the same numbers.

    A warm sketch has the same ones at every step. They are there so that no direction is left out,
    which any numbers in general position see to, and drawing them once leaves a step without a launch
    outside its graph.
    """
    return (seed, f"{m}x{n}") if polar_map.is_warm else (seed, f"{m}x{n}", step)


def polar(
    works: Iterable[Work],
    state: State,
    hooks: Iterable[PolarHook] = (),
    drawn: Drawn | None = None,
) -> None:
    """T of every block of every M, one call of the polar map a bucket.

    No parameter's sketch depends on which others are in its bucket (:func:`generator_key`). In
    ``drawn``, which outlives a step, are the numbers that are the same at every one.
    """
    drawn = {} if drawn is None else drawn
    buckets: dict[tuple[Any, ...], list[_Place]] = {}
    for work in works:
        group = work.group
        for i, (view, M) in enumerate(zip(work.views, work.M, strict=True)):
            work.T.append([M] * len(view.shapes))  # replaced below, block by block
            for j, (_, m, n) in enumerate(view.shapes):
                key = (
                    group["polar"],
                    group["seed"],
                    group["step"],
                    (m, n),
                    M.dtype,
                    M.device,
                    is_sharded(M),
                )
                buckets.setdefault(key, []).append((work, i, j))
    for (polar_map, seed, step, (m, n), dtype, *_, sharded), places in buckets.items():
        numbers_key = generator_key(polar_map, seed, m, n, step)
        nbytes = max(1, m * n * dtype.itemsize)
        parts = in_parts(places, _matrices, LARGEST_GATHERED // nbytes) if sharded else [places]
        for part in parts:
            _polar_of_bucket(polar_map, numbers_key, part, state, hooks, drawn)


def _matrices(place: _Place) -> int:
    """How many matrices a block is."""
    work, i, j = place
    return work.views[i].shapes[j][0]


def in_parts(
    items: Iterable[Item], count: Callable[[Item], int], most: int
) -> Iterator[list[Item]]:
    """Lists of ``items`` with at most ``most`` matrices each; a single item is not cut.

    >>> list(in_parts([1, 1, 1, 5, 2], lambda matrices: matrices, most=2))
    [[1, 1], [1], [5], [2]]
    """
    part, size = list[Item](), 0
    for item in items:
        if part and size + count(item) > most:
            yield part
            part, size = [], 0
        part.append(item)
        size += count(item)
    yield part


def _polar_of_bucket(
    polar_map: PolarMap,
    numbers_key: tuple[int | str, ...],
    places: list[_Place],
    state: State,
    hooks: Iterable[PolarHook],
    drawn: Drawn,
) -> None:
    blocks_of: dict[tuple[int, int], list[Tensor]] = {}  # of several blocks, M is gathered once
    for work, i, _ in places:
        if (id(work), i) not in blocks_of:
            blocks_of[id(work), i] = work.views[i].blocks(whole(work.M[i]))
    members = [(work, i, j, blocks_of[id(work), i][j]) for work, i, j in places]
    blocks = [block for *_, block in members]
    M = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    generator = rng.generator(*numbers_key, device=M.device) if polar_map.is_random else None
    factors, start = None, None
    if hooks or polar_map.is_warm or polar_map.keeps_basis:
        start = _start(members, state, polar_map, numbers_key)
        numbers = _numbers(polar_map, numbers_key, M, drawn) if polar_map.is_warm else None
        T, factors = polar_map.factored(M, generator=generator, start=start, numbers=numbers)
    else:
        T = polar_map(M, generator=generator)
    if factors is not None and factors.start is not None:
        _remember(members, state, factors.start)
    elif factors is not None and polar_map.keeps_basis and start is None:
        _remember(members, state, Kept(factors.Q.mT))
    parts = torch.split(T, [len(block) for block in blocks])
    for (work, i, j, _), part in zip(members, parts, strict=True):
        p, view = work.params[i], work.views[i]
        # Of a whole parameter a rank keeps its own part at once; blocks wait for each other.
        alone = len(view.shapes) == 1 and is_sharded(p)
        work.T[i][j] = placed_like(view.assemble([part], p.shape), p) if alone else part
    if hooks:
        bucket = _bucket(polar_map, numbers_key, members, M, T, factors)
        for hook in hooks:
            hook(bucket)


def _numbers(
    polar_map: PolarMap, key: tuple[int | str, ...], M: Tensor, drawn: Drawn
) -> Tensor | None:
    """The numbers of a warm sketch, drawn once; not for what is captured, whose replays draw anew."""
    assert isinstance(polar_map, LowRank)
    if in_a_graph():
        return None
    place = (*key, polar_map.width, M.device, M.dtype)
    if place not in drawn:
        drawn[place] = polar_map.numbers_for(M, rng.generator(*key, device=M.device))
    return drawn[place]


def apply(work: Work) -> None:
    """``X ← (1 − ηλ)X − η·scale·T``: decoupled weight decay, then the step."""
    if not work.params:
        return
    group = work.group
    lr, decay, scale = group["lr"], group["weight_decay"], resolve_scale(group["lr_scale"])
    if isinstance(lr, Tensor):
        lr = lr.reshape(())  # torch allows one element in any number of dimensions
    if decay != 0:
        if work.finite is None:
            torch._foreach_mul_(work.params, 1 - lr * decay)
        else:
            for p, finite in zip(work.params, work.finite, strict=True):
                p.copy_(torch.where(finite, p * (1 - lr * decay), p))
    # By step size, so that scaling T and adding it is one pass over memory.
    by_size: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
    for p, view, T in zip(work.params, work.views, work.T, strict=True):
        sizes = [-lr * scale(m, n) for _, m, n in view.shapes]
        size = sizes[0]
        if len(T) > 1 or isinstance(lr, Tensor):
            T, size = [t * each for t, each in zip(T, sizes, strict=True)], 1.0
        params, updates = by_size.setdefault(size, ([], []))
        params.append(p)
        updates.append(placed_like(view.assemble(T, p.shape), p))
    for size, (params, updates) in by_size.items():
        torch._foreach_add_(params, updates, alpha=size)


def _start(
    members: list[_Member],
    state: State,
    polar_map: PolarMap,
    numbers_key: tuple[int | str, ...],
) -> Start | Kept | None:
    """What earlier steps have left for this one."""
    if polar_map.is_warm:
        return _recall(members, state, polar_map, numbers_key)
    if polar_map.keeps_basis:
        return _kept(members, state, polar_map)
    return None


def _kept(members: list[_Member], state: State, polar_map: PolarMap) -> Kept | None:
    """The bases of a bucket, unless it is time for new ones or one of them is missing."""
    assert isinstance(polar_map, LowRank)
    # A graph of somebody's own repeats one step for ever, and should not be one without a new basis.
    if in_a_graph() or polar_map.makes_basis(members[0][0].group["step"]):
        return None
    known = []
    for work, i, j, block in members:
        Qt = state[work.params[i]].get(kept_key(j))
        if Qt is None or Qt.shape != (len(block), polar_map.width, min(block.shape[-2:])):
            return None
        known.append(Qt)
    return Kept(torch.cat(known))


def _recall(
    members: list[_Member],
    state: State,
    polar_map: PolarMap,
    numbers_key: tuple[int | str, ...],
) -> Start | None:
    """What the last step of every matrix of a bucket left; a Gaussian sketch for new ones.

    One of another width counts for none: somebody has changed the rank since.
    """
    assert isinstance(polar_map, LowRank)
    starts, none_known = list[Start](), True
    for work, i, j, block in members:
        of_parameter = state[work.params[i]]
        basis, whitening = of_parameter.get(basis_key(j)), of_parameter.get(whitening_key(j))
        shape = (len(block), polar_map.width, max(block.shape[-2:]))
        if basis is None or basis.shape != shape:
            m, n = block.shape[-2:]
            fresh = polar_map.draw(m, n, rng.generator(*numbers_key, device=block.device))
            starts.append(Start(fresh.mT.to(block.dtype).expand(shape)))
        else:
            starts.append(Start(basis, whitening))
            none_known = False
    return None if none_known else Start.joined(starts)


def _remember(members: list[_Member], state: State, start: Start | Kept) -> None:
    """Keep what the next step starts from, but where the parameter is skipped.

    In the parameter's own precision, to which torch casts what it loads from a checkpoint; and in
    one place, where somebody's own CUDA graph finds it at its next replay.
    """
    counts = [len(block) for *_, block in members]
    parts: list[Start | Kept] = [*start.split(counts)]
    for (work, i, j, _), part in zip(members, parts, strict=True):
        p = work.params[i]
        finite = None if work.finite is None else whole(work.finite[i])
        for key, value in start_entries(j, part):
            if value is None:
                state[p].pop(key, None)
                continue
            value, known = value.to(p.dtype), state[p].get(key)
            if known is None or (known.shape, known.dtype) != (value.shape, value.dtype):
                state[p][key] = value.clone(memory_format=torch.contiguous_format)
            elif finite is None:
                known.copy_(value)
            else:
                known.copy_(torch.where(finite, value, known))


def _bucket(
    polar_map: PolarMap,
    numbers_key: tuple[int | str, ...],
    members: list[_Member],
    M: Tensor,
    T: Tensor,
    factors: Factors | None,
) -> Bucket:
    owners = [(work, i) for work, i, _, block in members for _ in range(len(block))]
    names = tuple(work.names[i] for work, i in owners)
    params = tuple(work.params[i] for work, i in owners)
    step = members[0][0].group["step"]
    return Bucket(polar_map, step, numbers_key, names, params, M, T, factors)
