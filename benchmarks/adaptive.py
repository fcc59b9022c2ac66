"""Ranks and renewals chosen from the captured share, against fixed settings of equal cost.

    python benchmarks/adaptive.py run TRAIN.bin VAL.bin --maps rank-equal,rank-energy --seeds 0,1,2
    python benchmarks/adaptive.py table results/adaptive/runs.jsonl > results/adaptive/summary.md
    python benchmarks/adaptive.py spectra

Every step of a low-rank map knows the share α = ‖B‖²_F/‖M‖²_F of M that its basis has captured. Two
range finders make use of it, for the matrices of one shape together:

* :class:`Chosen` gives each matrix its own rank. The ranks of a bucket have a fixed sum.
* :class:`Renewed` makes a new basis for a fixed number of matrices at each step, for those first whose
  share has fallen most since their basis was made.

Each finder also has the fixed setting, which runs the same code. All decisions are made on the device,
from the numbers of the last step, and the host never waits for them.

**Equal cost** means an equal sum of ranks, or an equal number of new bases. Times say nothing: ranks are
made by zero columns in a basis of twice the mean width, and new bases are made for all matrices and used
for some. The products with M cost the same for an equal sum of ranks. The inner map, which costs ℓ²n and
ℓ³, costs a little more for unequal ranks; the table has the FLOPs.

``run`` is the training loop of ``frontier.py``. ``spectra`` trains a small GPT on a CPU with each rule,
and compares the energy that equal ranks can capture with what the best ranks can.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import frontier
import polarstep as ps
from polarstep import products
from polarstep.optim.step import Bucket
from polarstep.polar import Carry, Draw, Finder
from polarstep.polar.base import Lift
from polarstep.polar.finders import Basis, Fresh
from polarstep.polar.orthonormal import orthonormalize

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
        ops = products.of(A.device)
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
    ``by="together"`` all have a new basis at each ``steps``-th step, as ``LowRank(keep=steps)`` has.
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
    return orthonormalize(products.of(A.device).workable(Y), rough=rough).to(A.dtype)


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


def maps() -> dict[str, tuple[str, ps.PolarMap]]:
    """What each name stands for: in words, and as a map. The part before the last dash is its family.

    The first map of a family is its fixed setting.
    """
    flat = ps.NewtonSchulz(1, "flat")
    found: dict[str, tuple[str, ps.PolarMap]] = {}
    for by in ("equal", "energy", "share"):
        head = chosen(by, 56, 1)
        found[f"rank-{by}"] = (f"LowRank, mean ℓ = 208, h = 0, {by}", chosen(by, 208, 0))
        found[f"head-{by}"] = (f"Deflated, mean ℓ = 56, h = 1, {by}", ps.Deflated(head, flat))
    for by in ("together", "age", "fall"):
        wide, small = renewed(by, 208), renewed(by, 56)
        found[f"kept-{by}"] = (f"LowRank, ℓ = 208, h = 1, kept 4 steps, {by}", wide)
        of_head = f"Deflated, ℓ = 56, h = 1, kept 4 steps, {by}"
        found[f"head-kept-{by}"] = (of_head, ps.Deflated(small, flat))
    return found


def chosen(by: Any, mean: int, power: int) -> ps.LowRank:
    """A low-rank map with ranks from a quarter of ``mean`` to twice ``mean``."""
    finder = Chosen(power, by, mean, mean // 4)
    return ps.LowRank(2 * mean, 0, sketch=finder, inner=_inner(), always_sketch=True)


def renewed(by: Any, width: int) -> ps.LowRank:
    """A low-rank map with a basis of ``width`` columns that is kept for four steps on average."""
    return ps.LowRank(width, 0, sketch=Renewed(1, by), inner=_inner(), always_sketch=True)


def _inner() -> ps.NewtonSchulz:
    return ps.NewtonSchulz(4, "polar-express-sketch")


def measured(optimizer: ps.Muon) -> dict[str, Any]:
    """Means over all steps, for each shape a list over its matrices: rank, α and new bases per step."""
    found: dict[str, dict[str, list[float]]] = {"ranks": {}, "shares": {}, "renewals": {}}
    for group in optimizer.param_groups:
        for p in group["params"]:
            told = optimizer.state[p].get("told")
            if told is None:
                continue
            steps, *sums = told[0].tolist()
            for name, total in zip(found, sums, strict=True):
                of_shape = found[name].setdefault(f"{p.shape[0]}x{p.shape[1]}", [])
                of_shape.append(round(total / steps, 4))
    return found


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a row for each map, with the mean of the paired differences to its fixed setting.

    Differences are between runs of one seed, one rate and one number of steps. Shares and FLOPs are
    means over the seeds.
    """
    names = maps()
    first = {name.rpartition("-")[0]: name for name in reversed(names)}
    found: dict[tuple[float, int, str], dict[int, dict[str, Any]]] = {}
    for record in records:
        at = (record["lr"], record["steps"], record["map"])
        found.setdefault(at, {})[record["seed"]] = record
    yield "| map | tokens | validation perplexity, by seed | to the fixed setting | α | FLOPs |"
    yield "|---|---|---|---|---|---|"
    order = list(names)
    for lr, steps, name in sorted(found, key=lambda at: (*at[:2], order.index(at[2]))):
        runs, fixed = found[lr, steps, name], first[name.rpartition("-")[0]]
        beside = found.get((lr, steps, fixed), {})
        pairs = [
            (runs[s]["perplexity"], beside[s]["perplexity"]) for s in sorted({*runs} & {*beside})
        ]
        told = "–" if name == fixed else _difference([100 * (a / b - 1) for a, b in pairs])
        values = ", ".join(f"{runs[s]['perplexity']:.2f}" for s in sorted(runs))
        shares = [x for run in runs.values() for of in run["shares"].values() for x in of]
        words = names[name][0] + ("" if lr == frontier.RATE else f", rate {lr:g}")
        tokens = f"{steps * frontier.SEQUENCES * frontier.LENGTH / 1e6:.1f}M"
        cost = statistics.fmean(_cost(names[name][1], run["ranks"]) for run in runs.values())
        yield f"| {words} | {tokens} | {values} | {told} | {statistics.fmean(shares):.3f} | {cost:.3f} |"


