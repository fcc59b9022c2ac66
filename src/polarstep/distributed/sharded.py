"""Algorithm 1 on shards: the low-rank map of matrices that no rank has as a whole.

Let A be M or Mᵀ, whichever is wide (m ≤ n). Its columns or its rows are cut among N ranks, and rank r
holds the part A_r::

    columns cut (the long side)              rows cut (the short side)

    Y = Σ A_r Ω_r          sum, m×ℓ          Y_r = A_r Ω
    Q = orth(Y)            shared            Q_r = orth(Y)_r       ℓ×ℓ Gram matrices are summed
    B_r = Qᵀ A_r                             B = Σ Q_rᵀ A_r        sum, ℓ×n
    Z_r = W B_r            W from Σ B_r B_rᵀ Z = inner(B)          shared
    T_r = Q Z_r                              T_r = Q_r Z

Every power iteration adds one more such sum. Q and T equal those of one process up to rounding:
Cholesky-QR gives the Q of a QR factorization with a positive diagonal, whatever the number of ranks.

Each small matrix that is summed has an owner among the ranks (:meth:`_OnShards._at_owners`). The sum
goes to the owner alone, which factors it or runs the inner map, and shares the result. That costs the
bytes of a sum over all ranks, and no rank repeats the work of another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from polarstep import flops, kernels, products
from polarstep.distributed import carries, wire
from polarstep.distributed.layout import Layout, Span
from polarstep.distributed.ledger import FINAL_PASSES, Side
from polarstep.distributed.summed import (
    basis_of,
    inverse_root_of,
    lifted_by,
    packed_triangle,
    shape_of,
    unpacked,
    weight_of,
)
from polarstep.optim.scaling import to_norm
from polarstep.optim.stepping.carried import entry
from polarstep.optim.stepping.collect import Member, Signature, State
from polarstep.optim.stepping.target import Target
from polarstep.polar import LowRank, NewtonSchulz, Warm, gram
from polarstep.polar.orthonormal import orthonormalize
from polarstep.polar.result import Lift, counted_norm
from polarstep.products.sizes import largest_entry, unit_scale_for

__all__ = ["Shards", "sharded_step"]

Steps = Generator[None, None, Tensor]
# Passes of Cholesky-QR before Householder's method takes over a matrix.
MOST_PASSES = 4


@dataclass
class Shards:
    """A bucket of matrices that are all cut in the same way along one side."""

    signature: Signature
    members: list[Member]
    layout: Layout
    side: Side
    errors: list[Exception]  # of this rank, to be told to all ranks after the step

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold this rank's copy of the matrices together."""
        return tuple(self.layout.ranks[i] for i in self.layout.peers)

    @property
    def me(self) -> int:
        """This rank's index among them."""
        return self.layout.peers.index(self.layout.me)

    @property
    def is_long(self) -> bool:
        """Whether the long side of the matrices is cut."""
        return (self.side == "columns") == (self.signature.m <= self.signature.n)

    @property
    def spans(self) -> list[Span]:
        """The part of the cut side that each of the ranks has."""
        pieces = self.layout.pieces(self.members[0].view)
        assert pieces is not None
        both = [(piece.rows, piece.cols) for piece in pieces]
        return [both[i][0 if self.side == "rows" else 1] for i in self.layout.peers]


def sharded_step(
    bucket: Shards, targets: list[Target], state: State, numbers: Tensor | None
) -> Generator[None, None, list[Tensor]]:
    """One step; yields wherever it waits for other ranks. Returns this rank's part of T per member."""
    its, polar = bucket.signature, bucket.signature.polar
    assert isinstance(polar, LowRank)
    counts = [member.count for member in bucket.members]
    M = torch.cat(
        [
            target.local_momentum().reshape(count, -1, its.n)
            if bucket.side == "rows"
            else target.local_momentum().reshape(count, its.m, -1)
            for target, count in zip(targets, counts, strict=True)
        ]
    )
    ops = products.of(its.device)
    X = ops.workable(M)
    A = (X if its.m <= its.n else X.mT).to(ops.dtype(X.dtype))
    A = yield from _unit_scaled(A, bucket.ranks)
    work = _OnShards(bucket, polar, A)
    Q = yield from work.basis(state, numbers)
    Z, squared = yield from work.lifted(Q)
    work.leave(state, Q, Z, numbers)
    if squared is not None:
        counted = counted_norm(squared, polar.width)
        factor = to_norm(polar.effective_rank(its.m, its.n), counted)[:, None, None]
        if Q.numel() < Z.numel():
            Q = (factor * Q).to(Q.dtype)
        else:
            Z = (factor * Z).to(Z.dtype)
    T = Q @ Z
    return list(torch.split(T if its.m <= its.n else T.mT, counts))


