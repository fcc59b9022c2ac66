"""What two lines give: ``muon_for(model)`` against other optimizers at the best of their grids.

    python -m polarstep_lab.studies.two_lines --data data --out two-lines.jsonl gpt2:adamw gpt2:default
    python -m polarstep_lab.studies.two_lines --data data gpt2:ours:lr=0.02,weight_decay=0.1:3
    python -m polarstep_lab.studies.two_lines --table results/two-lines

A job is FAMILY:METHOD, or FAMILY:METHOD:OPTIONS:SEEDS with the options given. Without options the best
ones are looked for on seed 3, one after another and in at most eight runs: each option climbs its ladder
while the loss on the validation text falls. Seeds 0, 1 and 2 are then run with the choice. Jobs are done
in order, ``--workers`` at once. A run whose record is in ``--out`` is not made again, so that the same
command goes on where it stopped.

Rates are constant, then fall linearly to 5% over the last 60% of a run. AdamW's rise over the first 5%.
A record has the mean loss on held-out data after the last step: ``validation`` on the first half, which
chooses options, ``test`` on the second half, and ``held_out`` on all of it; ``curve`` is that on the
first half after so many steps. A run whose loss is not finite ends early and has no such loss.

--data holds ``wiki_train_000001.bin`` and ``wiki_val_000000.bin``, shards of GPT-2 tokens; for the
small families, which are for a CPU (``--device cpu``), CIFAR-10, ``tinyshakespeare.txt`` and
``mobydick.txt``. It needs torch and numpy, and scipy for the table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from polarstep_lab import records
from polarstep_lab.estimates import Estimate
from polarstep_lab.storage import read_lines

CHOICE, SEEDS, MOST, EVERY = 3, (0, 1, 2), 8, 100
Record = Mapping[str, Any]
Options = Mapping[str, float]


def train(
    family: str, method: str, options: Options, seed: int, steps: int, folder: Path, device: str
) -> dict[str, Any]:
    """Train a model once, and return what its record has of the result."""
    import torch

    from polarstep_lab.studies.two_lines.families import FAMILIES, halves
    from polarstep_lab.studies.two_lines.methods import METHODS
    from polarstep_lab.train.passes import compiled

    on_gpu = device == "cuda"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(seed)
    data = opened(family, folder, device)
    model = FAMILIES[family].model(seed, folder).to(device)
    optimizers = METHODS[method].build(model, **options)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [float(group["lr"]) for group in groups]
    wrap: Any = compiled if on_gpu else lambda function: function
    autocast = partial(torch.autocast, device, torch.bfloat16, enabled=on_gpu)
    curve: list[tuple[int, float]] = []
    begin = time.perf_counter()
    for step, (x, y) in enumerate(data.train(seed, steps)):
        factor = rate_factor(step / steps, METHODS[method].warm_up)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * factor
        with autocast():
            loss = model.loss(x, y, wrap) / y.numel()  # type: ignore[operator]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if step == 20:
            if on_gpu:
                torch.cuda.synchronize()
            begin = time.perf_counter()
        if (step + 1) % EVERY == 0:
            with autocast():
                curve.append(
                    (step + 1, statistics.fmean(data.losses(model, wrap, data.count // 2)))
                )
            if not math.isfinite(curve[-1][1]):
                curve.pop()
                break
    ended = {"curve": curve, "tokens": steps * y.numel()}
    ended["ms"] = 1000 * (time.perf_counter() - begin) / max(1, step - 20)
    with autocast():
        losses = halves(data.losses(model, wrap))
    ended |= losses if all(map(math.isfinite, losses.values())) else {}
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    return ended | {"device": name, "torch": torch.__version__} | data.digests


def rate_factor(done: float, warm_up: float = 0.0) -> float:
    """What learning rates are multiplied by, after a part ``done`` of a run."""
    if done < warm_up:
        return done / warm_up
    return 1.0 if done < 0.4 else 1 - (done - 0.4) / 0.6 * 0.95


@cache
def opened(family: str, folder: Path, device: str) -> Any:
    """The data of a family, read once by each process."""
    from polarstep_lab.studies.two_lines.families import FAMILIES

    return FAMILIES[family].data(folder, device)


def loss_of(record: Record, text: str = "validation") -> float:
    """The loss of a run, infinite if the run diverged."""
    return float(record.get(text, math.inf))


def climb(
    start: Options, ladders: Mapping[str, Sequence[float]], loss: Callable[[Options], float]
) -> dict[str, float]:
    """The best options found by moving one after another along its ladder while the loss falls.

    No more than :data:`MOST` different options are tried.
    """
    best = dict(start)
    tried = {tuple(best.values()): loss(best)}

    def better(options: dict[str, float]) -> bool:
        key = tuple(options.values())
        if key not in tried:
            if len(tried) == MOST:
                return False
            tried[key] = loss(options)
        return tried[key] < tried[tuple(best.values())]

    for name, ladder in ladders.items():
        for direction in (1, -1):
            first = place = ladder.index(best[name])
            while 0 <= place + direction < len(ladder):
                place += direction
                if not better(best | {name: ladder[place]}):
                    break
                best |= {name: ladder[place]}
            if best[name] != ladder[first]:
                break
    return best


class Runs:
    """The runs of a study, each made once and written to a file when it ends."""

    def __init__(self, options: argparse.Namespace) -> None:
        """Read and write the records of ``options.out``."""
        self.how = options

    def run(self, family: str, method: str, options: Options, seed: int, why: str) -> Record:
        """The record of a run, which is made if the file does not have it."""
        from polarstep_lab.studies.two_lines.families import FAMILIES

        steps = self.how.steps or FAMILIES[family].steps
        asked = {"family": family, "method": method, "options": dict(options), "seed": seed}
        asked["steps"] = steps
        if method == "default":
            asked["commit"] = self.how.commit
        for record in recorded(self.how.out):
            if all(record.get(key) == value for key, value in asked.items()):
                return record
        begin = time.perf_counter()
        result = train(family, method, options, seed, steps, self.how.data, self.how.device)
        row = asked | {"commit": self.how.commit, "why": why, "workers": self.how.workers} | result
        row["seconds"] = round(time.perf_counter() - begin, 1)
        row["ended"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        with self.how.out.open("a") as file:  # one write, so that workers do not mix their lines
            file.write(json.dumps(as_line(row), allow_nan=False) + "\n")
        told = f"{loss_of(row):.4f}, test {loss_of(row, 'test'):.4f}, {row['ms']:.1f} ms"
        told = f"{family}:{method}:{in_words(options)}:{seed} {told}, {row['seconds']:.0f} s"
        print(told, flush=True)
        return row

    def job(self, job: str) -> None:
        """All runs of a job; an error is told, and other jobs go on."""
        family, method, given, seeds = parsed(job)
        try:
            why = "given"
            if given is None:
                given, why = self.choose(family, method)
            for seed in seeds:
                self.run(family, method, given, seed, why)
        except Exception:
            print(f"{job} failed: {traceback.format_exc()}", file=sys.stderr, flush=True)

    def choose(self, family: str, method: str) -> tuple[Options, str]:
        """The best options, and how they were found."""
        from polarstep_lab.studies.two_lines.families import FAMILIES
        from polarstep_lab.studies.two_lines.methods import METHODS

        tried: list[Options] = []

        def loss(options: Options) -> float:
            tried.append(options)
            return loss_of(self.run(family, method, options, CHOICE, "search"))

        ladders = METHODS[method].ladders
        if not ladders:
            return {}, "default"
        start = dict(METHODS[method].start)
        wanted = FAMILIES[family].rate * start["lr"]
        start["lr"] = min(ladders["lr"], key=lambda rate: abs(math.log(rate / wanted)))
        best = climb(start, ladders, loss)
        return best, f"best of {len(tried)} runs on seed {CHOICE}"


def in_words(options: Options) -> str:
    """Options as in a job: ``lr=0.02,weight_decay=0.05``."""
    return ",".join(f"{name}={value:g}" for name, value in options.items())


def parsed(job: str) -> tuple[str, str, Options | None, Sequence[int]]:
    """Family, method, options and seeds of a job; no options where they are to be looked for.

    >>> parsed("gpt2:ours:lr=0.02,weight_decay=0.1:3")
    ('gpt2', 'ours', {'lr': 0.02, 'weight_decay': 0.1}, [3])
    >>> parsed("gpt2:default::0")
    ('gpt2', 'default', {}, [0])
    >>> parsed("gpt2:adamw")
    ('gpt2', 'adamw', None, (0, 1, 2))
    """
    family, method, *rest = job.split(":")
    if not rest:
        return family, method, None, SEEDS
    options, seeds = rest
    pairs = (pair.split("=") for pair in options.split(",") if pair)
    given = {name: float(value) for name, value in pairs}
    return family, method, given, [int(seed) for seed in seeds.split(",")]


Group = tuple[str, str, str]
"""Family, method and options of runs that differ in their seeds; of defaults the commit, too."""


def grouped(found_runs: Iterable[Record]) -> dict[Group, dict[int, Record]]:
    """The runs by what they have in common, then by seed."""
    from polarstep_lab.studies.two_lines.families import FAMILIES as usual

    found: dict[Group, dict[int, Record]] = {}
    for record in found_runs:
        how = in_words(record["options"])
        if record["method"] == "default":
            how = f"{how} at {record['commit'][:8]}".lstrip()
        if record["steps"] != usual[record["family"]].steps:
            how += f", {record['steps']} steps"
        key = (record["family"], record["method"], how)
        found.setdefault(key, {})[record["seed"]] = record
    return found


def table(runs_of_all: Sequence[Record]) -> Iterator[str]:
    """Markdown: each family's methods over seeds 0 to 2, against AdamW, and what was tried on seed 3."""
    groups = grouped(runs_of_all)
    for family in dict.fromkeys(family for family, *_ in groups):
        its = {key: runs for key, runs in groups.items() if key[0] == family}
        final = {
            key: {seed: run for seed, run in runs.items() if seed != CHOICE and "test" in run}
            for key, runs in its.items()
        }
        final = {key: runs for key, runs in final.items() if runs}
        base = next((runs for key, runs in final.items() if key[1] == "adamw"), {})
        yield f"### {family}\n"
        yield "| method | options | test loss | perplexity | to AdamW | tokens to AdamW's end |"
        yield "|---|---|--:|--:|--:|--:|"
        for (_, method, how), runs in sorted(final.items(), key=lambda item: mean(item[1])):
            perplexity = {seed: math.exp(run["test"]) for seed, run in runs.items()}
            versus = "–"
            if runs is not base and runs.keys() & base.keys():
                reached = {seed: math.exp(run["test"]) for seed, run in base.items()}
                versus = percent(perplexity, reached)
            whole = Estimate.of(perplexity.values())
            assert whole is not None
            parts = [method, how, f"{mean(runs):.4f}", f"{whole.mean:.2f}"]
            yield f"| {' | '.join([*parts, versus, tokens_to(runs, base)])} |"
        yield ""
        yield "| tried on seed 3 | options | validation loss | perplexity, all held-out |"
        yield "|---|---|--:|--:|"
        tried = {key: runs[CHOICE] for key, runs in its.items() if CHOICE in runs}
        for (_, method, how), run in sorted(tried.items(), key=lambda item: item[0][1:]):
            perplexity_of_all = math.exp(min(700.0, loss_of(run, "held_out")))
            yield f"| {method} | {how} | {loss_of(run):.4f} | {perplexity_of_all:.2f} |"
        yield ""