def _difference(percents: list[float]) -> str:
    """The mean with a t-interval of 95%."""
    if not percents:
        return "no pair"
    mean = f"{statistics.fmean(percents):+.2f}%"
    if len(percents) == 1:
        return f"{mean} (one seed)"
    half = frontier.T[len(percents) - 2] * statistics.stdev(percents) / math.sqrt(len(percents))
    return f"{mean} ± {half:.2f}"


def _cost(polar: ps.PolarMap, ranks: dict[str, list[float]]) -> float:
    """FLOPs of low-rank steps with these ranks, over those with all ranks equal to their mean."""
    head = polar.head if isinstance(polar, ps.Deflated) else polar
    assert isinstance(head, ps.LowRank)
    power = head.finder.power if isinstance(head.finder, Measured) else head.power

    def cost(rank: float, shape: str) -> int:
        m, n = map(int, shape.split("x"))
        each = ps.LowRank(round(rank), 0, power, inner=head.inner, always_sketch=True)
        return each.flops(m, n)

    chosen = sum(cost(rank, shape) for shape, of in ranks.items() for rank in of)
    equal = sum(len(of) * cost(statistics.fmean(of), shape) for shape, of in ranks.items())
    return chosen / equal


def captured(values: Tensor, mean: int) -> dict[str, tuple[float, float]]:
    """What ranks of a mean of ``mean`` capture of matrices with singular values ``values`` (batch, m).

    By the rule: the share of all energy Σσ², and the mean over the matrices of α. ``equal`` ranks; the
    ``best`` ranks for the energy and for the mean of α; and the ranks of :class:`Chosen`, which knows
    only α at equal ranks.
    """
    energies = values.square()
    whole = energies.sum(-1, keepdim=True)
    shares, least, most = energies / whole, mean // 4, 2 * mean
    equal = torch.full((len(values),), mean)
    decay = fitted(shares[:, :mean].sum(-1), equal, values.shape[-1])
    law = power_law(decay, values.shape[-1])[:, :most]
    ranks = {
        "equal": equal,
        "best for energy": filled(energies[:, :most] / whole.max(), least, mean),
        "by energy": filled(law * whole / whole.max(), least, mean),
        "best for share": filled(shares[:, :most], least, mean),
        "by share": filled(law, least, mean),
    }
    found = {}
    for name, of in ranks.items():
        kept = torch.arange(values.shape[-1]) < of[:, None]
        found[name] = (
            float((energies * kept).sum() / energies.sum()),
            float((shares * kept).sum(-1).mean()),
        )
    return found