def _unit_scaled(A: Tensor, ranks: tuple[int, ...]) -> Steps:
    """A times a power of two per matrix, the same on all ranks, that puts its largest entry in [½, 1).

    Squares of entries like 1e-30 would leave the range of float32; T does not depend on the scale.
    """
    dtype = torch.promote_types(A.dtype, torch.float32)
    most = torch.zeros(len(A), 1, 1, dtype=dtype, device=A.device)
    if A.numel():
        most = largest_entry(A).to(dtype)
    coming = wire.begin_largest_of_ranks(most, ranks)
    yield
    return A * unit_scale_for(coming.wait(), A.dtype).to(A.dtype)


class _OnShards:
    """The phases of Algorithm 1 for one bucket."""

    def __init__(self, bucket: Shards, polar: LowRank, A: Tensor) -> None:
        self.bucket, self.polar, self.A = bucket, polar, A
        self.is_long, self.ranks = bucket.is_long, bucket.ranks
        self.sums = torch.promote_types(A.dtype, torch.float32)  # the precision of sums
        self.mine = bucket.spans[bucket.me]

    def basis(self, state: State, numbers: Tensor | None) -> Steps:
        """Q: the whole of it where the long side is cut, else this rank's rows."""
        finder, its = self.polar.finder, self.bucket.signature
        if isinstance(finder, Warm) and its.resumed:
            S = yield from self._carried(state, "basis", whole=not self.is_long)
            S = S.to(self.A.dtype)
            V = self._whitening(state)
            S = S if V is None else V.to(S.dtype) @ S
            return (yield from self._chain(S.mT, 1))
        fresh = self.polar.finder.fresh_sketch
        assert fresh is not None  # the plan takes no other finder
        power = fresh.power
        assert numbers is not None
        products_ = flops.power_products(power) + 1
        starts_long = products_ % 2 == 1  # Ω has rows for the long side
        Omega = numbers.to(self.A.dtype)
        if starts_long == self.is_long:
            Omega = Omega[slice(*self.mine)]
        return (yield from self._chain(Omega.expand(len(self.A), -1, -1), products_))

    def _chain(self, S: Tensor, count: int) -> Steps:
        """``count`` products with A and Aᵀ in turn, the last with A; each is made orthonormal."""
        for i in range(count):
            to_short, last = (count - i) % 2 == 1, i == count - 1
            Y = (self.A if to_short else self.A.mT) @ S
            if to_short == self.is_long:  # the product was over the side that is cut
                S = yield from self._at_owners(Y, basis_of(self.polar, rough=not last))
            else:
                S = yield from self._cholesky_qr(Y, rough=not last)
        return S

    def lifted(self, Q: Tensor) -> Generator[None, None, tuple[Tensor, Tensor | None]]:
        """Z = inner(QᵀA), whole where the short side is cut, else this rank's columns of it.

        Returns also ‖Z‖²_F of all columns, of shape (batch,), if the scale of the step depends on it.
        """
        by_norm = self.bucket.signature.by_norm
        B, inner = Q.mT @ self.A, self.polar.inner
        assert isinstance(inner, NewtonSchulz)
        if not self.is_long:
            Z = yield from self._at_owners(B, lifted_by(inner))
            return Z, Lift(Z).squared_norm() if by_norm else None
        squared: Tensor | None = None
        polynomials, epsilon = inner.polynomials, gram.rounding(B.dtype)
        starts = [0, *gram.restarts(polynomials, epsilon, settling=False), len(polynomials)]
        for first, end in pairwise(starts):
            G = packed_triangle(self._gram(B.mT))
            asked = by_norm and end == len(polynomials)
            weight = weight_of(inner, first, end, B.shape[-2], by_norm=asked)
            W = yield from self._at_owners(G, weight, dtype=self.sums)
            if asked:
                W, squared = W[:, :-1], W[:, -1]
            B = unpacked(W, B.shape[-2], symmetric=True).to(B.dtype) @ B
        return B, squared

    def leave(self, state: State, Q: Tensor, Z: Tensor, numbers: Tensor | None) -> None:
        """Put what the finder leaves for the next step into the state."""
        finder = self.polar.finder
        if isinstance(finder, Warm):
            assert numbers is not None
            noise = numbers.mT.to(Z.dtype)
            if self.is_long:
                noise = noise[:, slice(*self.mine)]
            basis = torch.add(Z, noise, alpha=finder.noise / math.sqrt(len(numbers)))
            self._remember(state, "basis", basis, whole=not self.is_long)

    def _carried(self, state: State, name: str, *, whole: bool) -> Steps:
        """What the last step left under ``name``: this rank's part, or the whole."""
        members, shape = self.bucket.members, self._shape()
        parts = [carries.found(state, member, name, shape) for member in members]
        part = torch.cat(parts)
        if not whole:
            return part
        member = members[0]
        spans = carries.spans(member.param, self.bucket.layout, member.count, shape)
        lengths = [spans[i][1] - spans[i][0] for i in self.bucket.layout.peers]
        sizes = [len(part) * shape[0] * length for length in lengths]
        coming = wire.send([[part]] * len(self.ranks), sizes, part.dtype, part.device, self.ranks)
        yield
        return torch.cat(
            [
                piece.view(len(part), shape[0], length)
                for piece, length in zip(coming.wait(), lengths, strict=True)
            ],
            dim=-1,
        )

    def _shape(self) -> tuple[int, int]:
        """(ℓ, length) of a carried tensor of one matrix."""
        its = self.bucket.signature
        return self.polar.width, max(its.m, its.n)

    def _whitening(self, state: State) -> Tensor | None:
        """V of a warm start Ωᵀ = V·S, as a GPU leaves it for whole matrices; ``None`` without V."""
        keys = [(member, entry("whitening", member.block)) for member in self.bucket.members]
        if any(key not in state[member.param] for member, key in keys):
            return None
        width = self.polar.width
        found = [carries.found(state, m, "whitening", (), as_whole=True) for m, _ in keys]
        return torch.cat(found)[:, :width, :width]

    def _remember(self, state: State, name: str, X: Tensor, *, whole: bool) -> None:
        counts = [member.count for member in self.bucket.members]
        for member, part in zip(self.bucket.members, torch.split(X, counts), strict=True):
            finite = member.work.finite
            flag = None if finite is None else finite[member.index]
            state[member.param].pop(entry("whitening", member.block), None)
            if whole:
                carries.put_whole(state, member, name, part, flag)
            else:
                carries.put(state, member, name, self._shape(), part, flag)

    # Columns that are cut among the ranks.

    def _gram(self, Y: Tensor) -> Tensor:
        """YᵀY of this rank's rows, to be summed."""
        Y = Y.to(self.sums)
        return Y.mT @ Y

    def _cholesky_qr(self, Y: Tensor, *, rough: bool) -> Steps:
        """This rank's rows of the Q of a QR factorization of all rows of Y.

        YᵀY has the square of Y's condition number. So the first pass adds a shift to stay positive
        definite, and later passes finish. On a CPU a flag says whether a pass was the last. A GPU makes
        :data:`~polarstep.distributed.ledger.FINAL_PASSES`, as reading the flag would wait for it.
        """
        looks = products.of(Y.device).looks_for_free
        ell, Q = Y.shape[-1], Y
        passes = 1 if rough else MOST_PASSES if looks else FINAL_PASSES
        flags = Y.new_zeros(len(Y))
        for number in range(passes):
            G = packed_triangle(self._gram(Q))
            found = yield from self._at_owners(
                G, inverse_root_of(ell, number == 0), dtype=self.sums
            )
            flags = found[:, -1]
            Q = (Q.to(self.sums) @ unpacked(found[:, :-1], ell).mT).to(Y.dtype)
            if looks and number + 1 >= FINAL_PASSES and not bool(flags.any()):
                break
        bad = flags > (1.5 if rough else 0.5)
        if looks and bool(bad.any()):
            Q[bad] = yield from self._householder(Y[bad])
        return Q

    def _householder(self, Y: Tensor) -> Steps:
        """Q as in :meth:`_cholesky_qr`, from all rows together, for an ill-conditioned Gram matrix."""
        lengths = [stop - start for start, stop in self.bucket.spans]
        sizes = [len(Y) * length * Y.shape[-1] for length in lengths]
        coming = wire.send([[Y]] * len(self.ranks), sizes, Y.dtype, Y.device, self.ranks)
        yield
        parts = [
            part.view(len(Y), length, Y.shape[-1])
            for part, length in zip(coming.wait(), lengths, strict=True)
        ]
        Q = orthonormalize(torch.cat(parts, dim=1), "householder")
        return Q[:, slice(*self.mine)]

    def _at_owners(
        self, X: Tensor, f: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> Steps:
        """``f`` of the sum of X over the ranks, computed for each matrix by one rank and shared.

        The result is computed, sent and returned in ``dtype``, by default the precision of A.
        """
        ranks, me, batch = self.ranks, self.bucket.me, len(X)
        cuts = [batch * i // len(ranks) for i in range(len(ranks) + 1)]
        own = cuts[me + 1] - cuts[me]
        each = X[0].numel()
        parts = [[X[cuts[i] : cuts[i + 1]]] for i in range(len(ranks))]
        coming = wire.send(parts, [own * each] * len(ranks), self.sums, X.device, ranks)
        yield
        arrived = coming.wait()
        dtype = dtype or self.A.dtype
        shape = shape_of(f, X)
        size, mine = math.prod(shape), []
        if own:
            total = torch.stack(arrived).sum(0).view(own, *X.shape[1:])
            try:
                totals = torch.split(total.to(dtype), kernels.part_sizes(own, X.device))
                mine = [f(part).to(dtype) for part in totals]
            except Exception as error:  # told to all ranks when their collectives are done
                self.bucket.errors.append(error)
                mine = [total.new_zeros(own, *shape, dtype=dtype)]
        sizes = [(cuts[i + 1] - cuts[i]) * size for i in range(len(ranks))]
        coming = wire.send([mine] * len(ranks), sizes, dtype, X.device, ranks)
        yield
        return torch.cat([part.view(-1, *shape) for part in coming.wait()])
