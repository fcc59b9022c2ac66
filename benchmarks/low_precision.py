"""Parameters in bfloat16 and momentum in fewer bits: perplexity by seed, and bytes of state a parameter.

    python benchmarks/low_precision.py run --seeds 0,1,2 --out runs.jsonl          # on a CPU, minutes
    python benchmarks/low_precision.py run TRAIN.bin VAL.bin --out runs.jsonl      # on a GPU
    python benchmarks/low_precision.py table low-precision.jsonl

Without shards a GPT of 2 layers × 48 reads the characters of the text shipped with the laboratory, 250
steps of 8 × 48. With shards (``polarstep tokenize`` writes them) a GPT of 5 layers × 768 reads 1500
steps of 16 × 1024 tokens. Rates rise over the first 20 steps and fall to zero as a cosine: small updates
come at the end. The model computes in float32 on a CPU and in bfloat16 on a GPU, whatever its parameters
are kept in.

A run whose record is in ``--out`` is not made again. A table is of runs of one shape, those of 250 steps
where there are some.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import frontier
import polarstep as ps
from differences import change
from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.storage import read_lines
from which_text import text_of_shards, text_of_tokens

REFERENCE = "float32"
WIDTHS, RATES = {"cpu": 48, "cuda": 768}, {"cpu": 0.003, "cuda": 0.014}
"""Of the models on the two devices; early records have the device alone."""
STEPS = 250


@dataclass(frozen=True)
class Variant:
    """What is kept in which precision."""

    words: str
    parameters: torch.dtype = torch.float32
    rounding: Literal["nearest", "compensated"] = "nearest"
    momentum: torch.dtype | None = None
    stochastic: bool = False  # float32 with bfloat16's values, rounded up or down at random


VARIANTS = {
    REFERENCE: Variant("float32"),
    "nearest": Variant("bfloat16", torch.bfloat16),
    "stochastic": Variant("bfloat16, rounded at random (not in the library)", stochastic=True),
    "compensated": Variant("bfloat16, compensated", torch.bfloat16, "compensated"),
    "momentum-16": Variant("float32, momentum in bfloat16", momentum=torch.bfloat16),
    "momentum-8": Variant("float32, momentum in 8 bits", momentum=torch.int8),
    "compensated-8": Variant(
        "bfloat16, compensated, momentum in 8 bits", torch.bfloat16, "compensated", torch.int8
    ),
}


@dataclass(frozen=True)
class Setting:
    """A model and its data."""

    train: Tensor
    val: Tensor
    config: GPTConfig
    steps: int
    sequences: int
    lr: float
    text: Mapping[str, str]
    """What a record says of the data."""

    def windows(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets from the given places."""
        within = torch.arange(self.config.context + 1, device=tokens.device)
        batch = tokens[starts.to(tokens.device)[:, None] + within].long()
        return batch[:, :-1], batch[:, 1:]