def spectra(steps: int, names: Sequence[str], width: int, seed: int) -> None:
    """Train a small GPT with each map, and print its validation loss and the means of :func:`measured`.

    After a run with ``full``, also what ranks could capture of its momentum. ℓ is a quarter of the width
    for low-rank maps, and a sixteenth of it for the heads of deflated maps.
    """
    quarter, few = width // 4, width // 16
    flat = ps.NewtonSchulz(1, "flat")
    polars: dict[str, ps.PolarMap] = {"full": ps.NewtonSchulz(5, "polar-express")}
    for by in ("equal", "energy", "share"):
        polars[f"rank-{by}"] = chosen(by, quarter, 0)
        polars[f"head-{by}"] = ps.Deflated(chosen(by, few, 1), flat)
    for by in ("together", "age", "fall"):
        polars[f"kept-{by}"] = renewed(by, quarter)
        polars[f"head-kept-{by}"] = ps.Deflated(renewed(by, few), flat)
    for name in names:
        begin = time.perf_counter()
        loss, optimizer, momenta = small_run(polars[name], steps, width, seed)
        seconds = time.perf_counter() - begin
        row = {"map": name, "seed": seed, "steps": steps, "width": width, "loss": loss}
        print(f"{json.dumps(row | measured(optimizer))}  {seconds:.0f} s", flush=True)
        for (step, m, n), matrices in momenta.items() if name == "full" else ():
            values = torch.linalg.svdvals(torch.stack(matrices))
            for mean in (few, quarter):
                rules = captured(values, mean)
                text = ", ".join(f"{rule} {a:.4f} {b:.4f}" for rule, (a, b) in rules.items())
                print(f"step {step}, {len(values)} of {m}x{n}, mean {mean}: {text}", flush=True)


def small_run(
    polar: ps.PolarMap, steps: int, width: int, seed: int
) -> tuple[float, ps.Muon, dict[tuple[int, int, int], list[Tensor]]]:
    """Train a GPT of four layers on the text that is in the package, on a CPU.

    Returns the validation loss, the optimizer, and the momentum matrices by step and shape at a fifth,
    at half and at the end of the run.
    """
    from polarstep_lab.data.corpus import corpus_tokens
    from polarstep_lab.models.gpt import GPT, GPTConfig

    train, val, vocabulary = corpus_tokens()
    tokens, held_out = (torch.from_numpy(part.astype("int64")) for part in (train, val))
    length, sequences = 128, 8
    config = GPTConfig(len(vocabulary), width, 4, 4, length)
    model = GPT(config, torch.Generator().manual_seed(seed))
    optimizer = ps.muon_for(
        model,
        lr=0.02,
        polar=polar,
        embeddings=ps.AdamW(lr=0.03),
        heads=ps.AdamW(lr=0.004),
        seed=seed,
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    where = torch.Generator().manual_seed(1000 + seed)
    shown = (steps // 5, steps // 2, steps)
    momenta: dict[tuple[int, int, int], list[Tensor]] = {}
    within = torch.arange(length + 1)

    def keep(bucket: Bucket) -> None:
        if bucket.step + 1 in shown:
            at = (bucket.step + 1, *bucket.M.shape[-2:])
            momenta.setdefault(at, []).extend(bucket.M.clone())

    optimizer.register_polar_hook(keep)
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (1 - step / steps) / 0.6)
        starts = torch.randint(len(tokens) - length - 1, (sequences, 1), generator=where)
        batch = tokens[starts + within]
        (model.loss(batch[:, :-1], batch[:, 1:]) / (sequences * length)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        batch = held_out[torch.arange(0, len(held_out) - length - 1, length)[:128, None] + within]
        loss = model.loss(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
    return float(loss), optimizer, momenta


def main() -> None:
    """The three commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run")
    train.add_argument("train", type=Path)
    train.add_argument("val", type=Path)
    train.add_argument("--maps", default="rank-equal,rank-energy")
    train.add_argument("--seeds", default="0,1,2")
    train.add_argument("--lr", type=float, default=frontier.RATE)
    train.add_argument("--steps", type=int, default=frontier.STEPS)
    train.add_argument("--out", type=Path, default=Path("adaptive.jsonl"))
    commands.add_parser("table").add_argument("records", type=Path)
    small = commands.add_parser("spectra")
    small.add_argument("--maps", default="full,rank-equal,rank-energy")
    small.add_argument("--steps", type=int, default=200)
    small.add_argument("--width", type=int, default=128)
    small.add_argument("--seeds", default="0")
    options = parser.parse_args()
    if options.command == "table":
        lines = options.records.read_text(encoding="utf-8").splitlines()
        print("\n".join(table([json.loads(line) for line in lines])))
        return
    if options.command == "spectra":
        for seed in map(int, options.seeds.split(",")):
            spectra(options.steps, options.maps.split(","), options.width, seed)
        return
    polars = {name: polar for name, (_, polar) in maps().items()}
    needed = options.steps * frontier.SEQUENCES * frontier.LENGTH + 1
    data = frontier.tokens(options.train)
    if len(data) < needed:
        sys.exit(f"{options.train} has {len(data):,} tokens: expected {needed:,}; lower --steps")
    data, held_out = data[:needed], frontier.tokens(options.val)
    for seed in map(int, options.seeds.split(",")):
        for name in options.maps.split(","):
            begin = time.perf_counter()
            row = frontier.run(
                data, held_out, name, seed, options.lr, options.steps, polars[name], measured
            )
            print(f"{json.dumps(row)}  {time.perf_counter() - begin:.0f} s", flush=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
