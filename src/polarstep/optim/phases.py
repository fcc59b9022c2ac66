"""The phases of a Muon step: collect → momentum → polar of a bucket → apply.

Equation (1) of the paper, for every parameter X with gradient G:

    C ← βC + G,    M = βC + G (Nesterov) or M = C (Polyak),    X ← X − η·scale·T(M).

Each phase is a function on the work of one parameter group, but for the polar phase, which gathers
the matrices of equal shape from all groups into buckets and calls the polar map once a bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from polarstep import rng
from polarstep.cuda_graphs import in_a_graph
from polarstep.optim.carried import remember, start_of
from polarstep.optim.groups import Group, check_options, named_params, view_of
from polarstep.optim.scaling import resolve_scale
from polarstep.optim.work import Place, Placed, Product, State, Work
from polarstep.polar import LowRank
from polarstep.polar.base import Factors, Kept, PolarMap, Sketched, lifted, oriented
from polarstep.sharded import is_sharded, placed_like, whole
from polarstep.sketch.warm import Start

__all__ = [
    "Bucket",
    "Drawn",
    "PolarHook",
    "apply",
    "collect",
    "ensure_buffers",
    "generator_key",
    "in_parts",
    "momentum",
    "polar",
]

Item = TypeVar("Item")

# Random numbers by generator, width, device and precision.
Drawn = dict[tuple[Any, ...], Tensor]

# More sketches than the shapes of a model: those of them that are in use are not drawn again.
MOST_DRAWN = 64

# Bytes of M that are gathered from shards at a time; a larger bucket is worked off in parts.
LARGEST_GATHERED = 512 * 2**20
# On a CPU a part of this size is as fast as any batch, and not all of M is there at a time.
LARGEST_ON_A_CPU = 10 * 2**20


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
    """``C ← βC + G`` in place."""
    if not work.params:
        return
    ensure_buffers(work, state)
    C = [state[p]["momentum_buffer"] for p in work.params]
    beta = work.group["momentum"]
    if work.finite is not None:
        for c, grad, finite in zip(C, work.grads, work.finite, strict=True):
            c.copy_(torch.where(finite, beta * c + grad, c))
    elif all(c.device.type == "cpu" and not is_sharded(c) for c in C):
        for c, grad in zip(C, work.grads, strict=True):
            torch.add(grad, c, alpha=beta, out=c)  # one pass over memory instead of two
    else:
        torch._foreach_mul_(C, beta)
        torch._foreach_add_(C, work.grads)


def _momentum_of(work: Work, i: int, state: State, out: Tensor | None = None) -> Tensor:
    """M of a parameter: βC + G, or C itself, which is not to be changed."""
    M: Tensor = state[work.params[i]]["momentum_buffer"]
    if work.group["nesterov"]:
        M = torch.add(work.grads[i], M, alpha=work.group["momentum"], out=out)
    if work.finite is not None:
        M = torch.where(work.finite[i], M, 0)  # and T(0) = 0
    return M


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
    ``drawn``, which outlives a step, are the numbers that are the same at every one. A large bucket is
    worked off in parts, with one Ω for all of them.
    """
    drawn = {} if drawn is None else drawn
    buckets: dict[tuple[Any, ...], list[Place]] = {}
    for work in works:
        group = work.group
        for i, (view, p) in enumerate(zip(work.views, work.params, strict=True)):
            work.T.append([p] * len(view.shapes))  # replaced below, block by block
            for j, (_, m, n) in enumerate(view.shapes):
                key = (
                    group["polar"],
                    group["seed"],
                    group["step"],
                    (m, n),
                    p.dtype,
                    p.device,
                    is_sharded(p),
                )
                buckets.setdefault(key, []).append((work, i, j))
    for (polar_map, seed, step, (m, n), dtype, device, sharded), places in buckets.items():
        numbers_key = generator_key(polar_map, seed, m, n, step)
        nbytes = max(1, m * n * dtype.itemsize)
        parts = iter([places])
        if sharded or device.type == "cpu":
            largest = LARGEST_GATHERED if sharded else LARGEST_ON_A_CPU
            parts = in_parts(places, _matrices, largest // nbytes)
        shared = drawn if polar_map.is_warm else {}
        for part in parts:
            _polar_of_bucket(polar_map, numbers_key, part, state, hooks, shared)


def _matrices(place: Place) -> int:
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
    places: list[Place],
    state: State,
    hooks: Iterable[PolarHook],
    drawn: Drawn,
) -> None:
    M, members = _gathered(places, state)
    generator = rng.generator(*numbers_key, device=M.device) if polar_map.is_random else None
    step = None
    if hooks or polar_map.is_warm or polar_map.keeps_basis or M.device.type == "cpu":
        numbers = _numbers(polar_map, numbers_key, M, drawn) if polar_map.is_warm else None
        start = start_of(members, state, polar_map, numbers)
        if numbers is None and _draws(polar_map, M, start):
            numbers = _numbers(polar_map, numbers_key, M, drawn)
        step = polar_map.sketched(M, generator=generator, start=start, numbers=numbers)
        if step is not None and step.start is not None:
            remember(members, state, step.start)
        elif step is not None and polar_map.keeps_basis and start is None:
            remember(members, state, Kept(step.basis.mT))
    products = _taken_as_products(members, M, step)
    T: Tensor | None = None
    if hooks or None in products:
        T = polar_map(M, generator=generator) if step is None else lifted(step, M)
    parts = () if T is None else torch.split(T, [len(block) for *_, block in members])
    for k, ((work, i, j, _), product) in enumerate(zip(members, products, strict=True)):
        if product is not None:
            work.T[i][j] = product
            continue
        p, view = work.params[i], work.views[i]
        # Of a whole parameter a rank keeps its own part at once; blocks wait for each other.
        alone = len(view.shapes) == 1 and is_sharded(p)
        work.T[i][j] = placed_like(view.assemble([parts[k]], p.shape), p) if alone else parts[k]
    if hooks:
        assert T is not None
        factors = None if step is None else step.factors
        bucket = _bucket(polar_map, numbers_key, members, M, T, factors)
        for hook in hooks:
            hook(bucket)


