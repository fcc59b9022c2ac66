"""The nanoGPT benchmark: a GPT over token windows, judged by the perplexity of text held out.

Held-out text is cut in two halves. Learning rates and the like are chosen by the perplexity of the
first, the validation. The second is the test: it is read once a run, after the last step.
"""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from polarstep.rng import generator
from polarstep_lab.config import ConfigError, RunConfig, TextData
from polarstep_lab.data.corpus import corpus_tokens
from polarstep_lab.data.shards import digest_of, find_shards, open_shard, short_digest
from polarstep_lab.data.tokenizer import vocab_size_beside
from polarstep_lab.data.tokens import TokenWindows, halves
from polarstep_lab.data.transfer import sent_to
from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.optimizers.schedule import PlaceInStages, place_in_stages
from polarstep_lab.train.data_parallel import Network, parallelize, unwrapped
from polarstep_lab.train.passes import compiled
from polarstep_lab.train.ranks import Ranks
from polarstep_lab.train.tasks import NoiseBatches, Validation, autocast

__all__ = ["LanguageTask"]

CORPUS = "corpus:"
PADDING = 128
"""A vocabulary may be padded to a multiple of 128, since a GPU multiplies aligned matrices faster."""


@dataclass(frozen=True, eq=False)
class LanguageTask:
    """A GPT, and the windows of its three texts: for training, for validation and for the test."""

    config: RunConfig
    device: torch.device
    model: GPT
    network: Network
    """The model as training calls it, shared out among the ranks."""
    train: TokenWindows
    val: TokenWindows
    test: TokenWindows
    ranks: Ranks = field(default_factory=Ranks)

    @classmethod
    def build(
        cls, config: RunConfig, device: torch.device, ranks: Ranks | None = None
    ) -> LanguageTask:
        """Open the data and draw the model's weights from the seed."""
        assert isinstance(config.model, GPTConfig)
        assert isinstance(config.data, TextData)
        ranks = ranks or Ranks()
        for number, stage in enumerate(config.data.stages):
            ranks.check_divides(f"data.stages.{number}.sequences", stage.sequences)
        vocab, window = config.model.vocab_size, config.data.window
        train = TokenWindows(tuple(_tokens(config.data.train, 0, vocab)), window, vocab)
        held_out = TokenWindows(tuple(_tokens(config.data.val, 1, vocab)), window, vocab)
        _check_apart(config.data)
        val, test = _halved(held_out, config.evaluation.tokens)
        model = deepcopy(_initial(config.model, config.seed, config.data.draws, device))
        if config.runtime.parameters == "bfloat16":
            model = model.bfloat16()
        network = parallelize(
            model, model.blocks, "loss", device, ranks, unused=config.model.spare_mlps > 0
        )
        return cls(config, device, model, network, train, val, test, ranks)

    @property
    def data(self) -> dict[str, str]:
        """The names of the files, their number of tokens and digests of their content.

        Those of the held-out text are of all of it: its halves are for validation and for the test.
        """
        held_out = (*self.val.shards, *self.test.shards)
        train_names, train_digest = _described(self._data.train, 0)
        held_out_names, held_out_digest = _described(self._data.val, 1)
        return {
            "data": f"{train_names}: {sum(map(len, self.train.shards)):,} tokens",
            "data_digest": train_digest,
            "held_out": f"{held_out_names}: {sum(map(len, held_out)):,} tokens",
            "held_out_digest": held_out_digest,
        }

    @property
    def metric(self) -> Literal["test_perplexity"]:
        """The name of what :meth:`final` returns."""
        return "test_perplexity"

    @property
    def _data(self) -> TextData:
        assert isinstance(self.config.data, TextData)
        return self.config.data

    @property
    def steps(self) -> int:
        """The steps of all stages."""
        return self._data.steps

    def _place(self, step: int) -> PlaceInStages:
        return place_in_stages(self._data.stages, self._data.window, step)

    def stage_lr(self, step: int) -> float:
        """The learning-rate multiplier of the stage of ``step``."""
        return self._place(step).stage.lr

    def consumed(self, step: int) -> dict[str, int]:
        """The number of tokens in the first ``step`` steps."""
        return {"tokens": self._place(step).tokens}

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, on the CPU, in the stage's sequence length."""
        place = self._place(step)
        if self._data.draws == "plain":
            total = place_in_stages(self._data.stages, self._data.window, self.steps).windows
            drawn = self.train.one_pass(1000 + self.config.seed, total, place.windows, place.taken)
        else:
            drawn = self.train.train(self.config.seed, place.windows, place.taken)
        inputs, targets = drawn
        length, count = place.stage.sequence_length, place.stage.sequences
        if length == self._data.window:
            return inputs, targets
        # Windows have the length of the longest stage's sequences. A stage of shorter sequences
        # cuts as many as fit out of each window and skips the remainder.
        whole = self._data.window // length * length
        inputs, targets = (x[:, :whole].reshape(-1, length)[:count] for x in (inputs, targets))
        return inputs, targets

    def backward(self, step: int) -> Tensor:
        """Add the gradients of the batch's mean loss, and return this rank's part of this loss."""
        batch = self.batch(step)
        tokens = batch[1].numel()
        total = torch.zeros((), device=self.device)
        size = self.config.runtime.micro_batch or len(batch[0])
        passes = list(
            zip(*(torch.split(part, size) for part in self.ranks.share(*batch)), strict=True)
        )
        for number, part in enumerate(passes, start=1):
            with self.network.accumulating(last=number == len(passes)):
                loss = self._loss(self.network, *sent_to(self.device, *part)) / tokens
                self.network.backward(loss)
            total += loss.detach()
        return total

    def noise_batches(self, seed: int, step: int, size: int | None = None) -> NoiseBatches:
        """Batches of the training windows, in the stage of ``step``, shuffled by ``seed``."""
        runtime, stage = self.config.runtime, self._place(step).stage
        if size is not None:
            runtime, stage = replace(runtime, compile=False), replace(stage, sequences=size)
        stages = (replace(stage, steps=1 << 31),)
        data = replace(self._data, stages=stages, draws="keyed")
        config = replace(self.config, seed=seed, data=data, runtime=runtime)
        windows = replace(self.train, length=stage.sequence_length)
        # Every rank computes whole batches here: they are measured, and not trained on.
        task = replace(
            self,
            config=config,
            train=windows,
            network=unwrapped(self.model),
            ranks=Ranks(),
        )
        return NoiseBatches(task.backward, stage.sequences, 1.0)

    def validate(self) -> Validation:
        """Mean loss over the first ``evaluation.tokens`` validation tokens, and its exponential."""
        return self._evaluate(self.val)

    def test_metric(self, last: Validation) -> float:
        """The perplexity of the first ``evaluation.tokens`` test tokens."""
        perplexity = self._evaluate(self.test).perplexity
        assert perplexity is not None
        return perplexity

    @torch.no_grad()
    def _evaluate(self, held_out: TokenWindows) -> Validation:
        """Mean loss and perplexity over the first ``evaluation.tokens`` tokens of ``held_out``."""
        self.model.eval()
        windows = self.config.evaluation.tokens // held_out.length or 1
        total = torch.zeros((), device=self.device, dtype=torch.float64)
        size, ranks = self.config.evaluation.batch, self.ranks
        model = unwrapped(self.model)
        for start in range(0, windows, size * ranks.count):
            first = start + size * ranks.rank
            count = min(size, windows - first)
            # A rank for which nothing is left reads a sequence that does not count: sharded
            # parameters are gathered by all ranks or by none.
            batch = held_out.in_order(min(first, windows - 1), max(1, count))
            loss = self._loss(model, *sent_to(self.device, *batch)).double()
            if count > 0:
                total += loss
        self.model.train()
        mean = ranks.total(total).item() / (windows * held_out.length)
        return Validation(mean, perplexity=math.exp(min(mean, 700.0)))

    def _loss(self, network: Network, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over all positions, by ``network``."""
        with autocast(self.config.runtime, self.device):
            if self._compiles:
                return network(_summed, inputs, targets, compiled)
            return network(_summed, inputs, targets)

    @property
    def _compiles(self) -> bool:
        """``runtime.compile``; if this is null, whether the device is a GPU."""
        wanted = self.config.runtime.compile
        return self.device.type == "cuda" if wanted is None else wanted


def _halved(held_out: TokenWindows, tokens: int) -> tuple[TokenWindows, TokenWindows]:
    """Windows for validation and for the test; both halves must have ``tokens`` in whole windows."""
    length = held_out.length
    first, second = halves(held_out.shards)
    whole = min(sum((len(s) - 1) // length for s in half) for half in (first, second)) * length
    if whole < max(tokens, length):
        raise ConfigError(
            f"evaluation.tokens={tokens:,}, but a half of the validation data has {whole:,} in whole "
            f"sequences of {length:,}: the first half is validated on, the second is the test. Set "
            "evaluation.tokens to at most this number, or give more text in data.val"
        )
    return replace(held_out, shards=tuple(first)), replace(held_out, shards=tuple(second))


def _summed(model: GPT, *inputs: Any) -> Tensor:
    return model.loss(*inputs)


@lru_cache(maxsize=1)
def _initial(config: GPTConfig, seed: int, draws: str, device: torch.device) -> GPT:
    """The model before its first step, for runs to copy.

    It is cached because the methods of a comparison and the trials of a study begin with the same
    weights, and drawing them for GPT-2's vocabulary takes a second, as long as sixty steps on a GPU.
    """
    plain = draws == "plain"
    drawn = torch.Generator().manual_seed(seed) if plain else generator(seed, "weights")
    return GPT(config, drawn).to(device)


def _check_apart(data: TextData) -> None:
    """Raise if a shard is both trained on and held out: its perplexity would be that of known text."""
    if any(patterns[0].startswith(CORPUS) for patterns in (data.train, data.val)):
        return  # a shipped text is cut in two parts
    held_out = {shard.resolve() for shard in find_shards(data.val)}
    both = [shard for shard in find_shards(data.train) if shard.resolve() in held_out]
    if both:
        raise ConfigError(
            f"{both[0]} is matched by data.train={list(data.train)} and by data.val={list(data.val)}: "
            "text that is trained on cannot be validated on; narrow one of the patterns, as "
            "data.train='DIR/*_train_*.bin' and data.val='DIR/*_val_*.bin'"
        )


def _described(patterns: tuple[str, ...], part: Literal[0, 1]) -> tuple[str, str]:
    """The names of shards, or of a shipped text, and a digest of their content."""
    if patterns[0].startswith(CORPUS):
        name = patterns[0].removeprefix(CORPUS)
        return name, short_digest(corpus_tokens(name)[part].tobytes())
    shards = find_shards(patterns)
    return ", ".join(shard.name for shard in shards), digest_of(shards)


def _tokens(patterns: tuple[str, ...], part: int, vocab_size: int) -> list[Any]:
    """The tokens of shards, or of a shipped text: its training (0) or validation (1) part."""
    if len(patterns) == 1 and patterns[0].startswith(CORPUS):
        return [corpus_tokens(patterns[0].removeprefix(CORPUS))[part]]
    shards = find_shards(patterns)
    for shard in shards:
        noted = vocab_size_beside(shard)
        if noted is not None and not noted <= vocab_size < noted + PADDING:
            raise ConfigError(
                f"model.vocab_size={vocab_size}, but {shard} was made with a vocabulary of {noted}: "
                f"set model.vocab_size={noted}, or the next multiple of {PADDING} for a GPU"
            )
    return [open_shard(shard) for shard in shards]
