"""Ranks and renewals chosen from the captured share, against fixed settings of equal cost.

    python benchmarks/adaptive.py run TRAIN.bin VAL.bin --maps rank-equal,rank-energy --seeds 0,1,2
    python benchmarks/adaptive.py table results/adaptive/runs.jsonl > results/adaptive/summary.md
    python benchmarks/adaptive.py spectra --maps full,rank-equal,rank-energy > small.jsonl

Every step of a low-rank map knows the share α = ‖B‖²_F/‖M‖²_F of M that its basis has captured. The
finders of ``adaptive_finders.py`` choose ranks and renew kept bases by it.

**Equal cost** means an equal sum of ranks, or an equal number of new bases. Times say nothing: ranks are
made by zero columns in a basis of twice the mean width, and new bases are made for all matrices and used
for some. The products with M cost the same for an equal sum of ranks. The inner map, which costs ℓ²n and
ℓ³, costs a little more for unequal ranks; the table has the FLOPs.

``run`` is the training loop of ``frontier.py``; a run whose record is in ``--out`` is not made again.
``spectra`` trains a small GPT on a CPU with each rule, and compares the energy that equal ranks can
capture with what the best ranks can.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import frontier
import polarstep as ps
from adaptive_finders import Chosen, Measured, Renewed, filled, fitted, power_law
from differences import percent
from polarstep.bucket import Observed
from polarstep_lab.storage import read_lines
from which_text import text_of_shards, text_of_tokens


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


def table(records: Sequence[frontier.Row]) -> Iterator[str]:
    """Markdown: a row for each map, with the mean of the paired differences to its fixed setting.

    Differences are between runs of one seed, one rate and one number of steps, and all runs have the
    width of ``frontier.py``; those of another are left out, which is said on the standard error. Shares
    and FLOPs are means over the seeds.
    """
    shown = {shape for shape in map(frontier.shape_of, records) if shape[1] == frontier.WIDTH}
    frontier.say_left_out(records, shown)
    kept = [record for record in records if frontier.shape_of(record) in shown]
    names = maps()
    first = {name.rpartition("-")[0]: name for name in reversed(names)}
    found: dict[tuple[float, int, str], dict[int, frontier.Row]] = {}
    for (name, seed, lr, steps, _), record in frontier.by_identity(kept).items():
        found.setdefault((lr, steps, name), {})[seed] = record
    yield "| map | tokens | validation perplexity, by seed | to the fixed setting | α | FLOPs |"
    yield "|---|---|---|---|---|---|"
    order = list(names)
    for lr, steps, name in sorted(found, key=lambda at: (*at[:2], order.index(at[2]))):
        runs, fixed = found[lr, steps, name], first[name.rpartition("-")[0]]
        beside = found.get((lr, steps, fixed), {})
        ours, theirs = (
            {seed: run["perplexity"] for seed, run in of.items()} for of in (runs, beside)
        )
        told = "no pair" if ours.keys().isdisjoint(theirs) else percent(ours, theirs).told(2, "%")
        told = "–" if name == fixed else told
        values = ", ".join(f"{runs[s]['perplexity']:.2f}" for s in sorted(runs))
        shares = [x for run in runs.values() for of in run["shares"].values() for x in of]
        words = names[name][0] + ("" if lr == frontier.RATE else f", rate {lr:g}")
        tokens = f"{steps * frontier.SEQUENCES * frontier.LENGTH / 1e6:.1f}M"
        cost = statistics.fmean(_cost(names[name][1], run["ranks"]) for run in runs.values())
        yield f"| {words} | {tokens} | {values} | {told} | {statistics.fmean(shares):.3f} | {cost:.3f} |"


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
    whole = energies.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
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
            round(float((energies * kept).sum() / energies.sum()), 4),
            round(float((shares * kept).sum(-1).mean()), 4),
        )
    return found


def spectra(steps: int, names: Sequence[str], width: int, seed: int) -> Iterator[dict[str, Any]]:
    """Train a small GPT with each map: records of its validation loss and of :func:`measured`.

    After a run with ``full``, also of what ranks could capture of its momentum. ℓ is a quarter of the
    width for low-rank maps, and a sixteenth of it for the heads of deflated maps.
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
    text = text_of_tokens(*small_text()[:2])
    for name in names:
        loss, optimizer, momenta = small_run(polars[name], steps, width, seed)
        row = {"map": name, "seed": seed, "steps": steps, "width": width, "loss": loss}
        yield row | measured(optimizer) | text
        for (step, m, n), matrices in momenta.items() if name == "full" else ():
            values = torch.linalg.svdvals(torch.stack(matrices))
            for mean in (few, quarter):
                at = {"shape": f"{m}x{n}", "count": len(values), "step": step, "mean": mean}
                yield at | {"captured": captured(values, mean)}


