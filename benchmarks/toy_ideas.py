"""Ideas for a cheaper step on a toy GPT, on a CPU: a first look before a GPU's time is spent on them.

    python benchmarks/toy_ideas.py run TEXT.txt --out results/toy-ideas/runs.jsonl
    python benchmarks/toy_ideas.py table results/toy-ideas/runs.jsonl

A GPT of 4 layers × 96 on the characters of a text, 400 steps of 16 × 64 characters at one rate, ℓ = 16.
A run takes half a minute on one core. Runs that short and models that small do not rank maps that are
close (``frontier.py`` does that); they show what is far off. A run whose record is in ``--out`` is not
made again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polarstep as ps
from apart import Apart
from differences import percent
from every_second import EverySecond
from frontier import append, schedule
from kept_weight import KeptWeight
from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.storage import read_lines
from which_text import check_one_text, text_of_tokens

WIDTH, LAYERS, LENGTH, SEQUENCES, STEPS = 96, 4, 64, 16, 400
RATE = 0.02
SYMBOLS = 128
FULL = "full"
# A map that is no longer there.
GONE = {"scaled": "12+4, warm, rest scaled"}


def maps() -> dict[str, tuple[str, ps.PolarMap]]:
    """What each name stands for: in words, and as a map."""
    inner = ps.NewtonSchulz(4, "polar-express-sketch")
    head = ps.LowRank(12, 4, sketch=ps.Warm(), inner=inner, always_sketch=True)
    deflated = ps.Deflated(head, ps.NewtonSchulz(1, "flat"))
    return {
        FULL: ("full space, PolarExpress 5", ps.NewtonSchulz(5, "polar-express")),
        "deflated": ("12+4, warm, one step of degree 17", deflated),
        "apart": ("12+4, warm, one step of degree 17 on the rest apart", Apart(deflated)),
        "apart-2-jordan": (
            "12+4, warm, two Jordan steps on the rest apart",
            Apart(ps.Deflated(head, ps.NewtonSchulz(2, "jordan"))),
        ),
        "joint-2-jordan": (
            "12+4, warm, two Jordan steps",
            ps.Deflated(head, ps.NewtonSchulz(2, "jordan")),
        ),
        "kept2": ("full space, W kept for 2 steps", KeptWeight(2)),
        "kept4": ("full space, W kept for 4 steps", KeptWeight(4)),
        "kept2-capped": ("full space, W kept for 2 steps, capped", KeptWeight(2, "capped")),
        "kept4-capped": ("full space, W kept for 4 steps, capped", KeptWeight(4, "capped")),
        "second-scaled": ("12+4, lifted at every second step", EverySecond(deflated)),
        "second-sized": (
            "12+4, lifted at every second step, rest of equal ‖T‖_F between",
            EverySecond(deflated, "sized"),
        ),
        "second-head": (
            "12+4, lifted at every second step, no rest between",
            EverySecond(deflated, "head"),
        ),
    }


def characters(path: Path) -> tuple[Tensor, Tensor]:
    """The characters of a text as numbers: nine tenths to train on, and the rest."""
    text = path.read_text(encoding="utf-8")
    known = {character: i for i, character in enumerate(sorted(set(text)))}
    numbers = torch.tensor([known[character] for character in text]).clamp_max(SYMBOLS - 1)
    cut = len(numbers) * 9 // 10
    return numbers[:cut], numbers[cut:]


def run(train: Tensor, val: Tensor, name: str, seed: int) -> dict[str, Any]:
    """Train once; the record of the run."""
    config = GPTConfig(SYMBOLS, WIDTH, LAYERS, WIDTH // 32, LENGTH)
    model = GPT(config, torch.Generator().manual_seed(seed))
    optimizer = ps.muon_for(
        model,
        lr=RATE,
        polar=maps()[name][1],
        weight_decay=0.0,
        lr_scale="spectral",
        transform=None,
        embeddings=ps.AdamW(lr=0.03),
        heads=ps.AdamW(lr=0.004),
        vectors=ps.AdamW(lr=0.004),
        seed=seed,
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    shuffle = torch.Generator().manual_seed(1000 + seed)

    def summed(data: Tensor, starts: Sequence[int]) -> Tensor:
        batch = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        return model.loss(batch[:, :-1], batch[:, 1:])

    for step in range(STEPS):
        schedule(optimizer, rates, step / STEPS)
        starts = torch.randint(len(train) - LENGTH - 1, (SEQUENCES,), generator=shuffle).tolist()
        (summed(train, starts) / (SEQUENCES * LENGTH)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    count = min(512, (len(val) - 1) // LENGTH)
    with torch.no_grad():
        total = sum(
            float(summed(val, [LENGTH * i for i in range(first, min(first + 64, count))]))
            for first in range(0, count, 64)
        )
    return {"map": name, "seed": seed, "perplexity": math.exp(total / (count * LENGTH))}


def table(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Markdown: a row for each map, with the mean of the paired differences to full space."""
    check_one_text(records)
    found: dict[str, dict[int, float]] = {}
    for record in records:
        found.setdefault(record["map"], {})[record["seed"]] = record["perplexity"]
    yield "| map | perplexity, by seed | to full space |"
    yield "|---|---|---|"
    for name, runs in sorted(found.items(), key=lambda item: sum(item[1].values()) / len(item[1])):
        values = ", ".join(f"{runs[seed]:.2f}" for seed in sorted(runs))
        told = "–" if name == FULL else percent(runs, found[FULL]).told(unit="%")
        words = GONE[name] if name in GONE else maps()[name][0]
        yield f"| {words} | {values} | {told} |"


def main() -> None:
    """The two commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run")
    train.add_argument("text", type=Path)
    train.add_argument("--maps", default=",".join(maps()))
    train.add_argument("--seeds", default="0,1,2")
    train.add_argument("--out", type=Path, default=Path("toy-ideas.jsonl"))
    commands.add_parser("table").add_argument("records", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        print("\n".join(table(read_lines(options.records))))
        return
    data = characters(options.text)
    text = text_of_tokens(*data)
    for seed in map(int, options.seeds.split(",")):
        for name in options.maps.split(","):
            rows = read_lines(options.out)
            same = [row for row in rows if (row["map"], row["seed"]) == (name, seed)]
            check_one_text([*same, {"map": name, "seed": seed} | text])
            if same:
                continue
            begin = time.perf_counter()
            row = run(*data, name, seed) | text
            append(options.out, row)
            print(f"{json.dumps(row)}  {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
