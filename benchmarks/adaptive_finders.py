"""Two range finders that decide by the captured share α = ‖B‖²_F/‖M‖²_F, for ``adaptive.py``.

* :class:`Chosen` gives each matrix of a batch its own rank. The ranks have a fixed sum.
* :class:`Renewed` makes a new basis for a fixed number of matrices at each step, for those first whose
  share has fallen most since their basis was made.

Each finder also has the fixed setting, which runs the same code. All decisions are made on the device,
from the numbers of the last step, and the host never waits for them.

A matrix then depends on the others of its batch. So the maps do not keep the promise of
:mod:`polarstep.maps.base` that a batch is its matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import polarstep as ps
from polarstep.maps import Carry, Draw, Finder
from polarstep.maps.result import Lift
from polarstep.maps.subspace import Basis, Fresh, orthonormalize
from polarstep.ops import ops_of

__all__ = ["Chosen", "Measured", "Renewed", "filled", "fitted", "power_law"]

# Exponents a of the fitted power laws σⱼ ∝ j^−a: from 0 to 2 in steps of 1/64.
EXPONENTS = 129
# The weight of the newest exponent in the average that decides.
NEWEST = 0.1
# An exponent for matrices that are zero, of which nothing is known.
UNKNOWN = 0.5


@dataclass(frozen=True, kw_only=True)
class Seen(Basis):
    """A basis, and what its step has to remember; one number for each matrix."""

    energy: Tensor  # ‖M‖²_F
    ranks: Tensor  # the number of columns of Q that are not zero
    renewed: Tensor  # whether Q was made at this step


@dataclass(frozen=True)
class Measured(Finder):
    """A finder that adds up ranks, captured shares and new bases, to be read after the last step."""

    power: int = 1

    def told(self, B: Tensor, basis: Seen, carry: Carry) -> tuple[Tensor, Tensor]:
        """α of each matrix, and the sums for the next step.

        The sums are (batch, 4): of ones, of ranks, of α and of new bases.
        """
        captured = _energy(B)
        share = captured / torch.where(basis.energy > 0, basis.energy, 1)
        now = (torch.ones_like(share), basis.ranks, share, basis.renewed)
        sums = torch.stack([each.to(share.dtype) for each in now], dim=-1)
        return share, sums + carry["told"].to(share.dtype) if carry else sums

    def draw(
        self,
        m: int,
        n: int,
        width: int,
        generator: torch.Generator,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> Tensor:
        """Ω of shape (n, ℓ)."""
        return ps.Gaussian().draw(n, width, generator, dtype, out)

    def fresh(self, A: Tensor, draw: Draw, mask: Tensor | None = None) -> Tensor:
        """Q = orth((M Mᵀ)^h M Ω) for a whole h; ``mask`` (batch, ℓ) is zero where Q has no column."""
        assert draw.numbers is not None
        ops = ops_of(A.device)
        width = draw.numbers.shape[-1]
        padded = self.padded(width, A.dtype, A.device)
        Y = ops.sketched(A, draw.numbers.to(A.dtype), padded)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, padded - width))
            Y = Y * mask[:, None].to(Y.dtype)
        for _ in range(self.power):
            Y = ops.times(A.mT, _orthonormal(Y, A, rough=True))
            Y = ops.times(A, _orthonormal(Y, A, rough=True))
        Q = _orthonormal(Y, A)
        return Q if mask is None else Q * mask[:, None].to(Q.dtype)


@dataclass(frozen=True)
class Chosen(Measured):
    """A rank for each matrix; the sum over a batch is ``mean`` times the number of matrices.

    A power law σⱼ² ∝ j^−2a is fitted to each matrix, so that its first ℓᵢ values have the share α that
    the last steps measured. Ranks then go to the largest σⱼ² of all matrices: of M itself for
    ``by="energy"``, of M/‖M‖_F for ``by="share"``. The width of LowRank is the largest rank.
    """

    by: Literal["equal", "energy", "share"] = "energy"
    mean: int = 208
    least: int = 52

    @property
    def carries(self) -> tuple[str, ...]:
        """The exponents, the energies ‖M‖²_F and the sums of :class:`Measured`."""
        return ("decay", "energy", "told")

    def resumes(self, carry: Carry, m: int, n: int, width: int) -> bool:
        """Whether ``carry`` has what :attr:`carries` names."""
        return all(name in carry for name in self.carries)

    def ranks(self, count: int, rows: int, width: int, carry: Carry, device: Any) -> Tensor:
        """The ranks of this step (batch,), from the last step's carry."""
        if self.by == "equal" or not carry:
            return torch.full((count,), self.mean, device=device)
        values = power_law(carry["decay"].float()[:, 0], rows)[:, :width]
        if self.by == "energy":
            energy = carry["energy"].float()
            values = values * (energy / energy.amax().clamp_min(torch.finfo(torch.float32).tiny))
        return filled(values, self.least, self.mean)

    def basis(self, A: Tensor, width: int, carry: Carry, draw: Draw) -> Seen:
        """A new basis with ℓᵢ columns for the i-th matrix, and zero columns up to ``width``."""
        ranks = self.ranks(len(A), A.shape[-2], width, carry, A.device)
        mask = torch.arange(width, device=A.device) < ranks[:, None]
        Q = self.fresh(A, draw, mask)
        return Seen(Q, energy=_energy(A), ranks=ranks, renewed=torch.ones_like(ranks))

    def lift(
        self, inner: ps.PolarMap, B: Tensor, basis: Basis, width: int, carry: Carry, draw: Draw
    ) -> tuple[Lift, Carry]:
        """The inner map of B, and what the next step chooses from."""
        assert isinstance(basis, Seen)
        share, told = self.told(B, basis, carry)
        decay = fitted(share, basis.ranks, basis.Q.shape[-2])
        decay = torch.where(basis.energy > 0, decay, UNKNOWN)[:, None]
        if carry:
            decay = torch.lerp(carry["decay"].to(decay.dtype), decay, NEWEST)
        return inner.lift(B), Carry(decay=decay, energy=basis.energy[:, None], told=told)

    def flops(self, m: int, n: int, width: int) -> int:
        """The cost of a basis of the mean rank."""
        return Fresh(power=self.power).flops(m, n, self.mean)

    def describe(self, m: int, n: int, inner: ps.PolarMap, width: int, device: torch.device) -> str:
        """The mean rank and how ranks are chosen."""
        return f"h={self.power}, {self.mean} of {width} columns by {self.by}"