def percent(values: Mapping[int, float], base: Mapping[int, float]) -> str:
    """The mean relative difference on common seeds in percent, with its 95% t-interval."""
    found = Estimate.of(
        100 * (values[seed] / base[seed] - 1) for seed in values.keys() & base.keys()
    )
    assert found is not None
    mean, plus_minus, interval = found.from_zero.text(1).partition(" ±")
    return f"{mean}%{plus_minus}{interval} (n = {found.n})"


def mean(runs: Mapping[int, Record]) -> float:
    """The mean test loss."""
    return sum(run["test"] for run in runs.values()) / len(runs)


def tokens_to(runs: Mapping[int, Record], base: Mapping[int, Record]) -> str:
    """The part of the tokens after which runs reach the last validation loss of AdamW's, on average.

    Validation loss is taken to be linear between the points of a curve.
    """
    parts = []
    for seed in runs.keys() & base.keys():
        goal, last = base[seed]["validation"], (0, math.inf)
        for step, loss in runs[seed]["curve"]:
            if loss <= goal:
                back = (goal - loss) / (last[1] - loss) if last[0] else 0.0
                parts.append((step - back * (step - last[0])) / runs[seed]["curve"][-1][0])
                break
            last = (step, loss)
        else:
            return "not reached"
    return f"{100 * sum(parts) / len(parts):.0f}%" if parts else "–"