def _gathered(places: list[Place], state: State) -> tuple[Tensor, list[Placed]]:
    """M of a bucket in one piece, and each block with its part of it."""
    if len(places) > 1 and all(_writes_momentum(work, i) for work, i, _ in places):
        (work, i, j), counts = places[0], [_matrices(place) for place in places]
        p, (_, m, n) = work.params[i], work.views[i].shapes[j]
        M = torch.empty(sum(counts), m, n, dtype=p.dtype, device=p.device)
        parts = torch.split(M, counts)
        for (work, i, _), part in zip(places, parts, strict=True):
            _momentum_of(work, i, state, out=part.view(work.params[i].shape))
        return M, [(*place, part) for place, part in zip(places, parts, strict=True)]
    blocks_of: dict[tuple[int, int], list[Tensor]] = {}  # of several blocks, M is gathered once
    for work, i, _ in places:
        if (id(work), i) not in blocks_of:
            blocks_of[id(work), i] = work.views[i].blocks(whole(_momentum_of(work, i, state)))
    members = [(work, i, j, blocks_of[id(work), i][j]) for work, i, j in places]
    blocks = [block for *_, block in members]
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks)), members


def _writes_momentum(work: Work, i: int) -> bool:
    """Whether M of a parameter is computed, and of one block, so that it can be written anywhere."""
    made = work.group["nesterov"] and work.finite is None
    return made and len(work.views[i].shapes) == 1 and not is_sharded(work.params[i])


def _taken_as_products(
    members: list[Placed], M: Tensor, step: Sketched | None
) -> list[Product | None]:
    """T of each block as a product, where its parameter can take it in as that; ``None`` elsewhere."""
    if step is None:
        return [None] * len(members)
    counts = [len(block) for *_, block in members]
    L, R = oriented(step, *M.shape[-2:])
    products = map(Product, torch.split(L, counts), torch.split(R, counts))
    return [
        product if _takes_products(work, i, L.dtype) else None
        for (work, i, *_), product in zip(members, products, strict=True)
    ]