@dataclass(frozen=True)
class Renewed(Measured):
    """A kept basis; of ``steps`` steps each matrix has one with a new basis, on average.

    Of a batch of b matrices b/``steps`` get a new basis at each step: those with the largest fall of α
    since their basis was made (``by="fall"``), or those with the oldest basis (``by="age"``). With
    ``by="together"`` all have a new basis at each ``steps``-th step.
    The first ``steps`` steps all make new bases, as matrices may be zero at first.
    """

    by: Literal["together", "age", "fall"] = "fall"
    steps: int = 4

    @property
    def carries(self) -> tuple[str, ...]:
        """Qᵀ, the share when it was made, its fall since, the age of Q, and the sums."""
        return ("kept", "made", "fall", "age", "told")

    def resumes(self, carry: Carry, m: int, n: int, width: int) -> bool:
        """Whether ``carry`` has a basis of this width."""
        return "kept" in carry and carry["kept"].shape[1:] == (width, m)

    def due(self, count: int, carry: Carry, device: Any) -> Tensor:
        """Which matrices (batch,) get a new basis at this step."""
        if not carry:
            return torch.ones(count, dtype=torch.bool, device=device)
        step = carry["told"][0, 0].float()
        if self.by == "together":
            due = (step % self.steps == 0).expand(count)
        else:
            order = carry[self.by][:, 0].float().argsort(descending=True, stable=True)
            place = torch.empty_like(order).scatter(0, order, torch.arange(count, device=device))
            quota = ((step + 1) * count / self.steps).floor() - (step * count / self.steps).floor()
            due = place < quota
        return due | (step < self.steps)

    def basis(self, A: Tensor, width: int, carry: Carry, draw: Draw) -> Seen:
        """The kept basis, or a new one where it is due."""
        due = self.due(len(A), carry, A.device)
        Q = self.fresh(A, draw)
        if carry:
            kept = torch.nn.functional.pad(carry["kept"], (0, 0, 0, Q.shape[-1] - width))
            Q = torch.where(due[:, None, None], Q, kept.to(Q.dtype).mT)
        ranks = torch.full((len(A),), width, device=A.device)
        return Seen(Q, energy=_energy(A), ranks=ranks, renewed=due)

    def lift(
        self, inner: ps.PolarMap, B: Tensor, basis: Basis, width: int, carry: Carry, draw: Draw
    ) -> tuple[Lift, Carry]:
        """The inner map of B; the basis and its share are left for the next step."""
        assert isinstance(basis, Seen)
        share, told = self.told(B, basis, carry)
        share, due = share[:, None], basis.renewed[:, None]
        made, age = share, torch.ones_like(share)
        if carry:
            made = torch.where(due, share, carry["made"].to(share.dtype))
            age = torch.where(due, 1, carry["age"].to(share.dtype) + 1)
        left = Carry(kept=basis.Q.mT[:, :width], made=made, fall=made - share, age=age, told=told)
        return inner.lift(B), left

    def flops(self, m: int, n: int, width: int) -> int:
        """The cost of a new basis, charged to each step in equal shares."""
        return Fresh(power=self.power).flops(m, n, width) // self.steps

    def describe(self, m: int, n: int, inner: ps.PolarMap, width: int, device: torch.device) -> str:
        """How many steps a basis is kept, and what decides."""
        return f"h={self.power}, one new basis in {self.steps} steps by {self.by}"