def main() -> None:
    """Make the runs of the jobs, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("jobs", nargs="*", metavar="FAMILY:METHOD[:OPTIONS:SEEDS]")
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--out", type=Path, default=Path("two-lines.jsonl"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--workers", type=int, default=1, help="runs at once")
    parser.add_argument(
        "--steps", type=int, default=0, help="of a run, instead of the family's own"
    )
    parser.add_argument("--commit", help="for records where there is no git")
    parser.add_argument("--table", type=Path, help="print the table of a folder of records")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(recorded(options.table))))
        return
    if options.commit is None:
        from polarstep_lab.records.environment import source_of_packages

        options.commit = source_of_packages()["git_commit"]
    if options.out.exists():  # a line that was cut short is not to be continued
        os.truncate(options.out, options.out.read_bytes().rfind(b"\n") + 1)
    runs = Runs(options)
    if options.workers == 1:
        for job in options.jobs:
            runs.job(job)
        return
    with ProcessPoolExecutor(
        options.workers, get_context("spawn"), max_tasks_per_child=None
    ) as pool:
        list(pool.map(runs.job, options.jobs))


CONFIG = ("family", "method", "options", "seed", "steps", "why", "tokens")
ENVIRONMENT = ("commit", "workers", "device", "torch", "seconds", "ended")
"""What a record says of the run and of the machine; digests of the text are of the machine, too."""


def as_line(row: Record) -> dict[str, Any]:
    """A record as a line of results/two-lines."""
    where = {key for key in row if key in ENVIRONMENT or key.endswith("digest")}
    result = row.keys() - where - {*CONFIG, "curve"}
    return {
        "kind": "run",
        "study": "two-lines",
        "part": "cpu" if row["device"] == "cpu" else row["device"].split()[-1].lower(),
        "variant": f"{row['family']}/{row['method']}",
        "program": "benchmarks/two_lines.py",
        "config": {key: row[key] for key in CONFIG if key in row},
        "environment": {key: row[key] for key in row if key in where},
        "result": {key: row[key] for key in row if key in result},
        "logs": {"curve": row["curve"]},
    }


def recorded(path: Path) -> list[Record]:
    """The records in the folder of a study, or in a file of lines without one that was cut short."""
    lines = records.read(path) if path.is_dir() else read_lines(path)
    return [records.flat(line) for line in lines]