def setting(shards: Sequence[Path]) -> Setting:
    """The small model for a CPU, or the large one for a GPU and shards."""
    if not shards:
        from polarstep_lab.data.corpus import CharacterVocabulary, corpus_text

        text = corpus_text()
        vocabulary = CharacterVocabulary.of(text)
        tokens = torch.from_numpy(vocabulary.encode(text).astype("int32"))
        cut = len(tokens) * 9 // 10
        config = GPTConfig(len(vocabulary), WIDTHS["cpu"], 2, 2, 48)
        parts = tokens[:cut], tokens[cut:]
        return Setting(*parts, config, STEPS, 8, RATES["cpu"], text_of_tokens(*parts))
    from polarstep_lab.data.shards import open_shard

    train, val = (torch.from_numpy(open_shard(path).astype("int32")).cuda() for path in shards)
    config = GPTConfig(50304, WIDTHS["cuda"], 5, 6, 1024)
    return Setting(train, val, config, 1500, 16, RATES["cuda"], text_of_shards(*shards))


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss, computed alike for parameters of either precision."""
    if inputs.is_cuda:
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(inputs)
    else:
        logits = functional_call(model, {n: p.float() for n, p in model.named_parameters()}, inputs)
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def round_at_random(p: Tensor, generator: torch.Generator) -> None:
    """``p`` in float32, rounded to a neighbour in bfloat16; on average it is unchanged."""
    noise = torch.randint(
        0, 2**16, p.shape, generator=generator, dtype=torch.int32, device=p.device
    )
    p.copy_(((p.view(torch.int32) + noise) & -(2**16)).view(torch.float32))


def run(name: str, seed: int, its: Setting) -> dict[str, Any]:
    """Train once; the record of it."""
    variant, device = VARIANTS[name], its.train.device
    model = GPT(its.config, torch.Generator().manual_seed(seed)).to(device)
    model = model.bfloat16().to(variant.parameters)  # all begin with bfloat16's values
    optimizer = ps.muon_for(
        model,
        lr=its.lr,
        polar=None,
        weight_decay=0.0,
        shape_scale="spectral",
        transform=None,
        others=ps.AdamW(lr=0.002),
        momentum_dtype=variant.momentum,
        rounding=variant.rounding,
    )
    rates = [group["lr"] for group in optimizer.param_groups]
    order, noise = (torch.Generator().manual_seed(s) for s in (1000 + seed, 2000 + seed))
    if device.type == "cuda":
        noise = torch.Generator(device).manual_seed(2000 + seed)
    last = len(its.train) - its.config.context - 1
    for step in range(its.steps):
        factor = min(1, (step + 1) / 20) * (1 + math.cos(math.pi * step / its.steps)) / 2
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        starts = torch.randint(last, (its.sequences,), generator=order)
        optimizer.zero_grad()
        loss = loss_of(model, *its.windows(its.train, starts))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if variant.stochastic:
            with torch.no_grad():
                for p in model.parameters():
                    round_at_random(p, noise)
    with torch.no_grad():
        starts = torch.arange(0, len(its.val) - its.config.context - 1, its.config.context)
        parts = torch.split(starts[: 64 * its.sequences], its.sequences)
        losses = [loss_of(model, *its.windows(its.val, part)).item() for part in parts]
    hidden = [p for g in optimizer.param_groups if g["algorithm"] == "muon" for p in g["params"]]
    kept = sum(X.nbytes for p in hidden for X in optimizer.state[p].values())
    kept = 0 if variant.stochastic else kept
    row = asked(name, seed, its) | {"loss": statistics.fmean(losses)}
    return row | {"bytes": round(kept / sum(p.numel() for p in hidden), 3), "device": device.type}


def asked(name: str, seed: int, its: Setting) -> dict[str, Any]:
    """What the record of a run begins with, and what it says of the text."""
    made = {"variant": name, "seed": seed, "steps": its.steps}
    return made | {"width": its.config.width, "lr": its.lr} | dict(its.text)


def as_run(record: frontier.Row) -> frontier.Row:
    """A record with all that :func:`frontier.identity` takes, the variant as its map."""
    device = record.get("device", "")
    known = {"width": WIDTHS.get(device), "lr": RATES.get(device)}
    return known | dict(record) | {"map": record["variant"]}


def table(records: Sequence[frontier.Row]) -> Iterator[str]:
    """Markdown: a row a variant, with its difference to float32 over paired seeds.

    The runs are those of :func:`frontier.of_one_shape`.
    """
    shown = frontier.of_one_shape([*map(as_run, records)], (STEPS, WIDTHS["cpu"]))
    by_name: dict[str, dict[int, frontier.Row]] = {}
    for (name, seed, *_), record in frontier.by_identity(shown).items():
        by_name.setdefault(name, {})[seed] = record
    reference = by_name[REFERENCE]
    yield "| parameters | validation perplexity, by seed | to float32 | state, bytes a parameter |"
    yield "|---|---|---|---|"
    for name in (name for name in VARIANTS if name in by_name):
        runs = by_name[name]
        common = sorted(set(runs) & set(reference))
        gaps = [100 * math.expm1(runs[seed]["loss"] - reference[seed]["loss"]) for seed in common]
        told = "–" if name == REFERENCE else change(gaps).told(2, "%")
        values = ", ".join(f"{math.exp(runs[seed]['loss']):.3f}" for seed in common)
        size = "–" if VARIANTS[name].stochastic else f"{runs[common[0]]['bytes']:.2f}"
        yield f"| {VARIANTS[name].words} | {values} | {told} | {size} |"


def main() -> None:
    """The two commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run")
    train.add_argument("shards", type=Path, nargs="*", help="TRAIN.bin VAL.bin")
    train.add_argument("--variants", default=",".join(VARIANTS))
    train.add_argument("--seeds", default="0,1,2")
    train.add_argument("--steps", type=int, help="fewer than the setting's")
    train.add_argument("--out", type=Path, default=Path("low-precision.jsonl"))
    commands.add_parser("table").add_argument("records", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        print("\n".join(table(read_lines(options.records))))
        return
    its = setting(options.shards)
    its = replace(its, steps=options.steps or its.steps)
    for seed in map(int, options.seeds.split(",")):
        for name in options.variants.split(","):
            known = map(as_run, read_lines(options.out))
            if frontier.is_recorded(as_run(asked(name, seed, its)), known):
                print(f"{name}, seed {seed}: in {options.out}", flush=True)
                continue
            row = run(name, seed, its)
            print(json.dumps(row), flush=True)
            frontier.append(options.out, row)


if __name__ == "__main__":
    main()