def _energy(X: Tensor) -> Tensor:
    """‖X‖²_F of each matrix, in float32 at least."""
    dtype = torch.promote_types(X.dtype, torch.float32)
    return torch.linalg.vector_norm(X, dim=(-2, -1), dtype=dtype).square()


def _orthonormal(Y: Tensor, A: Tensor, *, rough: bool = False) -> Tensor:
    """An orthonormal basis of Y's range, in the precision of A."""
    return orthonormalize(ops_of(A.device).workable(Y), rough=rough).to(A.dtype)


def power_law(decay: Tensor, rows: int) -> Tensor:
    """(batch, rows) energies j^−2a/Σj^−2a for the exponents a = ``decay`` (batch,)."""
    j = torch.arange(1, rows + 1, device=decay.device, dtype=decay.dtype)
    values = j ** (-2 * decay[:, None])
    return values / values.sum(-1, keepdim=True)


def fitted(share: Tensor, ranks: Tensor, rows: int) -> Tensor:
    """The exponents (batch,) with which a power law has the share ``share`` in its first values.

    ``ranks`` (batch,) is the number of these values. The share grows with the exponent: it is looked up
    in a table, and interpolated.
    """
    grid = torch.arange(EXPONENTS, device=share.device, dtype=share.dtype) / 64
    shares = power_law(grid, rows).cumsum(-1)[:, ranks - 1]  # (exponents, batch)
    above = (shares < share).sum(0).clamp(1, EXPONENTS - 1)
    low, high = (shares.gather(0, at[None])[0] for at in (above - 1, above))
    part = ((share - low) / (high - low).clamp_min(torch.finfo(share.dtype).tiny)).clamp(0, 1)
    return torch.lerp(grid[above - 1], grid[above], part)


def filled(values: Tensor, least: int, mean: int) -> Tensor:
    """Ranks (batch,) of sum batch·``mean``, each at least ``least``, that take the largest ``values``.

    ``values`` (batch, largest rank) decrease along each row. Of equal values the first in its row is
    taken first, so that equal rows have equal ranks.
    """
    batch = len(values)
    free = values[:, least:].mT.reshape(-1)  # all first values, then all second values, …
    taken = free.argsort(descending=True, stable=True)[: batch * (mean - least)]
    counts = torch.zeros_like(free).scatter(0, taken, 1.0).view(-1, batch).sum(0)
    return least + counts.long()
