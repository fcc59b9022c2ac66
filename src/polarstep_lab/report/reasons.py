"""Why our figures need not be the paper's: what is known to differ, and in which runs.

Each function looks at one run's method, config and device, and says in a sentence what differs there
from what the authors ran, or nothing. What is said about their code was read in their repository
(github.com/Xiaoran-Cheng/muon-randomized-svd). These are known differences between settings; whether
one of them makes the difference between two figures is for an ablation to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from polarstep_lab.methods import Method
from polarstep_lab.recipes.cifar10 import CIFAR_TUNED

__all__ = ["REASONS", "Facts", "Reason"]

Topic = Literal["polynomial", "precision", "data", "model", "optimizer", "tuning", "budget"]
About = Literal["metric", "gflops"]

PAPER_GPT = {"layers": 11, "width": 768, "rank": 200, "steps": 1490}
PAPER_HELD_OUT = 5000


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
        value: Any = self.config
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True)
class Reason:
    """One known difference; ``say`` returns its sentence, or ``None`` where it does not apply."""

    topic: Topic
    about: tuple[About, ...]
    say: Callable[[Facts], str | None]


REASONS: list[Reason] = []


def _reason(
    topic: Topic, *about: About
) -> Callable[[Callable[[Facts], str | None]], Callable[[Facts], str | None]]:
    def register(say: Callable[[Facts], str | None]) -> Callable[[Facts], str | None]:
        REASONS.append(Reason(topic, about, say))
        return say

    return register


@_reason("polynomial", "metric")
def _the_printed_quintic(run: Facts) -> str | None:
    if run.method.algorithm != "muon" or run.get("optimizer.polar.solver") != "quintic":
        return None
    return (
        "These runs use the quintic that the paper prints, (15, −10, 3)/8. The authors' code runs "
        '(2, −3/2, 1/2) as its "theoretical" quintic (here: quintic-2).'
    )


@_reason("precision", "metric")
def _weights_in_float32(run: Facts) -> str | None:
    if run.benchmark != "cifar10":
        return None
    precision = run.get("runtime.precision")
    rounded = precision == "bfloat16" or (precision == "auto" and run.device.startswith("cuda"))
    ours = "products in bfloat16" if rounded else "all else too"
    return (
        f"Weights, gradients and momentum are float32 here, {ours}. The authors' network is float16 "
        "throughout, batch norm apart, and so is what Muon takes its polar factor of."
    )


@_reason("data", "metric")
def _the_held_out_images(run: Facts) -> str | None:
    held_out = run.get("data.held_out")
    if run.benchmark != "cifar10" or held_out is None:
        return None
    if held_out != PAPER_HELD_OUT:
        return (
            f"{held_out:,} training images are held out here, {PAPER_HELD_OUT:,} by the authors: "
            "the networks see different amounts of data."
        )
    return (
        f"The same {held_out:,} training images are held out in every run. The authors draw theirs "
        "anew for each seed, so that their spread over seeds contains that of the split."
    )


@_reason("tuning", "metric")
def _our_learning_rates(run: Facts) -> str | None:
    if run.benchmark != "cifar10" or run.method.slug not in CIFAR_TUNED:
        return None
    ours = (run.get("optimizer.lr"), run.get("optimizer.momentum"))
    if ours != CIFAR_TUNED[run.method.slug] and None not in ours:
        return (
            f"Learning rate and momentum ({ours[0]:.3g}, {ours[1]:.3g}) are tuned on our held-out "
            "images; the authors' scripts have others."
        )
    if run.method.sketch == "kaczmarz":
        return (
            "The authors' repository has no script for the Kaczmarz row: learning rate and momentum "
            "are those of the Gaussian row."
        )
    return None


@_reason("data", "metric")
def _other_text(run: Facts) -> str | None:
    patterns = run.get("data.train")
    if run.benchmark != "nanogpt" or not patterns:
        return None
    if all("fineweb" in str(pattern).lower() for pattern in patterns):
        return None
    names = run.data or ", ".join(str(pattern).rsplit("/", 1)[-1] for pattern in patterns)
    return (
        f"The text is that of the shards {names}, not FineWeb10B: a perplexity belongs to its text."
    )


@_reason("model", "metric", "gflops")
def _another_size(run: Facts) -> str | None:
    layers, width = run.get("model.layers"), run.get("model.width")
    if run.benchmark != "nanogpt" or layers is None:
        return None
    if (layers, width) == (PAPER_GPT["layers"], PAPER_GPT["width"]):
        return None
    return (
        f"The GPT has {layers} layers, {width} wide; the paper's has {PAPER_GPT['layers']}, "
        f"{PAPER_GPT['width']} wide."
    )


@_reason("model", "metric", "gflops")
def _another_share_of_the_rank(run: Facts) -> str | None:
    rank, width = run.get("optimizer.polar.rank"), run.get("model.width")
    if run.benchmark != "nanogpt" or not run.method.randomized or not rank or not width:
        return None
    if rank * PAPER_GPT["width"] == PAPER_GPT["rank"] * width:
        return None
    return (
        f"The sketch keeps rank {rank} of {width} ({rank / width:.0%}); the paper's keeps "
        f"{PAPER_GPT['rank']} of {PAPER_GPT['width']} ({PAPER_GPT['rank'] / PAPER_GPT['width']:.0%})."
    )


@_reason("model", "metric", "gflops")
def _a_plain_gpt(run: Facts) -> str | None:
    if run.benchmark != "nanogpt":
        return None
    return (
        "The GPT here is a plain one. The paper's modded-nanogpt also has value and bigram embeddings, "
        "ties embedding and head for most of training, and masks attention between documents."
    )


@_reason("optimizer", "metric")
def _plain_muon(run: Facts) -> str | None:
    if run.benchmark != "nanogpt" or run.method.algorithm != "muon":
        return None
    return (
        "Muon here is the paper's equation (1); in the authors' code it sits inside NorMuon with "
        "cautious weight decay."
    )


@_reason("budget", "metric")
def _another_budget(run: Facts) -> str | None:
    stages = run.get("data.stages")
    if run.benchmark != "nanogpt" or not stages:
        return None
    steps = sum(stage["steps"] for stage in stages)
    if steps == PAPER_GPT["steps"]:
        return None
    tokens = sum(s["steps"] * s["sequences"] * s["sequence_length"] for s in stages)
    return (
        f"Training is {steps:,} steps over {tokens / 1e6:,.1f} million tokens; the paper's is "
        f"{PAPER_GPT['steps']:,} steps."
    )
