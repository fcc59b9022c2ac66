"""What does a whole training step cost, and which part of it is the optimizer's?

    python benchmarks/whole_step.py --json whole-step.jsonl         # three widths, on the GPU
    python benchmarks/whole_step.py --width 2048 --tokens 16384
    python benchmarks/whole_step.py --quick                         # tiny, a few seconds on a laptop

Needs torch and this package alone (``PYTHONPATH=src`` in a clone). The model is the laboratory's GPT,
compiled and in bfloat16 on a GPU, with random tokens. All optimizers of a width update one model and
take turns, so that a machine that slows down slows all of them; a figure is the median over the rounds.
``optimizer_ms`` is the time from the end of the backward pass to the end of ``step()``. ``polarstep pack
whole-step.jsonl --out results/step-cost`` keeps what was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polarstep as ps
from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.train.passes import compiled
from timing import machine, timing_event

CONTEXT, VOCABULARY, HEAD = 1024, 50304, 128
WARM_UP = 8  # steps of each optimizer: the third and the fourth capture graphs
RATE = 1e-6  # nothing is learned here, and weights stay where they are
Optimizers = Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class Size:
    """A GPT and its batch."""

    width: int
    layers: int
    tokens: int
    context: int = CONTEXT
    vocabulary: int = VOCABULARY
    head: int = HEAD


SIZES = (Size(768, 12, 16 * 1024), Size(2048, 5, 16 * 1024), Size(4096, 2, 8 * 1024))
QUICK = (Size(32, 1, 32, 16, 64, 16),)


def optimizers(model: torch.nn.Module) -> dict[str, Callable[[], Optimizers]]:
    """The rows of the table, each a function that makes what steps the whole model."""
    on_gpu = next(model.parameters()).is_cuda

    def adamw(params: Sequence[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=RATE, fused=on_gpu)

    def of_torch() -> Optimizers:
        routes = ps.muon_for(model, lr=RATE).routes
        hidden = [p for name, p in model.named_parameters() if routes[name].algorithm == "Muon"]
        kept = {id(p) for p in hidden}
        others = [p for p in model.parameters() if id(p) not in kept]
        return torch.optim.Muon(hidden, lr=RATE), adamw(others)

    return {
        "AdamW": lambda: [adamw([*model.parameters()])],
        "muon_for": lambda: [ps.muon_for(model, lr=RATE)],
        "muon_for, cheap": lambda: [ps.muon_for(model, lr=RATE, polar=ps.Auto("cheap"))],
        "muon_for, full space": lambda: [ps.muon_for(model, lr=RATE, polar=None)],
        "torch.optim.Muon": of_torch,
    }


def measured(
    size: Size, device: torch.device, rounds: int, steps: int, only: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """A row for each optimizer: milliseconds of a whole step and of the optimizer, by round."""
    torch.manual_seed(0)
    config = GPTConfig(
        size.vocabulary, size.width, size.layers, size.width // size.head, size.context
    )
    model = GPT(config).to(device)
    tokens = torch.randint(size.vocabulary, (size.tokens // size.context, size.context + 1))
    x, y = (part.contiguous().to(device) for part in (tokens[:, :-1], tokens[:, 1:]))
    wrap: Any = compiled if device.type == "cuda" else lambda function: function
    autocast = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()

    def gradients() -> None:
        with autocast:
            loss = model.loss(x, y, wrap) / y.numel()
        loss.backward()  # type: ignore[no-untyped-call]

    made = {name: make() for name, make in optimizers(model).items() if not only or name in only}
    for parts in made.values():
        for _ in range(WARM_UP):
            _step(gradients, parts)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    for _ in range(rounds):
        for name, parts in made.items():
            for _ in range(2):  # the caches are those of this optimizer
                _step(gradients, parts)
            times[name].append(_timed(gradients, parts, device, steps))
    base = statistics.median(whole for whole, _ in next(iter(times.values())))
    for name, found in times.items():
        whole, optimizer = (statistics.median(part) for part in zip(*found, strict=True))
        yield {
            "optimizer": name,
            "ms": whole,
            "optimizer_ms": optimizer,
            "share": optimizer / whole,
            "ratio": whole / base,
            "ms_by_round": [whole for whole, _ in found],
        }


def _step(gradients: Callable[[], None], parts: Optimizers) -> None:
    gradients()
    for part in parts:
        part.step()
        # Gradients keep their places, which is what captured steps read.
        part.zero_grad(set_to_none=False)


def _timed(
    gradients: Callable[[], None], parts: Optimizers, device: torch.device, steps: int
) -> tuple[float, float]:
    """Mean milliseconds of a whole step, and of its optimizer."""
    if device.type == "cuda":
        return _timed_on_gpu(gradients, parts, steps)
    begin, spent = time.perf_counter(), 0.0
    for _ in range(steps):
        gradients()
        middle = time.perf_counter()
        for part in parts:
            part.step()
        spent += time.perf_counter() - middle
        for part in parts:
            part.zero_grad(set_to_none=False)
    return 1e3 * (time.perf_counter() - begin) / steps, 1e3 * spent / steps


def _timed_on_gpu(
    gradients: Callable[[], None], parts: Optimizers, steps: int
) -> tuple[float, float]:
    pairs = [(timing_event(), timing_event()) for _ in range(steps)]
    first, last = timing_event(), timing_event()
    torch.cuda.synchronize()
    first.record()
    for begin, end in pairs:
        gradients()
        begin.record()
        for part in parts:
            part.step()
        end.record()
        for part in parts:
            part.zero_grad(set_to_none=False)
    last.record()
    torch.cuda.synchronize()
    spent = sum(begin.elapsed_time(end) for begin, end in pairs)
    return first.elapsed_time(last) / steps, spent / steps


def commit() -> str:
    """The commit of this checkout, or "unknown"."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Measure, print, and append a line for each row to --json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--width", type=int, action="append", help="only this one; may be repeated")
    parser.add_argument("--layers", type=int, help="in place of the size's own")
    parser.add_argument("--tokens", type=int, help="of a batch, in place of the size's own")
    parser.add_argument("--only", action="append", default=[], help="a row; may be repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of each optimizer in a round")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--commit", help="for a copy without git")
    parser.add_argument("--json", type=Path, help="append lines of records to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    if device.type == "cuda":
        part = "whole-" + torch.cuda.get_device_name().split()[-1].lower()
    else:
        part = "whole-cpu"
    rounds, steps = (2, 2) if options.quick else (options.rounds, options.steps)
    made_of = {"machine": machine(device), "commit": options.commit or commit()}
    print(made_of["machine"])
    for size in QUICK if options.quick else SIZES:
        if options.width and size.width not in options.width:
            continue
        asked = vars(size) | {
            key: given for key in ("layers", "tokens") if (given := getattr(options, key))
        }
        for row in measured(Size(**asked), device, rounds, steps, options.only):
            name = row.pop("optimizer")
            told = f"{row['ms']:9.2f} ms  {row['ratio']:5.3f} × AdamW's"
            share = f"the optimizer {row['optimizer_ms']:8.2f} ms, {row['share']:.1%}"
            print(f"  width {size.width:5} {name:22} {told}  {share}", flush=True)
            line = {"kind": "time", "study": "step-cost", "part": part, "variant": name}
            line |= {"config": asked, "environment": made_of, "result": row}
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
