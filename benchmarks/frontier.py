"""Perplexity over cost: polar maps in one training loop, against full space at the same learning rate.

    python benchmarks/frontier.py run TRAIN.bin VAL.bin --maps full,flat-48-warm --seeds 0,1,2
    python benchmarks/frontier.py table results/frontier/runs.jsonl > results/frontier/summary.md

A GPT of 5 layers × 768 sees every token once: 1500 steps of 16 × 1024 tokens are 24.6 million.
Momentum rises from 0.85 to 0.95 over the first tenth; learning rates are constant, then fall linearly
to 5% over the last 60%. TRAIN.bin and VAL.bin are shards of GPT-2 tokens (``polarstep tokenize``
writes them). A run takes half a minute on an H200. ``ms`` is the time of ``step()`` in this loop, with
AdamW's part, on a host that is busy with the model; ``step_cost.py`` has the optimizer's alone.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

STEPS, SEQUENCES, LENGTH = 1500, 16, 1024
FULL = "full"
RATE = 0.014  # the best of 0.01, 0.014 and 0.02 for full space on one seed of an earlier loop
# Student's t at 97.5% for 1 to 9 degrees of freedom.
T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


# Maps of runs that were made with an earlier form of the deflated map: δ was an estimate of ‖R‖_op by
# subspace iteration, the scale before the steps a constant, and steps could act on the rest apart.
EARLIER = {
    "scaled": "LowRank(200+8), rest scaled (earlier δ)",
    "joint-1": "48+8, one minimax quintic (earlier scale)",
    "joint-2": "48+8, two minimax quintics (earlier scale)",
    "joint-2-24": "24+8, two minimax quintics (earlier scale)",
    "joint-2-wide": "48+8, two minimax quintics for 0.03 on (earlier scale)",
    "joint-2-paper": "48+8, cubic and quintic (earlier scale)",
    "joint-2-kept": "48+8, two minimax quintics, basis kept 4 steps (earlier scale)",
    "joint-2-warm": "48+8, two minimax quintics, warm (earlier scale)",
    "apart-1-jordan": "48+8, one Jordan step on the rest apart",
    "apart-1-degree-9": "48+8, one minimax step of degree 9 on the rest apart",
    "apart-2": "48+8, two minimax quintics on the rest apart",
    "apart-2-jordan": "48+8, two Jordan steps on the rest apart",
}


def maps() -> dict[str, tuple[str, Any]]:
    """What each name stands for: in words, and as a map."""
    import polarstep as ps

    def head(rank: int, power: float = 1, **options: Any) -> ps.LowRank:
        inner = ps.NewtonSchulz(4, "polar-express-sketch")
        return ps.LowRank(rank, 8, power=power, inner=inner, **options)

    flat, jordan = ps.NewtonSchulz(1, "flat"), ps.NewtonSchulz(1, "jordan")
    found = {
        FULL: ("full space, PolarExpress 5", ps.NewtonSchulz(5, "polar-express")),
        "low-rank": ("LowRank(200+8), h = 0", head(200, 0)),
        "scaled-200": ("LowRank(200+8), h = 1, rest scaled", ps.Deflated(head(200))),
    }
    for rank in (24, 48, 104, 200):
        warm = head(rank, sketch=ps.Warm())
        for name, words, steps in (
            ("flat", "one step of degree 17", flat),
            ("jordan", "one Jordan step", jordan),
        ):
            found[f"{name}-{rank}"] = (f"{rank}+8, h = 1, {words}", ps.Deflated(head(rank), steps))
            found[f"{name}-{rank}-warm"] = (f"{rank}+8, warm, {words}", ps.Deflated(warm, steps))
            if steps is flat:
                for suffix, of in (("", head(rank)), ("-warm", warm)):
                    of_words = "warm" if suffix else "h = 1"
                    found[f"flat-{rank}{suffix}-16"] = (
                        f"{rank}+8, {of_words}, {words} in 16 bits",
                        ps.Deflated(of, flat, float8=False),
                    )
            kept = ps.Deflated(head(rank, keep=4), steps)
            found[f"{name}-{rank}-kept"] = (f"{rank}+8, kept 4 steps, {words}", kept)
    return found


def run(
    train: Any,
    val: Any,
    name: str,
    seed: int,
    lr: float,
    steps: int,
    polar: Any = None,
    measured: Callable[[Any], dict[str, Any]] = lambda optimizer: {},
) -> dict[str, Any]:
    """Train once; ``name`` may end in ``+rows`` for normalized rows.

    ``polar`` is a map that is not among :func:`maps`. What ``measured`` returns for the optimizer after
    the last step is added to the record.
    """
    import torch

    import polarstep as ps
    from polarstep_lab.models.gpt import GPT, GPTConfig
    from polarstep_lab.training.compiled_model import compiled

    device = torch.device("cuda")
    config = GPTConfig(50304, 768, 5, 6, LENGTH)
    model = GPT(config, torch.Generator().manual_seed(seed)).to(device)
    base, *rows = name.split("+")
    optimizer = ps.muon_for(
        model,
        lr=lr,
        polar=maps()[base][1] if polar is None else polar,
        transform=ps.NormalizedRows() if rows else None,
        embeddings=ps.AdamW(lr=0.3),
        heads=ps.AdamW(lr=0.004),
        vectors=ps.AdamW(lr=0.004),
        seed=seed,
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    shuffle = torch.Generator().manual_seed(1000 + seed)
    order = torch.randperm(steps * SEQUENCES, generator=shuffle).to(device)
    within = torch.arange(LENGTH + 1, device=device)

    def summed(windows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        batch = tokens[(windows * LENGTH)[:, None] + within].long()
        with torch.autocast("cuda", torch.bfloat16):
            return model.loss(batch[:, :-1], batch[:, 1:], compiled)

    times = []
    for step in range(steps):
        done = step / steps
        factor = 1.0 if done < 0.4 else 1 - (done - 0.4) / 0.6 * 0.95
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
            if group["algorithm"] == "muon":
                group["momentum"] = 0.85 + 0.1 * min(1.0, done / 0.1)
        loss = summed(order[SEQUENCES * step : SEQUENCES * (step + 1)], train)
        (loss / (SEQUENCES * LENGTH)).backward()
        if step % 100 == 50:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            optimizer.step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    count = (len(val) - 1) // LENGTH // SEQUENCES * SEQUENCES
    with torch.no_grad():
        windows = torch.arange(count, device=device).split(SEQUENCES)
        total = sum(float(summed(part, val).double()) for part in windows)
    perplexity = math.exp(total / (count * LENGTH))
    row = {"map": name, "seed": seed, "lr": lr, "steps": steps, "perplexity": perplexity}
    return row | {"ms": statistics.median(times)} | measured(optimizer)


def table(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown: a row for each map and rate, with the mean of the paired differences to full space.

    Differences are between runs of one seed and one rate. Rows of other rates than :data:`RATE` say so.
    """
    names = EARLIER | {name: words for name, (words, _) in maps().items()}
    found: dict[tuple[str, float], dict[int, float]] = {}
    for record in records:
        at = (record["map"], record.get("lr", RATE))
        found.setdefault(at, {})[record["seed"]] = record["perplexity"]
    rows = []
    for (name, lr), runs in found.items():
        base, *normal = name.split("+")
        words = names[base] + (", rows normalized" if normal else "")
        words += "" if lr == RATE else f", rate {lr:g}"
        full = found[FULL, lr]
        ratios = [100 * (runs[s] / full[s] - 1) for s in sorted(set(runs) & set(full))]
        mean = statistics.fmean(ratios)
        interval = "one seed"
        if len(ratios) > 1:
            half = T[len(ratios) - 2] * statistics.stdev(ratios) / math.sqrt(len(ratios))
            interval = f"± {half:.1f}"
        values = ", ".join(f"{runs[s]:.2f}" for s in sorted(runs))
        told = "–" if name == FULL else f"{mean:+.1f}% ({interval})"
        if mean > 100:
            told = "diverged"
        rows.append((mean, words, f"| {words} | {values} | {told} |"))
    yield "| map | validation perplexity, by seed | to full space |"
    yield "|---|---|---|"
    yield from (text for *_, text in sorted(rows))


