"""The promises of a polar map (``polarstep/maps/base.py``), each checked on a whole batch at once.

Differences between two results are weighted by M: ‖(T − T')Mᵀ‖_F/‖M‖_F. Where M has only rounding
errors, a sketched map may return anything up to its norm, and such directions weigh nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from tests.fuzz.cases import Choices, Outcome, Violation
from tests.fuzz.maps import (
    facts_of,
    largest_norm,
    may_use_gram,
    most_steps,
    random_map,
    reference,
    settles,
    works_in,
)
from tests.fuzz.matrices import LAYOUTS, SCALES, laid_out, random_batch
from tests.fuzz.shrink import smallest
from torch import Tensor

from polarstep import Deflated, Exact, Kaczmarz, LowRank, NewtonSchulz, PolarMap, rng

__all__ = ["Broken", "broken_promises", "tried"]


@dataclass(frozen=True)
class Broken:
    """A promise that a matrix of a batch shows to be broken."""

    promise: str
    index: int
    found: str


@dataclass(frozen=True)
class _Tolerances:
    """What rounding explains, for matrices given in one precision."""

    norm: float
    difference: float
    alignment: float


TOLERANCES = {
    torch.float64: _Tolerances(1e-9, 1e-7, 1e-6),
    torch.float32: _Tolerances(1e-5, 1e-3, 1e-2),
    torch.float16: _Tolerances(2e-3, 4e-3, 1e-2),
    torch.bfloat16: _Tolerances(1.5e-2, 2e-2, 2e-2),
}
PLACES = 3  # matrices of a batch that are mapped alone


def broken_promises(
    polar: PolarMap, M: Tensor, *, scale: int = 40, layout: str = "transposed", key: int = 0
) -> list[Broken]:
    """The promises that ``polar`` breaks on some matrix of ``M`` (count, m, n), the first of each kind.

    ``scale`` is the power of two by which M is multiplied, ``layout`` another place in memory, and
    ``key`` that of the random numbers.
    """
    first: dict[str, Broken] = {}
    for each in _broken(polar, M, scale, layout, key):
        first.setdefault(each.promise, each)
    return list(first.values())


def _broken(polar: PolarMap, M: Tensor, scale: int, layout: str, key: int) -> Iterator[Broken]:
    assert layout in LAYOUTS

    def mapped(X: Tensor) -> Tensor:
        return polar(X, generator=rng.generator("fuzz", key))

    before, state = M.clone(), torch.get_rng_state()
    T = mapped(M)
    if (T.shape, T.dtype, T.device) != (M.shape, M.dtype, M.device):
        yield Broken(
            "shape and dtype", 0, f"{tuple(T.shape)} {T.dtype} of {tuple(M.shape)} {M.dtype}"
        )
        return
    if not torch.equal(M, before) or T.data_ptr() == M.data_ptr():
        yield Broken("the input stays as it is", 0, "it was changed, or T is M itself")
    if not torch.equal(torch.get_rng_state(), state):
        yield Broken("the global generator is not used", 0, "it was advanced")
    finite = T.isfinite().flatten(1).all(1)
    yield from _where(~finite, "finite", lambda i: "NaN or infinity")
    if not finite.all():
        return
    yield from _where(
        (M == 0).flatten(1).all(1) & (T != 0).flatten(1).any(1),
        "T(0) = 0",
        lambda i: "T is not zero",
    )
    yield from _size_and_direction(polar, M, T)
    yield from _invariance(polar, M, T, mapped, scale, layout, key)


def _size_and_direction(polar: PolarMap, M: Tensor, T: Tensor) -> Iterator[Broken]:
    """‖T‖_op is as promised, and T points where M points."""
    m, n = M.shape[-2:]
    runs = polar.on(m, n, M.device)
    rounding = TOLERANCES[works_in(runs, M.dtype)]
    eps = torch.finfo(torch.promote_types(works_in(runs, M.dtype), torch.float32)).eps
    facts = facts_of(runs, eps)
    norm = torch.linalg.matrix_norm(T.double(), 2)
    # polarstep/maps/base.py: the promise for plain steps, and that for the Gram form.
    room = max(rounding.norm, max(m, n) * eps)
    if may_use_gram(runs):
        room = max(room, 0.5 * facts.slope * min(m, n) * eps)
    limit = facts.largest * (1 + room)
    if may_use_gram(runs) and not settles(runs):
        # polarstep/maps/gram.py: "a second price". Each step rounds P, PW and PGP, each by ε/2 of its
        # norm, and the later steps carry the error of W to T.
        limit += 1.5 * most_steps(runs) * facts.slope * eps
    yield from _where(norm > limit, "‖T‖_op", lambda i: f"{norm[i]:.9g}, at most {limit:.9g}")
    unit = _unit(M)
    sigma = torch.linalg.svdvals(unit)
    nuclear = sigma.sum(-1)
    # A polynomial with coefficients below zero may map small σ below zero; none here does.
    along = (unit * T.double()).sum((-2, -1)) / torch.where(nuclear > 0, nuclear, 1)
    least = torch.full_like(along, -rounding.alignment)
    expected = None
    if isinstance(runs, Exact) and runs.rtol is None:
        least = torch.where(nuclear > 0, 1 - rounding.alignment, least)
    elif isinstance(runs, NewtonSchulz):
        expected = reference(runs, M.double())
    elif isinstance(runs, LowRank) and isinstance(runs.inner, NewtonSchulz):
        inner = reference(runs.inner, M.double())
        assert inner is not None
        captured = _is_captured(runs, sigma, M.dtype)
        full = (unit * inner).sum((-2, -1)) / torch.where(nuclear > 0, nuclear, 1)
        room = 2 * rounding.alignment + 50 * facts.sensitivity * eps
        least = torch.where(captured, full - room, least)
    yield from _where(
        along < least,
        "alignment",
        lambda i: f"⟨M, T⟩/‖M‖_* is {along[i]:.6g}, at least {least[i]:.6g}",
    )
    if expected is not None:
        allowed = _allowed(runs, M, unit)
        yield from _differs("T = U p(Σ/δ) Vᵀ", T, expected, unit, allowed)
        allowed = allowed + 1000 * facts.slope * eps  # where M has rounding errors only
        yield from _differs("T = U p(Σ/δ) Vᵀ", T, expected, unit.new_ones(1, 1, 1), allowed)


def _is_captured(polar: LowRank, sigma: Tensor, dtype: torch.dtype) -> Tensor:
    """Whether a sketch must capture all of M: its rank is below ℓ, or one for sampled columns."""
    width = polar.width - 1 if polar.sketch.__class__.__name__ != "Kaczmarz" else 1
    if width < 1:
        return torch.zeros_like(sigma[..., 0], dtype=torch.bool)
    small = 1e-14 if dtype == torch.float64 else 1e-7
    rest = sigma[..., width] if width < sigma.shape[-1] else torch.zeros_like(sigma[..., 0])
    return (rest <= small * sigma[..., 0]) & (sigma[..., 0] > 0)


def _invariance(polar, M, T, mapped, scale, layout, key) -> Iterator[Broken]:
    """The same T from the same matrices, however they are given."""
    unit = _unit(M)
    runs = polar.on(M.shape[-2], M.shape[-1], M.device)
    rounding = _allowed(runs, M, unit)
    rounding[draws_equal_columns(runs, M, key)] = torch.inf
    if not torch.equal(mapped(M), T):
        yield Broken("determinism", 0, "two calls with the same generator differ")
    if polar.traits.ignores_scale:
        scaled = torch.ldexp(M, torch.tensor(scale))
        back = torch.ldexp(scaled.double(), torch.tensor(-scale))
        low, high = (2.0**exponent for exponent in SCALES[M.dtype])
        largest = scaled.abs().amax((1, 2), keepdim=True)
        fits = (back == M.double()).all(1, keepdim=True).all(2, keepdim=True)
        scaled = torch.where(fits & (largest >= low) & (largest <= high), scaled, M)
        yield from _differs("T(cM) = T(M)", mapped(scaled), T, unit, rounding)
    if M.shape[-2] != M.shape[-1] or polar.traits.draws == "never":
        yield from _differs("T(Mᵀ) = T(M)ᵀ", mapped(M.mT).mT, T, unit, rounding)
    yield from _differs("layout", mapped(laid_out(M, layout)), T, unit, rounding)
    places = sorted({len(M) * k // PLACES for k in range(PLACES)})
    alone = torch.stack([mapped(M[i]) for i in places])
    broken = _differs("batch = single", T[places], alone, unit[places], rounding[places])
    yield from (Broken(each.promise, places[each.index], each.found) for each in broken)
    repeated = mapped(M[0].expand(3, *M.shape[1:]))
    broken = _differs(
        "expanded", repeated, T[:1].expand(3, -1, -1), unit[:1].expand(3, -1, -1), rounding[:1]
    )
    yield from (Broken(each.promise, 0, each.found) for each in broken)


def draws_equal_columns(runs: PolarMap, M: Tensor, key: int) -> Tensor:
    """Whether a sketch of sampled columns draws two places of ``M`` with the same column, by matrix.

    The sketch then has fewer directions than columns. What the basis has in their place depends on the
    rounding errors (``polarstep/maps/subspace.py``), and T with it.
    """
    head = runs.head if isinstance(runs, Deflated) else runs
    found = torch.zeros(len(M), dtype=torch.bool)
    if not isinstance(head, LowRank) or not isinstance(head.sketch, Kaczmarz):
        return found
    A = M if M.shape[-2] <= M.shape[-1] else M.mT
    A = A if A.dtype.itemsize >= 4 else A.float()
    numbers = head.sketch.draw(A.shape[-1], head.width, rng.generator("fuzz", key))
    indices, scales = head.sketch.columns(A, numbers)
    drawn = A.gather(-1, indices.unsqueeze(-2).expand(-1, A.shape[-2], -1)).mT
    for i in range(len(M)):
        columns = drawn[i][scales[i] > 0]
        found[i] = len(columns.unique(dim=0)) < len(columns)
    return found


def _allowed(runs: PolarMap, M: Tensor, unit: Tensor) -> Tensor:
    """How much two results of the map ``runs`` may differ, for each matrix."""
    dtype = works_in(runs, M.dtype)
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    facts = facts_of(runs, eps)
    allowed = TOLERANCES[dtype].difference + 50 * facts.sensitivity * eps
    if may_use_gram(runs):
        # W of T = WX is as large as p'(0), and its rounding errors meet the largest σ of X.
        allowed += 20 * facts.slope * eps
    each = torch.full_like(unit[:, 0, 0], allowed)
    if isinstance(runs, Deflated):
        # R/δ = M/δ − QB/δ loses the digits by which M is larger than R. δ ≤ ‖R‖_F comes from
        # ‖M‖²_F − ‖B‖²_F, which loses twice as many; joint steps then change T in all directions.
        rest = torch.linalg.svdvals(unit)[:, runs.head.width].clamp_min(64 * eps)
        each = each + 30 * eps / rest + (8 * eps / rest.square()).clamp_max(0.05)
    return each


def _unit(M: Tensor) -> Tensor:
    """M/‖M‖_F in float64."""
    M = M.double()
    largest = M.abs().amax((-2, -1), keepdim=True)
    M = M / torch.where(largest > 0, largest, 1)
    norm = torch.linalg.matrix_norm(M, keepdim=True)
    return M / torch.where(norm > 0, norm, 1)


def _differs(
    promise: str, A: Tensor, B: Tensor, weight: Tensor, allowed: Tensor
) -> Iterator[Broken]:
    """Where A and B differ by more than ``allowed``, weighted by unit matrices or by the number one."""
    D = A.double() - B.double()
    if weight.shape[-2:] != (1, 1):
        D = D @ weight.mT if D.shape[-2] <= D.shape[-1] else D.mT @ weight
    distance = torch.linalg.matrix_norm(D)
    distance = torch.where(distance.isnan(), torch.inf, distance)
    yield from _where(
        distance > allowed,
        promise,
        lambda i: f"differs by {distance[i]:.3g}, at most {allowed.expand_as(distance)[i]:.3g}",
    )


def _where(flags: Tensor, promise: str, tell) -> Iterator[Broken]:
    if flags.any():
        index = int(flags.nonzero()[0])
        yield Broken(promise, index, tell(index))


# --- one case -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """A map, matrices, and the other ways in which they are given."""

    polar: PolarMap
    M: Tensor
    scale: int
    layout: str
    key: int

    def broken(self) -> list[Broken]:
        """What the map breaks here."""
        return broken_promises(
            self.polar, self.M, scale=self.scale, layout=self.layout, key=self.key
        )

    def program(self) -> str:
        """A program that shows it."""
        return (
            "import torch\n"
            "from polarstep import *\n"
            "from polarstep.maps import Warm\n"
            "from tests.fuzz.contracts import broken_promises\n\n"
            f"polar = {self.polar!r}\n"
            f"M = torch.tensor({self.M.tolist()}, dtype={self.M.dtype})\n"
            f"print(broken_promises(polar, M, scale={self.scale}, layout={self.layout!r}, "
            f"key={self.key}))"
        )


def tried(choose: Choices) -> Outcome:
    """One map on one batch."""
    polar = random_map(choose)
    batch = random_batch(choose, None if polar.traits.ignores_scale else largest_norm(polar))
    halves = batch.M.dtype == torch.float16
    case = Case(
        polar,
        batch.M,
        choose.random.randint(-4, 4) if halves else choose.random.randint(-80, 80),
        choose.one_of(*LAYOUTS[1:]),
        choose.random.randrange(100),
    )
    outcome = Outcome()
    outcome.tried["matrices"] += len(batch.M)
    outcome.tried["maps"] += 1
    for broken in case.broken():
        outcome.violations.append(_shrunk(case, broken))
    return outcome


def _shrunk(case: Case, broken: Broken) -> Violation:
    alone = replace(case, M=case.M[broken.index : broken.index + 1].clone())

    def still(candidate: Case) -> bool:
        return any(each.promise == broken.promise for each in candidate.broken())

    small = smallest(alone if still(alone) else case, _smaller, still)
    found = next((b.found for b in small.broken() if b.promise == broken.promise), broken.found)
    return Violation(broken.promise, found, small.program())


def _smaller(case: Case) -> Iterator[Case]:
    """Fewer matrices, rows and columns; zeros; numbers of few digits."""
    M = case.M
    for dim, size in enumerate(M.shape):
        for length in sorted({size // 2, size - 1}):
            if 0 < length < size:
                yield replace(case, M=M.narrow(dim, 0, length).clone())
                yield replace(case, M=M.narrow(dim, size - length, length).clone())
    rounded = (
        torch.tensor([float(f"{x:.1e}") for x in M.flatten().tolist()]).to(M.dtype).view(M.shape)
    )
    if M.numel() <= 200 and not torch.equal(rounded, M):
        yield replace(case, M=rounded)
    if M.numel() <= 40:
        for i in M.flatten().nonzero().flatten().tolist():
            changed = M.clone()
            changed.view(-1)[i] = 0
            yield replace(case, M=changed)
