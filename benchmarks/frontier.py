"""Perplexity over cost: polar maps in one training loop, against full space at the same learning rate.

    python benchmarks/frontier.py run TRAIN.bin VAL.bin --maps full,lift-120-warm --seeds 0,1,2
    python benchmarks/frontier.py run TRAIN.bin VAL.bin --maps full --seeds 3 --lr 0.01,0.014,0.02
    python benchmarks/frontier.py run TRAIN.bin VAL.bin --maps full --seeds 0,1,2 --lr best
    python benchmarks/frontier.py run TRAIN.bin VAL.bin --maps adamw,peer:torch-muon --seeds 0
    python benchmarks/frontier.py run TRAIN.bin VAL.bin --maps full --every 100 --out curves.jsonl
    python benchmarks/frontier.py table runs.jsonl

A GPT of 5 layers × 768 sees every token once: 1500 steps of 16 × 1024 tokens are 24.6 million.
Momentum rises from 0.85 to 0.95 over the first tenth; learning rates are constant, then fall linearly
to 5% over the last 60%. With ``+warmup`` after a name, as ``adamw+warmup``, they rise over the first
tenth. TRAIN.bin and VAL.bin are shards of GPT-2 tokens (``polarstep tokenize`` writes them).

A run takes half a minute on an H200. ``ms`` is the time of ``step()`` in this loop, with
AdamW's part, on a host that is busy with the model; ``step_cost.py`` has the optimizer's alone. Runs
that share a GPU with others are made with ``--untimed``: their records have no ``ms``.

A run whose record is in ``--out`` is not made again, so the same command goes on where it stopped.
Runs of other ``--steps`` or another ``--width`` may be in the same file: a table is of one shape, and
rates are chosen among runs of the shape that is asked for.
A record has digests of both texts; a table of runs whose records name different texts is refused.
``--lr best`` is the rate with the lowest perplexity on seed 3, which tables of chosen rates leave out.
``adamw`` updates all matrices with AdamW. ``peer:NAME`` is an optimizer of another library
(:mod:`polarstep_lab.optimizers.peers`); embeddings, head and vectors have AdamW as beside ours.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from differences import percent
from polarstep_lab.storage import JsonLines, read_lines
from which_text import check_one_text, text_of_shards

if TYPE_CHECKING:
    import torch

STEPS, SEQUENCES, LENGTH = 1500, 16, 1024
LAYERS, WIDTH, HEAD_WIDTH = 5, 768, 128
Row = Mapping[str, Any]
"""The record of a run."""
Shape = tuple[int, int]
"""Steps and width: runs of two shapes reach perplexities that do not compare."""
STANDARD: Shape = (STEPS, WIDTH)
"""The shape of the study."""
FULL = "full"
RATE = 0.014  # the best of 0.01, 0.014 and 0.02 for full space on one seed of an earlier loop
CHOICE = 3
"""The seed on which a rate is chosen; the seeds that are reported are others."""
EMBEDDING, OTHERS = 0.3, 0.004
"""AdamW's rates for the embedding, and for head and vectors."""


# Maps of runs that were made with an earlier form of the deflated map. At first δ was an estimate of
# ‖R‖_op by subspace iteration, the scale before the steps a constant, and steps could act on the rest
# apart. Then δ was 1.5 times the root mean square of R's singular values; it is twice that now.
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
    "flat-48-16": "48+8, h = 1, one step of degree 17 in 16 bits (smaller δ)",
    "flat-48-warm": "48+8, warm, one step of degree 17 (smaller δ)",
    "flat-48-warm-16": "48+8, warm, one step of degree 17 in 16 bits (smaller δ)",
    "flat-104-warm-16": "104+8, warm, one step of degree 17 in 16 bits (smaller δ)",
    "jordan-200-warm": "200+8, warm, one Jordan step (smaller δ)",
}


