"""Why our figures need not be the paper's: what is known to differ, and in which runs.

What is said about the authors' code was read in their repository
(github.com/Xiaoran-Cheng/muon-randomized-svd). These are known differences between settings; whether
one of them makes the difference between two figures is for an ablation to tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from polarstep_lab.paper import Method
from polarstep_lab.recipes.cifar10 import CIFAR_TUNED
from polarstep_lab.report.runs import settings_in

__all__ = ["Facts", "Reason", "reasons"]

PAPER_GPT = {"layers": 11, "width": 768, "rank": 200, "steps": 1490}
PAPER_HELD_OUT = 5000

_QUINTIC = (
    "These runs use the quintic that the paper prints, (15, −10, 3)/8. The authors' code runs "
    '(2, −3/2, 1/2) as its "theoretical" quintic (here: quintic-2).'
)
_PRECISION = (
    "Weights, gradients and momentum are float32 here, {}. The authors' network is float16 throughout, "
    "batch norm apart, and so is what Muon takes its polar factor of."
)
_SAME_SPLIT = (
    "The same {:,} training images are held out in every run. The authors draw theirs anew for each "
    "seed, so that their spread over seeds contains that of the split."
)
_OTHER_SPLIT = (
    "{:,} training images are held out here, {:,} by the authors: the networks see different amounts of "
    "data."
)
_TUNED = (
    "Learning rate and momentum ({:.3g}, {:.3g}) are tuned on our held-out images; the authors' scripts "
    "have others."
)
_KACZMARZ = "Learning rate and momentum are those of the Gaussian row, not tuned for Kaczmarz."
_TEXT = "The text is that of the shards {}, not FineWeb10B: a perplexity belongs to its text."
_SIZE = "The GPT has {} layers, {} wide; the paper's has {layers}, {width} wide."
_RANK = "The sketch keeps rank {} of {} ({:.0%}); the paper's keeps {rank} of {width} ({:.0%})."
_PLAIN = (
    "The GPT here is a plain one. The paper's modded-nanogpt also has value and bigram embeddings, ties "
    "embedding and head for most of training, and masks attention between documents."
)
_NORMUON = (
    "Muon here is the paper's equation (1); in the authors' code it sits inside NorMuon with cautious "
    "weight decay."
)
_BUDGET = "Training is {:,} steps over {:,.1f} million tokens; the paper's is {steps:,} steps."


@dataclass(frozen=True)
class Facts:
    """What a reason may depend on."""

    method: Method
    benchmark: str
    config: Mapping[str, Any]
    device: str
    data: str = ""

    def get(self, path: str) -> Any:
        """What the config has at a dotted path; ``None`` where it has nothing."""
        return settings_in(self.config).get(path)


class Reason(NamedTuple):
    """A known difference in a sentence; ``cost`` says whether it changes GFLOPs as well."""

    topic: str
    text: str
    cost: bool = False


def reasons(run: Facts) -> Iterator[Reason]:
    """What is known to differ between a run and what the authors ran."""
    if run.method.algorithm == "muon" and run.get("optimizer.polar.solver") == "quintic":
        yield Reason("polynomial", _QUINTIC)
    yield from _of_cifar10(run) if run.benchmark == "cifar10" else _of_nanogpt(run)


def _of_cifar10(run: Facts) -> Iterator[Reason]:
    precision = run.get("runtime.precision")
    rounded = precision == "bfloat16" or (precision == "auto" and run.device.startswith("cuda"))
    ours = "products in bfloat16" if rounded else "all else too"
    yield Reason("precision", _PRECISION.format(ours))
    held_out = run.get("data.held_out")
    if held_out is not None:
        said = _SAME_SPLIT if held_out == PAPER_HELD_OUT else _OTHER_SPLIT
        yield Reason("data", said.format(held_out, PAPER_HELD_OUT))
    tuned = (run.get("optimizer.lr"), run.get("optimizer.momentum"))
    theirs = CIFAR_TUNED.get(run.method.slug)
    if theirs and tuned != theirs and None not in tuned:
        yield Reason("tuning", _TUNED.format(*tuned))
    elif theirs and run.method.sketch == "kaczmarz":
        yield Reason("tuning", _KACZMARZ)


def _of_nanogpt(run: Facts) -> Iterator[Reason]:
    patterns = [str(pattern) for pattern in run.get("data.train") or ()]
    if not all("fineweb" in pattern.lower() for pattern in patterns):
        names = run.data or ", ".join(pattern.rsplit("/", 1)[-1] for pattern in patterns)
        yield Reason("data", _TEXT.format(names))
    layers, width = run.get("model.layers"), run.get("model.width")
    if layers is not None and (layers, width) != (PAPER_GPT["layers"], PAPER_GPT["width"]):
        yield Reason("model", _SIZE.format(layers, width, **PAPER_GPT), cost=True)
    rank, share = run.get("optimizer.polar.rank"), PAPER_GPT["rank"] / PAPER_GPT["width"]
    if run.method.randomized and rank and width and rank / width != share:
        said = _RANK.format(rank, width, rank / width, share, **PAPER_GPT)
        yield Reason("model", said, cost=True)
    yield Reason("model", _PLAIN, cost=True)
    if run.method.algorithm == "muon":
        yield Reason("optimizer", _NORMUON)
    stages = run.get("data.stages") or ()
    steps = sum(stage["steps"] for stage in stages)
    if stages and steps != PAPER_GPT["steps"]:
        tokens = sum(s["steps"] * s["sequences"] * s["sequence_length"] for s in stages)
        yield Reason("budget", _BUDGET.format(steps, tokens / 1e6, **PAPER_GPT))