def _takes_products(work: Work, i: int, dtype: torch.dtype) -> bool:
    """Whether X ← βX + αLR is one operation for a parameter, with factors of ``dtype``."""
    p, view = work.params[i], work.views[i]
    return (
        p.device.type == "cpu"  # on a GPU factors have 16 bits
        and p.dtype == dtype
        and not is_sharded(p)
        and p.is_contiguous()
        and len(view.shapes) == 1
        and not isinstance(work.group["lr"], Tensor)
    )


def _draws(polar_map: PolarMap, M: Tensor, start: Start | Kept | None) -> bool:
    """Whether a step that starts from ``start`` draws a sketch."""
    if not isinstance(polar_map, LowRank) or isinstance(start, Kept):
        return False
    return polar_map.full_space_reason(M.shape[-2], M.shape[-1], M.device) is None


def _numbers(polar_map: PolarMap, key: tuple[int | str, ...], M: Tensor, drawn: Drawn) -> Tensor:
    """The numbers of a sketch, drawn once; not for what is captured, whose replays draw anew.

    Numbers that were not used for longest are dropped, as those of a map or a seed that is no more.
    """
    assert isinstance(polar_map, LowRank)
    if in_a_graph():
        drawn = {}
    place = (*key, polar_map.width, M.device, M.dtype)
    numbers = drawn.pop(place, None)
    if numbers is None:
        numbers = polar_map.numbers_for(M, rng.generator(*key, device=M.device))
    drawn[place] = numbers
    if len(drawn) > MOST_DRAWN:
        del drawn[next(iter(drawn))]
    return numbers


def apply(work: Work) -> None:
    """``X ← (1 − ηλ)X − η·scale·T``: decoupled weight decay, then the step."""
    if not work.params:
        return
    group = work.group
    lr, decay, scale = group["lr"], group["weight_decay"], resolve_scale(group["lr_scale"])
    if isinstance(lr, Tensor):
        lr = lr.reshape(())  # torch allows one element in any number of dimensions
    remains = 1 - lr * decay
    if work.finite is not None and decay != 0:
        for p, finite in zip(work.params, work.finite, strict=True):
            p.copy_(torch.where(finite, p * remains, p))
        remains = 1.0
    # By step size, so that scaling T and adding it is one pass over memory.
    by_size: dict[float, tuple[list[Tensor], list[Tensor]]] = {}
    for p, view, blocks in zip(work.params, work.views, work.T, strict=True):
        sizes = [-lr * scale(m, n) for _, m, n in view.shapes]
        if isinstance(blocks[0], Product):
            L, R = blocks[0].L, blocks[0].R
            p.view(view.shapes[0]).baddbmm_(L, R, beta=remains, alpha=sizes[0])
            continue
        T, size = [block for block in blocks if isinstance(block, Tensor)], sizes[0]
        if len(T) > 1 or isinstance(lr, Tensor):
            T, size = [t * each for t, each in zip(T, sizes, strict=True)], 1.0
        params, updates = by_size.setdefault(size, ([], []))
        params.append(p)
        updates.append(placed_like(view.assemble(T, p.shape), p))
    for size, (params, updates) in by_size.items():
        if decay != 0 and work.finite is None:
            torch._foreach_mul_(params, remains)
        torch._foreach_add_(params, updates, alpha=size)


def _bucket(
    polar_map: PolarMap,
    numbers_key: tuple[int | str, ...],
    members: list[Placed],
    M: Tensor,
    T: Tensor,
    factors: Factors | None,
) -> Bucket:
    owners = [(work, i) for work, i, _, block in members for _ in range(len(block))]
    names = tuple(work.names[i] for work, i in owners)
    params = tuple(work.params[i] for work, i in owners)
    step = members[0][0].group["step"]
    return Bucket(polar_map, step, numbers_key, names, params, M, T, factors)