def tokens(path: Path) -> Any:
    """A shard on the GPU."""
    import torch

    from polarstep_lab.data.shards import open_shard

    return torch.from_numpy(open_shard(path).astype("int32")).to("cuda")


def main() -> None:
    """The two commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run")
    train.add_argument("train", type=Path)
    train.add_argument("val", type=Path)
    train.add_argument("--maps", default="full,low-rank,flat-48-warm,full+rows,flat-48-warm+rows")
    train.add_argument("--seeds", default="0,1,2")
    train.add_argument("--lr", type=float, default=RATE)
    train.add_argument("--steps", type=int, default=STEPS)
    train.add_argument("--out", type=Path, default=Path("frontier.jsonl"))
    commands.add_parser("table").add_argument("records", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        lines = options.records.read_text(encoding="utf-8").splitlines()
        print("\n".join(table([json.loads(line) for line in lines])))
        return
    needed = options.steps * SEQUENCES * LENGTH + 1
    data = tokens(options.train)
    if len(data) < needed:
        sys.exit(f"{options.train} has {len(data):,} tokens: expected {needed:,}; lower --steps")
    data, held_out = data[:needed], tokens(options.val)
    for seed in map(int, options.seeds.split(",")):
        for name in options.maps.split(","):
            begin = time.perf_counter()
            row = run(data, held_out, name, seed, options.lr, options.steps)
            print(f"{json.dumps(row)}  {time.perf_counter() - begin:.0f} s", flush=True)
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