# Maps that are no longer there, in words and by the columns of their sketch.
GONE = {
    "apart-120-warm": ("120+8, warm, one step of degree 17 on the rest apart", 128),
    "apart-120-warm-2-jordan": ("120+8, warm, two Jordan steps on the rest apart", 128),
    "lift-120-warm/2": ("120+8, warm, one step at every second step, rest scaled between", 128),
    "lift-120-warm/2-sized": ("120+8, warm, one step at every second step, sized between", 128),
    "scaled-200": ("LowRank(200+8), h = 1, rest scaled", 208),
    "scaled-120-warm": ("120+8, warm, rest scaled", 128),
}


def maps() -> dict[str, tuple[str, Any]]:
    """What each name stands for: in words, and as a map."""
    import polarstep as ps

    def head(rank: int, power: float = 1, **options: Any) -> ps.LowRank:
        inner = ps.NewtonSchulz(4, "polar-express-sketch")
        return ps.LowRank(rank, 8, power=power, inner=inner, **options)

    found = {
        FULL: ("full space, PolarExpress 5", ps.NewtonSchulz(5, "polar-express")),
        "low-rank": ("LowRank(200+8), h = 0", head(200, 0)),
        "paper": ("LowRank(200+10), h = 1, seven quintic steps: the paper's", ps.LowRank(200)),
    }
    flat = ps.NewtonSchulz(1, "flat")
    for rank in (48, 56, 88, 120, 200, 248):
        for suffix, words, sketch in (("", "h = 1", ps.Gaussian()), ("-warm", "warm", ps.Warm())):
            for bits, float8 in (("", True), ("-16", False)):
                found[f"lift-{rank}{suffix}{bits}"] = (
                    f"{rank}+8, {words}, one step of degree 17{' in 16 bits' if bits else ''}",
                    ps.Deflated(head(rank, sketch=sketch), flat, float8=float8),
                )
    # Closer to the polar factor than seven such steps in full space.
    found["quintic-200"] = (
        "200+8, h = 1, two quintic steps",
        ps.Deflated(head(200), ps.NewtonSchulz(2, "quintic")),
    )
    return found


WARM_UP = 0.1
"""The part of a run over which all rates rise from zero, with the option ``warmup``."""
OPTIONS = {"rows": "rows normalized", "fans": "rate times √(m/n)", "warmup": "warm-up"}
"""What may follow the name of a map after a plus, and what it means; dion multiplies rates by √(m/n).

``warmup`` is for AdamW and for peers that are usually given one, as ``adamw+warmup``."""


def parts_of(name: str) -> tuple[str, list[str]]:
    """The name of a map, and the options that follow it: ``full+rows`` is ``full`` and ``rows``."""
    base, *options = name.split("+")
    if unknown := set(options) - set(OPTIONS):
        sys.exit(f"--maps {name}: {unknown.pop()} is no option; expected {', '.join(OPTIONS)}")
    return base, options


def optimizer_of(
    name: str, model: Any, lr: float, seed: int, polar: Any = None
) -> tuple[torch.optim.Optimizer, str | None]:
    """The optimizer that a name stands for, and what it calls the momentum of the hidden matrices.

    ``name`` is a map of :func:`maps`, ``adamw`` or ``peer:NAME``. A map may be followed by options of
    :data:`OPTIONS`, as ``full+rows``. ``polar`` stands in the place of the map. Without a momentum that
    follows the schedule there is no name for it.
    """
    import torch

    import polarstep as ps

    base, options = parts_of(name)
    other = base == "adamw" or base.startswith("peer:")
    ours = ps.muon_for(
        model,
        lr=lr,
        polar=None if other else polar or maps()[base][1],
        weight_decay=0.0,
        transform=ps.NormalizedRows() if "rows" in options else None,
        shape_scale="fan-ratio" if "fans" in options else "spectral",
        embeddings=ps.AdamW(lr=EMBEDDING),
        heads=ps.AdamW(lr=OTHERS),
        vectors=ps.AdamW(lr=OTHERS),
        seed=seed,
    )
    if not other:
        return ours, "momentum"
    if base == "adamw":
        groups = [
            {
                "params": group["params"],
                "lr": group["lr"] * group["lr_factor"],
                "betas": group.get("betas", ps.AdamW().betas),
                "weight_decay": 0.0,
            }
            for group in ours.param_groups
        ]
        fused = True if next(model.parameters()).is_cuda else None
        return torch.optim.AdamW(groups, fused=fused), None
    from polarstep_lab.config import OptimizerConfig
    from polarstep_lab.optimizers.peers import beside_adamw, find_peer

    peer = find_peer(base.removeprefix("peer:"))
    momentum = ps.AdamW().betas[0] if peer.algorithm == "adamw" else 0.95
    return beside_adamw(peer, ours, OptimizerConfig(lr=lr, momentum=momentum)), peer.momentum


