"""Why our figures need not be the paper's: what is known to differ, and in which runs.

What is said about the authors' code was read in their repository
(github.com/Xiaoran-Cheng/muon-randomized-svd). Settings are known to differ; only an ablation can tell
whether such a difference is why two figures differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from polarstep_lab.paper import Method
from polarstep_lab.recipes.cifar10 import CIFAR_TUNED

__all__ = ["Reason", "reasons"]

_LAYERS, _WIDTH, _RANK, _STEPS = 11, 768, 200, 1490  # of the paper's GPT
_HELD_OUT = 5000  # of the paper's CIFAR-10


class Reason(NamedTuple):
    """A known difference in a sentence; ``cost`` says whether it changes GFLOPs as well."""

    topic: str
    text: str
    cost: bool = False


def reasons(
    method: Method, benchmark: str, settings: Mapping[str, Any], device: str, data: str = ""
) -> Iterator[Reason]:
    """What is known to differ between a run and what the authors ran.

    ``settings`` are those of the run's config by dotted path; ``data`` names its text, if known.
    """
    if method.algorithm == "muon" and settings.get("optimizer.polar.solver") == "quintic":
        text = (
            "These runs use the quintic that the paper prints, (15, −10, 3)/8. The authors' code runs "
            '(2, −3/2, 1/2) as its "theoretical" quintic (here: quintic-2).'
        )
        yield Reason("polynomial", text)
    if benchmark == "cifar10":
        yield from _of_cifar10(method, settings, device)
    else:
        yield from _of_nanogpt(method, settings, data)


def _of_cifar10(method: Method, settings: Mapping[str, Any], device: str) -> Iterator[Reason]:
    precision = settings.get("runtime.precision")
    rounded = precision == "bfloat16" or (precision == "auto" and device.startswith("cuda"))
    text = (
        "Weights, gradients and momentum are float32 here, "
        f"{'products in bfloat16' if rounded else 'all else too'}. The authors' network is float16 "
        "throughout, batch norm apart, and so is what Muon takes its polar factor of."
    )
    yield Reason("precision", text)
    held_out = settings.get("data.held_out")
    if held_out == _HELD_OUT:
        text = (
            f"The same {held_out:,} training images are held out in every run. The authors draw theirs "
            "anew for each seed, so that their spread over seeds contains that of the split."
        )
        yield Reason("data", text)
    elif held_out is not None:
        text = (
            f"{held_out:,} training images are held out here, {_HELD_OUT:,} by the authors: the "
            "networks see different amounts of data."
        )
        yield Reason("data", text)
    lr, momentum = settings.get("optimizer.lr"), settings.get("optimizer.momentum")
    theirs = CIFAR_TUNED.get(method.slug)
    if theirs and theirs != (lr, momentum) and None not in (lr, momentum):
        text = (
            f"Learning rate and momentum ({lr:.3g}, {momentum:.3g}) are tuned on our held-out images; "
            "the authors' scripts have others."
        )
        yield Reason("tuning", text)
    elif theirs and method.sketch == "kaczmarz":
        text = "Learning rate and momentum are those of the Gaussian row, not tuned for Kaczmarz."
        yield Reason("tuning", text)


def _of_nanogpt(method: Method, settings: Mapping[str, Any], data: str) -> Iterator[Reason]:
    patterns = [str(pattern) for pattern in settings.get("data.train") or ()]
    if not all("fineweb" in pattern.lower() for pattern in patterns):
        names = data or ", ".join(pattern.rsplit("/", 1)[-1] for pattern in patterns)
        text = (
            f"The text is that of the shards {names}, not FineWeb10B: a perplexity belongs to its "
            "text."
        )
        yield Reason("data", text)
    layers, width = settings.get("model.layers"), settings.get("model.width")
    if layers is not None and (layers, width) != (_LAYERS, _WIDTH):
        text = (
            f"The GPT has {layers} layers, {width} wide; the paper's has {_LAYERS}, {_WIDTH} wide."
        )
        yield Reason("model", text, cost=True)
    rank = settings.get("optimizer.polar.rank")
    if method.randomized and rank and width and rank / width != _RANK / _WIDTH:
        text = (
            f"The sketch keeps rank {rank} of {width} ({rank / width:.0%}); the paper's keeps {_RANK} "
            f"of {_WIDTH} ({_RANK / _WIDTH:.0%})."
        )
        yield Reason("model", text, cost=True)
    text = (
        "The GPT here is a plain one. The paper's modded-nanogpt also has value and bigram embeddings, "
        "ties embedding and head for most of training, and masks attention between documents."
    )
    yield Reason("model", text, cost=True)
    if method.algorithm == "muon":
        text = (
            "Muon here is the paper's equation (1); in the authors' code it sits inside NorMuon with "
            "cautious weight decay."
        )
        yield Reason("optimizer", text)
    stages = settings.get("data.stages") or ()
    steps = sum(stage["steps"] for stage in stages)
    if stages and steps != _STEPS:
        tokens = sum(s["steps"] * s["sequences"] * s["sequence_length"] for s in stages) / 1e6
        text = (
            f"Training is {steps:,} steps over {tokens:,.1f} million tokens; the paper's is "
            f"{_STEPS:,} steps."
        )
        yield Reason("budget", text)