def small_text() -> tuple[Tensor, Tensor, int]:
    """The text that is in the package: to train on, held out, and the number of its characters."""
    from polarstep_lab.data.corpus import corpus_tokens

    train, val, vocabulary = corpus_tokens()
    tokens, held_out = (torch.from_numpy(part.astype("int64")) for part in (train, val))
    return tokens, held_out, len(vocabulary)


def small_run(
    polar: ps.PolarMap, steps: int, width: int, seed: int
) -> tuple[float, ps.Muon, dict[tuple[int, int, int], list[Tensor]]]:
    """Train a GPT of four layers on the text that is in the package, on a CPU.

    Returns the validation loss, the optimizer, and the momentum matrices by step and shape at a fifth,
    at half and at the end of the run.
    """
    from polarstep_lab.models.gpt import GPT, GPTConfig

    tokens, held_out, symbols = small_text()
    length, sequences = 128, 8
    config = GPTConfig(symbols, width, 4, 4, length)
    model = GPT(config, torch.Generator().manual_seed(seed))
    optimizer = ps.muon_for(
        model,
        lr=0.02,
        polar=polar,
        weight_decay=0.0,
        lr_scale="spectral",
        transform=None,
        embeddings=ps.AdamW(lr=0.03),
        heads=ps.AdamW(lr=0.004),
        seed=seed,
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    where = torch.Generator().manual_seed(1000 + seed)
    shown = (steps // 5, steps // 2, steps)
    momenta: dict[tuple[int, int, int], list[Tensor]] = {}
    within = torch.arange(length + 1)

    def keep(bucket: Observed) -> None:
        if bucket.step + 1 in shown:
            at = (bucket.step + 1, *bucket.M.shape[-2:])
            momenta.setdefault(at, []).extend(bucket.M.clone())

    optimizer.register_polar_hook(keep)
    for step in range(steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (1 - step / steps) / 0.6)
        starts = torch.randint(len(tokens) - length - 1, (sequences, 1), generator=where)
        batch = tokens[starts + within]
        loss = model.loss(batch[:, :-1], batch[:, 1:]) / (sequences * length)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        batch = held_out[torch.arange(0, len(held_out) - length - 1, length)[:128, None] + within]
        loss = model.loss(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
    return round(float(loss), 4), optimizer, momenta


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
        print("\n".join(table(read_lines(options.records))))
        return
    if options.command == "spectra":
        for seed in map(int, options.seeds.split(",")):
            for row in spectra(options.steps, options.maps.split(","), options.width, seed):
                print(json.dumps(row), flush=True)
        return
    polars = {name: polar for name, (_, polar) in maps().items()}
    data, held_out = frontier.shards(options.train, options.val, options.steps, "cuda")
    text = text_of_shards(options.train, options.val)
    for seed in map(int, options.seeds.split(",")):
        for name in options.maps.split(","):
            begin = time.perf_counter()
            asked = {"map": name, "seed": seed, "lr": options.lr, "steps": options.steps}
            if frontier.is_recorded(asked | text, read_lines(options.out)):
                print(f"{name}, seed {seed}: in {options.out}", flush=True)
                continue
            row = frontier.run(
                data, held_out, name, seed, options.lr, options.steps,
                polar=polars[name], measured=measured, text=text,
            )  # fmt: skip
            frontier.append(options.out, row)
            print(f"{json.dumps(row)}  {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