def run(
    train: Any,
    val: Any,
    name: str,
    seed: int,
    lr: float,
    steps: int,
    width: int = WIDTH,
    polar: Any = None,
    measured: Callable[[Any], dict[str, Any]] = lambda optimizer: {},
    timed: bool = True,
    every: int = 0,
    *,
    text: Mapping[str, str],
) -> dict[str, Any]:
    """Train a GPT of :data:`LAYERS` layers once, on the device of the tokens.

    ``name`` and ``polar`` are those of :func:`optimizer_of`. What ``measured`` returns for the optimizer
    after the last step is added to the record. Steps are ``timed`` on a GPU only. With ``every`` the
    record has a ``curve``, the perplexity on validation text after so many steps again and again, and
    ``step_ms``, the time of a whole step in the median of the stretches between. ``text`` is what the
    record says of the text that was read (:func:`which_text.text_of_shards`).
    """
    import torch

    from polarstep_lab.models.gpt import GPT, GPTConfig
    from polarstep_lab.train.compiled_model import compiled
    from timing import timing_event

    device = train.device
    on_gpu = device.type == "cuda"
    config = GPTConfig(50304, width, LAYERS, width // HEAD_WIDTH, LENGTH)
    model = GPT(config, torch.Generator().manual_seed(seed)).to(device)
    optimizer, key = optimizer_of(name, model, lr, seed, polar)
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    shuffle = torch.Generator().manual_seed(1000 + seed)
    order = torch.randperm(steps * SEQUENCES, generator=shuffle).to(device)
    within = torch.arange(LENGTH + 1, device=device)
    wrap = {"wrap": compiled} if on_gpu else {}
    warm_up = WARM_UP if "warmup" in parts_of(name)[1] else 0.0

    def summed(windows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        batch = tokens[(windows * LENGTH)[:, None] + within].long()
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            return model.loss(batch[:, :-1], batch[:, 1:], **wrap)

    count = (len(val) - 1) // LENGTH // SEQUENCES

    def mean_losses(batches: int) -> list[float]:
        """The mean loss of each of the first batches of held-out text."""
        with torch.no_grad():
            windows = torch.arange(batches * SEQUENCES, device=device)
            parts = torch.split(windows, SEQUENCES)
            return [float(summed(part, val).double()) / (SEQUENCES * LENGTH) for part in parts]

    times: list[float] = []
    wait = torch.cuda.synchronize if on_gpu else (lambda: None)
    curve = Curve(every, lambda: mean_losses(count // 2), wait)
    for step in range(steps):
        done = step / steps
        schedule(optimizer, rates, done, warm_up, key)
        loss = summed(order[SEQUENCES * step : SEQUENCES * (step + 1)], train)
        (loss / (SEQUENCES * LENGTH)).backward()  # type: ignore[no-untyped-call]
        if on_gpu and timed and step % 100 == 50:
            begin, end = timing_event(), timing_event()
            torch.cuda.synchronize()
            begin.record()
            optimizer.step()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        curve.after(step + 1)
    row = {"map": name, "seed": seed, "lr": lr, "steps": steps, "width": width}
    row |= perplexities_of(mean_losses(count)) | measured(optimizer)
    row |= {"ms": statistics.median(times)} if times else {}
    return row | curve.record() | made_with(name, device) | dict(text)


class Curve:
    """Perplexity along a run, after every so many steps, and the time of the steps between.

    ``losses`` returns the mean loss of each batch of validation text, and ``wait`` for the device.
    Without ``every`` nothing is recorded.
    """

    def __init__(
        self, every: int, losses: Callable[[], Sequence[float]], wait: Callable[[], None]
    ) -> None:
        self.every, self.losses, self.wait = every, losses, wait
        self.points: list[tuple[int, float]] = []
        self.step_ms: list[float] = []
        self.began = time.perf_counter()

    def after(self, step: int) -> None:
        """Evaluate if it is time to; evaluations do not count as time of steps."""
        if not self.every or step % self.every:
            return
        self.wait()
        self.step_ms.append(1000 * (time.perf_counter() - self.began) / self.every)
        self.points.append((step, math.exp(statistics.fmean(self.losses()))))
        self.wait()
        self.began = time.perf_counter()

    def record(self) -> dict[str, Any]:
        """What a record has of the curve."""
        if not self.points:
            return {}
        return {"step_ms": statistics.median(self.step_ms), "curve": self.points}


def schedule(
    optimizer: torch.optim.Optimizer,
    rates: Sequence[float],
    done: float,
    warm_up: float = 0.0,
    momentum: str | None = "momentum",
) -> None:
    """Set rates and momentum after a part ``done`` of a run.

    ``rates`` are the groups' highest, and ``momentum`` what groups of hidden matrices call theirs.
    """
    factor = rate_factor(done, warm_up)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
        if momentum in group and group.get("algorithm", "muon") == "muon":
            group[momentum] = 0.85 + 0.1 * min(1.0, done / 0.1)


def rate_factor(done: float, warm_up: float = 0.0) -> float:
    """What learning rates are multiplied by, after a part ``done`` of a run."""
    if done < warm_up:
        return done / warm_up
    return 1.0 if done < 0.4 else 1 - (done - 0.4) / 0.6 * 0.95


def perplexities_of(losses: Sequence[float]) -> dict[str, float]:
    """Perplexity on all held-out text, and on its halves, from the mean loss of each batch in order.

    Rates are chosen on the first half, for the second to be a test; records made before there were
    halves have the whole only. A text of one batch has no halves.
    """
    half = len(losses) // 2
    parts = {"perplexity": losses, "validation": losses[:half], "test": losses[half:]}
    if not half:
        del parts["validation"], parts["test"]
    return {name: math.exp(statistics.fmean(part)) for name, part in parts.items()}


def made_with(name: str, device: torch.device) -> dict[str, Any]:
    """The device, torch and source of a run, and the package of a peer with its version."""
    import torch

    from polarstep_lab.records.environment import source_of_packages

    on_gpu = device.type == "cuda"
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if on_gpu else "cpu"}
    found |= {"torch": torch.__version__} | source_of_packages()
    base, _ = parts_of(name)
    if base.startswith("peer:"):
        from polarstep_lab.optimizers.peers import find_peer, versions

        package = find_peer(base.removeprefix("peer:")).package
        found |= {key: version for key, version in versions().items() if key == package}
    return found


def best_rate(
    records: Iterable[Row], name: str, steps: int = STEPS, width: int = WIDTH
) -> float | None:
    """The rate with the lowest perplexity of a map on seed :data:`CHOICE`; ``None`` without a run.

    Only runs of this many steps and this width count. The first half of the held-out text decides, and
    all of it where a record has no halves. Raises ``ValueError`` if these runs are of several texts.
    """
    tried = [
        record
        for record in of_shape(records, (steps, width))
        if (record["map"], record["seed"]) == (name, CHOICE)
    ]
    check_one_text(tried)
    half = "validation" if all("validation" in record for record in tried) else "perplexity"
    return min(tried, key=lambda record: record[half])["lr"] if tried else None


def reported(runs: Mapping[int, float]) -> dict[int, float]:
    """The runs without that of the seed that chooses rates, by seed."""
    return {seed: value for seed, value in runs.items() if seed != CHOICE}


def others() -> dict[str, str]:
    """In words, what stands for no map of ours: AdamW and the peers."""
    from polarstep_lab.optimizers.peers import PEERS

    return {"adamw": "AdamW"} | {f"peer:{peer.name}": peer.title for peer in PEERS.values()}


def titles() -> dict[str, str]:
    """What each name of a record stands for, in words."""
    return EARLIER | {name: words for name, (words, _) in (GONE | maps()).items()} | others()


def title_of(name: str) -> str:
    """What a map with its options stands for, in words."""
    base, options = parts_of(name)
    return ", ".join([titles()[base], *(OPTIONS[option] for option in options)])


def table(records: Sequence[Row]) -> Iterator[str]:
    """Markdown: a row for each map and rate, with the mean of the paired differences to full space.

    The runs are those of :func:`of_one_shape`.
    Differences are between runs of one seed and one rate, or to :data:`RATE` where full space was not
    run at that rate. Rows of other rates than :data:`RATE` say so. The seed that chooses rates counts
    only where no other was run. Perplexity is that of the test text; in rows with an asterisk some runs
    have that of all held-out text alone, and it is that of all of it.
    """
    found: dict[tuple[str, float], dict[int, Row]] = {}
    for (name, seed, lr, *_), record in by_identity(of_one_shape(records)).items():
        found.setdefault((name, lr), {})[seed] = record
    rows = []
    for (name, lr), its in found.items():
        words = title_of(name) + ("" if lr == RATE else f", rate {lr:g}")
        base = found.get((FULL, lr), found[FULL, RATE])
        compared = [*its.values(), *(base[seed] for seed in its.keys() & base.keys())]
        text = "test" if all("test" in record for record in compared) else "perplexity"
        words += "" if text == "test" else " *"
        runs = {seed: record[text] for seed, record in its.items()}
        full = {seed: record[text] for seed, record in base.items() if text in record}
        lost = percent(reported(runs) or runs, full)
        values = ", ".join(f"{runs[s]:.2f}" for s in sorted(runs))
        told = "–" if name == FULL else lost.told(unit="%")
        if lost.value > 100:
            told = "diverged"
        rows.append((lost.value, words, f"| {words} | {values} | {told} |"))
    yield "| map | test perplexity, by seed | to full space |"
    yield "|---|---|---|"
    yield from (row for *_, row in sorted(rows))


def tokens(path: Path, device: str) -> Any:
    """A shard on a device."""
    import torch

    from polarstep_lab.data.shards import open_shard

    return torch.from_numpy(open_shard(path).astype("int32")).to(device)


def shards(train: Path, val: Path, steps: int, device: str) -> tuple[Any, Any]:
    """The tokens that so many steps read, and the held-out tokens."""
    needed = steps * SEQUENCES * LENGTH + 1
    data = tokens(train, device)
    if len(data) < needed:
        sys.exit(f"{train} has {len(data):,} tokens: expected {needed:,}; lower --steps")
    return data[:needed], tokens(val, device)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line to a file of records, on disk before this returns; a line cut short is replaced."""
    complete = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
    log = JsonLines(path, complete)
    log.write(row)
    log.sync()
    log.close()


def identity(row: Row) -> tuple[str, int, float, int, int]:
    """What makes a run: map, seed, rate, steps and width."""
    return row["map"], row["seed"], row.get("lr", RATE), *shape_of(row)


def shape_of(row: Row) -> Shape:
    """The steps of a run and the width of its model."""
    return row["steps"], row.get("width", WIDTH)


def in_words(shape: Shape) -> str:
    """A shape, as ``1500 steps and width 768``."""
    return "{} steps and width {}".format(*shape)


def of_shape(records: Iterable[Row], shape: Shape = STANDARD) -> list[Row]:
    """The runs of this many steps and this width."""
    return [record for record in records if shape_of(record) == shape]


def of_one_shape(records: Sequence[Row], standard: Shape = STANDARD) -> list[Row]:
    """The runs of the standard shape, or all runs where they have one other shape.

    What is left out is said on the standard error. Raises ``ValueError`` for several shapes without
    the standard among them: none of them is to be preferred.
    """
    shapes = Counter(map(shape_of, records))
    if standard not in shapes and len(shapes) > 1:
        found = ", ".join(map(in_words, sorted(shapes, reverse=True)))
        raise ValueError(f"runs of {found}: expected {in_words(standard)}, or one shape alone")
    shown = standard if standard in shapes else next(iter(shapes), standard)
    say_left_out(records, [shown])
    return of_shape(records, shown)


def say_left_out(records: Iterable[Row], shown: Collection[Shape]) -> None:
    """Say on the standard error how many runs have another shape than those that are shown."""
    for shape, count in sorted(Counter(map(shape_of, records)).items()):
        if shape not in shown:
            runs = "1 run" if count == 1 else f"{count} runs"
            are = "is" if count == 1 else "are"
            print(f"{runs} of {in_words(shape)} {are} left out of the table", file=sys.stderr)


def is_recorded(asked: Row, records: Iterable[Row]) -> bool:
    """Whether a run of the same :func:`identity` is among the records.

    ``asked`` also names the text that is to be read. Raises ``ValueError`` if the record of that run
    names another text: the two do not compare.
    """
    same = [record for record in records if identity(record) == identity(asked)]
    check_one_text([*same, asked])
    return bool(same)


def by_identity(records: Iterable[Row]) -> dict[tuple[str, int, float, int, int], Row]:
    """The runs by their :func:`identity`, for a table.

    Raises ``ValueError`` for runs on several texts, and for a run that is recorded twice.
    """
    records = list(records)
    check_one_text(records)
    found: dict[tuple[str, int, float, int, int], Row] = {}
    for record in records:
        name, seed, lr, *shape = run = identity(record)
        if run in found:
            raise ValueError(
                f"recorded twice: {name}, seed {seed}, rate {lr:g}, {in_words((shape[0], shape[1]))}; "
                "a table counts a run once, so keep the other record in a file of its own"
            )
        found[run] = record
    return found


def main() -> None:
    """The two commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("run")
    train.add_argument("train", type=Path)
    train.add_argument("val", type=Path)
    train.add_argument("--maps", default="full,low-rank,lift-120-warm,full+rows,lift-120-warm+rows")
    train.add_argument("--seeds", default="0,1,2")
    train.add_argument("--lr", default=str(RATE), help=f"rates, or best: that of seed {CHOICE}")
    train.add_argument("--steps", type=int, default=STEPS)
    train.add_argument("--width", type=int, default=WIDTH)
    train.add_argument("--device", default="cuda")
    train.add_argument(
        "--untimed", action="store_true", help="other runs share the GPU: leave out ms"
    )
    train.add_argument(
        "--every", type=int, default=0, help="record validation perplexity after so many steps"
    )
    train.add_argument("--out", type=Path, default=Path("frontier.jsonl"))
    commands.add_parser("table").add_argument("records", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        print("\n".join(table(read_lines(options.records))))
        return
    data, held_out = shards(options.train, options.val, options.steps, options.device)
    text = text_of_shards(options.train, options.val)
    for seed in map(int, options.seeds.split(",")):
        for name in options.maps.split(","):
            for lr in rates_of(name, options):
                begin = time.perf_counter()
                asked = {"map": name, "seed": seed, "lr": lr} | {
                    "steps": options.steps,
                    "width": options.width,
                }
                if is_recorded(asked | text, read_lines(options.out)):
                    print(f"{name}, seed {seed}, rate {lr:g}: in {options.out}", flush=True)
                    continue
                shape = (options.steps, options.width)
                how = {"timed": not options.untimed, "every": options.every}
                row = run(data, held_out, name, seed, lr, *shape, **how, text=text)
                append(options.out, row)
                print(f"{json.dumps(row)}  {time.perf_counter() - begin:.0f} s", flush=True)


def rates_of(name: str, options: argparse.Namespace) -> list[float]:
    """The rates that a map is run with."""
    if options.lr != "best":
        return [float(rate) for rate in options.lr.split(",")]
    chosen = best_rate(read_lines(options.out), name, options.steps, options.width)
    if chosen is None:
        sys.exit(
            f"--lr best: {options.out} has no run of {name} on seed {CHOICE}, which chooses its rate, "
            f"with {in_words((options.steps, options.width))}; run it with --seeds {CHOICE} "
            "--lr 0.01,0.014,0.02 first"
        )
    return [chosen]


if __name__ == "__main__":
    main()
