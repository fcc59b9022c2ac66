"""Where the time of a warm LowRank step goes, and the floor below which no implementation can go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

# A version of the package measured with --beside may lack other modules; functions import them.
import polarstep as ps
from polarstep import rng
from step_optimizers import maps
from step_workloads import Workload
from timing import replayed_milliseconds


def phases(workload: Workload, device: torch.device) -> dict[str, float]:
    """Milliseconds of each phase of a warm LowRank step, timed separately."""
    from polarstep.ops import ops_of

    polar = maps(workload.rank, workload.oversample)["LowRank, warm"]()
    assert isinstance(polar, ps.LowRank)
    total: dict[str, float] = {}
    for count, m, n in workload.shapes:
        if polar.full_space_reason(m, n, device) is not None:
            continue
        G, C, X = (torch.randn(count, m, n, device=device) for _ in range(3))
        M = torch.randn(count, m, n, device=device, dtype=ops_of(device).dtype(G.dtype))
        for phase, run in (("momentum", _momentum(G, C, M, device)), *_phases_of(polar, M, X)):
            total[phase] = total.get(phase, 0.0) + replayed_milliseconds(run, device)
    return total


def _phases_of(
    polar: ps.LowRank, M: Tensor, X: Tensor
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and functions of the phases of a warm map's second step on M, which updates X.

    The sketch is formed with Z or, where the device keeps the warm state factored, without.
    """
    from polarstep.maps import Draw, MapState
    from polarstep.maps.subspace import orthonormalize, whitened_polynomials
    from polarstep.ops import ops_of

    (_, m, n), finder, width = M.shape, polar.finder, polar.width
    ops, A = ops_of(M.device), M if m <= n else M.mT
    draw = Draw(polar.numbers(m, n, rng.generator("phases", device=M.device)))
    _, carry = polar.step(M, MapState(), draw)
    padded = finder.padded(width, A.dtype, A.device)

    def sketch() -> Tensor:
        Y = ops.times(A, carry["basis"].mT, padded)
        return carry["whitening"] @ Y.mT if "whitening" in carry else Y

    yield "sketch", sketch
    if "whitening" in carry:
        yield "orthonormalization", partial(ops.whitened_basis, sketch(), whitened_polynomials())
    else:
        yield "orthonormalization", partial(orthonormalize, ops.workable(sketch()), finder.orth)
    basis = finder.basis(A, width, carry, draw)
    yield "project", partial(torch.matmul, basis.Q.mT, A)
    B = ops.workable(basis.Q.mT @ A)
    yield "inner iteration", partial(finder.lift, polar.inner, B, basis, width, carry, draw)
    two = polar.step(M, carry, draw)[0].two_factors
    assert two is not None
    yield "lift and update", _update(X, *two, M.device)


def _momentum(G: Tensor, C: Tensor, M: Tensor, device: torch.device) -> Callable[[], object]:
    """A function that computes Nesterov's momentum M from the gradients G and the buffers C."""
    if device.type != "cuda":
        return lambda: torch.add(G, C.mul_(0.9).add_(G), alpha=0.9)
    from polarstep.kernels.momentum import momentum

    gradients, buffers = (torch.tensor([t.data_ptr() for t in T], device=device) for T in (G, C))
    betas = torch.full((len(G),), 0.9, device=device)
    return lambda: momentum(gradients, buffers, betas, M, element=torch.float32, nesterov=True)


def _update(X: Tensor, L: Tensor, R: Tensor, device: torch.device) -> Callable[[], object]:
    """A function that subtracts a multiple of T = L·R from the parameters X."""
    if device.type != "cuda":
        return lambda: X.add_(L @ R, alpha=-1e-5)
    from polarstep.kernels.update import update_from_factors

    table = torch.tensor([x.data_ptr() for x in X], device=device)
    ones = torch.ones(len(X), device=device)
    return lambda: update_from_factors(table, L, R, ones, ones, element=torch.float32)


def rates(device: torch.device) -> dict[str, float]:
    """Bytes and FLOPs per millisecond of this device, from a large sum and a large product."""
    from polarstep.ops import ops_of

    size = 2**28 if device.type == "cuda" else 2**24
    a, b, c = (torch.randn(size, device=device) for _ in range(3))
    moved = 12 * size / replayed_milliseconds(lambda: torch.add(a, b, out=c), device)
    d = 8192 if device.type == "cuda" else 1024
    X = torch.randn(d, d, device=device, dtype=ops_of(device).dtype(a.dtype))
    product = 2 * d**3 / replayed_milliseconds(lambda: X @ X, device)
    return {"bytes_per_ms": moved, "flops_per_ms": product}


def floor(workload: Workload, rate: dict[str, float]) -> float:
    """Milliseconds below which no warm LowRank step on float32 parameters can go.

    The step must read G, C and X, write C and X, write M once and read M twice in half precision,
    and compute three products. ``rate`` is what :func:`rates` measured.
    """
    size = sum(count * m * n for count, m, n in workload.shapes)
    moved = size * (4 * 5 + 2 * 3) / rate["bytes_per_ms"]
    return moved + 6 * size * workload.width / rate["flops_per_ms"]
