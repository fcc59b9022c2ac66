"""The tables of the pages: rows and columns of named numbers.

A cell of row ``auto`` and column ``{}.gap.25m`` has the number ``auto.gap.25m``, or "–" where there is
none. A page has a table between ``<!-- table: NAME -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pages.numbers.number import Number, forms

__all__ = ["TABLES", "Table"]


@dataclass(frozen=True)
class Table:
    """``corner`` is the title of the first column; rows and columns go from titles to parts of names.

    A column whose pattern ends with ``±`` shows numbers without their seeds, with ``!`` also without
    their intervals.
    """

    corner: str
    columns: Mapping[str, str]
    rows: Mapping[str, str]

    def markdown(self, numbers: Mapping[str, Number]) -> str:
        """The table in Markdown. Raises ``ValueError`` for a row without any number."""
        lines = [
            f"| {' | '.join([self.corner, *self.columns])} |",
            f"|---|{'--:|' * len(self.columns)}",
        ]
        for title, row in self.rows.items():
            cells = [cell(pattern, row, numbers) for pattern in self.columns.values()]
            if set(cells) == {"–"}:
                raise ValueError(f"row {title!r} has no number: no name begins with {row!r}")
            lines.append(f"| {' | '.join([title, *cells])} |")
        return "\n".join(lines)

    def names(self) -> Iterator[str]:
        """The names of its numbers; some may have no number."""
        for column in self.columns.values():
            yield from (name_in(column, row) for row in self.rows.values())


def name_in(pattern: str, row: str) -> str:
    """The name of the number in a cell."""
    return pattern.rstrip("±!").replace("{}", row)


def cell(pattern: str, row: str, numbers: Mapping[str, Number]) -> str:
    """The text of a number, with spaces that do not break."""
    form = {"±": 1, "!": 2}.get(pattern[-1], 0)
    number = numbers.get(name_in(pattern, row))
    if number is None:
        return "–"
    return forms(number.text)[form].replace(" ", "\N{NO-BREAK SPACE}")


_MAPS = {
    "full space": "full",
    "full space, `NormalizedRows`": "full-rows",
    "`auto`": "auto",
    "`auto`, `NormalizedRows`": "auto-rows",
    "`LowRank`, h = 0": "low-rank",
    "`LowRank`, the paper's": "paper",
}
_PEERS = {
    "AdamW, fused": "adamw",
    "`torch.optim.Muon`": "torch-muon",
    "Muon of dion": "dion",
    "NorMuon of dion": "normuon",
    "Dion2 of dion, ¼ of the rows": "dion2",
    "Dion3 of dion, ¼ of the rows": "dion3",
    "Muon of K. Jordan": "jordan",
    "SOAP of pytorch_optimizer": "soap",
}
_TABLE_2 = {
    "AdamW": "adamw",
    "SGD (Nesterov)": "sgd",
    "Muon (Polyak)": "muon-polyak",
    "Rand Muon (Polyak)": "rand-muon-polyak",
    "Muon (Nesterov)": "muon",
    "Rand Muon (Nes.-Gaussian)": "rand-muon",
    "Rand Muon (Nes.-Kaczmarz)": "rand-muon-kaczmarz",
}

TABLES = {
    "readme": Table(
        "optimizer",
        {
            "perplexity (n = 3)": "{}.perplexity.25m±",
            "training step": "{}.whole-step",
            "step, 768": "{}.step.nanogpt",
            "step, 8B layer": "{}.step.8b",
        },
        {
            "AdamW": "adamw",
            "`torch.optim.Muon`": "torch-muon",
            "NorMuon of dion": "normuon",
            "ours, full space": "full",
            "ours, the default": "auto-rows-fan",
        },
    ),
    "step-cost": Table(
        "optimizer",
        {
            "step, nanoGPT": "{}.step.nanogpt",
            "ms": "{}.ms.nanogpt",
            "step, 8B layer": "{}.step.8b",
            "ms, 8B layer": "{}.ms.8b",
        },
        _MAPS | _PEERS,
    ),
    "quality": Table(
        "optimizer",
        {
            "rate": "{}.rate.25m",
            "test perplexity": "{}.perplexity.25m!",
            "to full space": "{}.gap.25m",
        },
        _MAPS | {"`auto`, `NormalizedRows`, fan-ratio": "auto-rows-fan"} | _PEERS,
    ),
    "cost-and-quality": Table(
        "optimizer",
        {
            "step, nanoGPT": "{}.step.nanogpt",
            "step, 8B layer": "{}.step.8b",
            "24.6M tokens, to full space": "{}.gap.25m",
            "72.7M tokens, to full space": "{}.gap.73m",
        },
        _MAPS | {"AdamW, fused": "adamw"},
    ),
    "two-lines": Table(
        "model",
        {
            "AdamW": "two-lines.{}.adamw.perplexity±",
            "NorMuon": "two-lines.{}.normuon.perplexity±",
            "default": "two-lines.{}.default.perplexity±",
            "to AdamW": "two-lines.{}.default.gap-adamw",
            "to our own best": "two-lines.{}.default.gap-ours",
            "tokens to AdamW's end": "two-lines.{}.default.tokens-to-adamw",
        },
        {
            "GPT-2": "gpt2",
            "GPT": "gpt",
            "LSTM": "lstm",
            "experts": "moe",
            "ViT": "vit",
            "CNN": "cnn",
            "ResNet-18": "resnet18",
            "fine-tuning": "fine-tuning",
            "LoRA": "lora",
        },
    ),
    "memory": Table(
        "optimizer",
        {
            "state, nanoGPT": "{}.state.nanogpt",
            "a step, besides": "{}.extra.nanogpt",
            "state, 8B layer": "{}.state.8b",
            "a step, besides, 8B layer": "{}.extra.8b",
        },
        {"AdamW, fused": "adamw"} | _MAPS,
    ),
    "widths": Table(
        "width",
        {
            "full space": "full.step.{}",
            "`Deflated`, ℓ = a sixth": "sixth.step.{}",
            "part of full space's time": "sixth.share.{}",
        },
        {str(width): str(width) for width in (384, 512, 576, 640, 704)},
    ),
    "cifar10": Table(
        "method",
        {"here": "cifar10.{}", "paper": "cifar10.{}.paper", "difference": "cifar10.{}.to-paper"},
        _TABLE_2,
    ),
    "cifar10-ablations": Table(
        "the paper's sketch with",
        {
            "last validation loss": "cifar10.{}.loss",
            "to the recipe's own": "cifar10.{}.loss-change",
        },
        {
            "rank 16": "rank-16",
            "rank 32": "rank-32",
            "rank 64": "rank-64",
            "rank 128 (the recipe's)": "rank-128",
            "q = 1": "steps-1",
            "q = 3": "steps-3",
            "q = 5": "steps-5",
            "q = 7 (the recipe's)": "steps-7",
            "q = 9": "steps-9",
            "PolarExpress": "solver-polar-express",
            "Jordan's coefficients": "solver-empirical",
            "quintic (the recipe's)": "solver-quintic",
            "cubic": "solver-cubic",
            "batch 500 (the recipe's)": "batch-500",
            "batch 1000": "batch-1000",
            "batch 2000": "batch-2000",
            "batch 3000": "batch-3000",
            "batch 4000": "batch-4000",
        },
    ),
    "paper-pairs": Table(
        "test perplexity of",
        {"here, 72.7M tokens": "{}", "paper, 396M tokens": "{}.paper"},
        {
            "randomized against full space, Nesterov": "pair.nesterov",
            "randomized against full space, Polyak": "pair.polyak",
            "Kaczmarz against Gaussian": "pair.kaczmarz",
            "Nesterov against Polyak, full space": "pair.momentum-full",
            "Nesterov against Polyak, randomized": "pair.momentum-rand",
            "AdamW against full space": "pair.adamw",
            "SGD against full space": "pair.sgd",
        },
    ),
    "long-run": Table(
        "method",
        {
            "best rate": "{}.best-rate.73m",
            "test perplexity": "{}.perplexity.73m",
            "to full space": "{}.gap.73m",
            "at the rates of short runs": "{}.gap-at-short-rates.73m",
        },
        {
            "full space": "full",
            "full space, `NormalizedRows`": "full-rows",
            "`auto`": "auto",
            "`auto`, `NormalizedRows`": "auto-rows",
            "`LowRank`, the paper's": "paper",
            "`Deflated`, ℓ = an eighth": "eighth",
            "`Deflated`, ℓ = a twelfth": "twelfth",
            "AdamW": "adamw",
            "seven quintic steps": "quintic",
            "seven quintic steps, Polyak": "polyak",
            "`LowRank`, the paper's, Polyak": "paper-polyak",
            "`LowRank`, the paper's, Kaczmarz": "paper-kaczmarz",
            "SGD": "sgd",
        },
    ),
    "tokens": Table(
        "tokens, at width 768",
        {"`auto`": "auto.gap-at-{}", "`LowRank`, h = 0": "low-rank.gap-at-{}"},
        {"6.1M": "6m", "12.3M": "12m", "24.6M": "25m", "49.2M": "49m", "72.7M": "73m"},
    ),
    "ranks": Table(
        "ℓ, of the short side",
        {"24.6M tokens": "{}.gap.25m", "72.7M tokens": "{}.gap-at-short-rates.73m"},
        {"a sixth": "auto", "an eighth": "eighth", "a twelfth": "twelfth"},
    ),
    "low-precision": Table(
        "parameters",
        {
            "to float32, a GPT on an H200": "precision.{}.h200.gap",
            "to float32, a GPT on a CPU": "precision.{}.cpu.gap",
            "state, bytes a parameter": "precision.{}.cpu.bytes",
        },
        {
            "float32": "float32",
            "bfloat16": "nearest",
            "bfloat16, rounded at random (not in the library)": "stochastic",
            "bfloat16, compensated": "compensated",
            "float32, momentum in bfloat16": "momentum-16",
            "float32, momentum in 8 bits": "momentum-8",
            "bfloat16, compensated, momentum in 8 bits": "compensated-8",
        },
    ),
    "accuracy": Table(
        "map",
        {
            "γ on momentum, median": "{}.gamma",
            "largest": "{}.gamma-largest",
            "ν on momentum": "{}.nu-on-momentum",
            "largest ν": "{}.nu",
        },
        {
            "full space, PolarExpress 5": "full",
            "full space, seven quintic steps": "quintic",
            "`auto`'s head of a sixth": "auto",
            "`LowRank`, h = 0": "low-rank",
            "`LowRank`, warm": "low-rank-warm",
            "`LowRank`, the paper's": "paper",
        },
    ),
    "certificates": Table(
        "map",
        {
            "γ, median": "certificate.{}.gamma-median",
            "bound, median": "certificate.{}.bound-median",
            "largest ν": "certificate.{}.nu-largest",
            "largest bound": "certificate.{}.nu-bound-largest",
        },
        {
            "`Exact`": "exact",
            "`LowRank(64, 8)`, h = 1": "low-rank-64",
            "`LowRank(64, 8)`, h = ½": "low-rank-64-half",
            "`LowRank(64, 8)`, Kaczmarz": "kaczmarz-64",
            "`LowRank(16, 8)`": "low-rank-16",
            "five PolarExpress steps": "polar-express-5",
            "five quintic steps": "quintic-5",
            "nine quintic steps": "quintic-9",
            "`Deflated`, rank 40": "deflated-40",
        },
    ),
    "cpu": Table(
        "two cores, a tenth of nanoGPT's matrices",
        {
            "`auto`": "auto.faster.{}",
            "`LowRank(200)`": "paper.faster.{}",
            "full space in the CPU's own precision": "full.faster.{}",
        },
        {
            "x86 without tiles": "x86-nanogpt",
            "x86 with bfloat16 tiles": "tiles-nanogpt",
            "ARM": "arm-nanogpt",
        },
    ),
    "rms-rates": Table(
        "optimizer",
        {
            "best rate": "rms.{}.rate",
            "at AdamW's rate, to its own best": "rms.{}.gap-at-adamws-rate",
            "at AdamW's rate, to AdamW": "rms.{}.gap-to-adamw",
        },
        {
            "AdamW": "adamw",
            "full space, PolarExpress": "full",
            "`Deflated`": "deflated",
            "`LowRank`, the paper's": "paper",
        },
    ),
}
