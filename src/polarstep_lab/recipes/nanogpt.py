"""The nanoGPT recipes: for a laptop, for a GPU in seconds or in minutes, and the paper's."""

from __future__ import annotations

from dataclasses import replace

from polarstep_lab.config import (
    EvaluationConfig,
    OptimizerConfig,
    RunConfig,
    RuntimeConfig,
    ScheduleConfig,
    Stage,
    TextData,
)
from polarstep_lab.methods import Method
from polarstep_lab.models.gpt import GPTConfig
from polarstep_lab.recipes.recipe import Range, polar_of, register

__all__ = ["nanogpt", "nanogpt_25m", "nanogpt_small", "nanogpt_toy", "nanogpt_wiki"]

PADDED_GPT2 = 50304
"""GPT-2's 50,257 tokens padded to a multiple of 128: a GPU multiplies aligned matrices faster."""

EMBEDDING_LR = {"adamw": 0.4, "sgd": 2000.0, "muon": 0.3}
"""The rates of the embedding, from a search on ``nanogpt-small``.

Rows of the embedding have entries of size 1 and get a gradient only when their token occurs. The rate of
0.008 in the authors' script belongs to entries of size 0.005. Here it would hardly move them:
``nanogpt-wiki`` ends 8% above the perplexity it has with 0.3 (``results/long-run``)."""

HEAD_LR = 0.004
"""The rate of the head beside Muon, from the same recipe."""

GPT_SEARCH = {
    "adamw": {"optimizer.lr": Range(3e-4, 3e-2, log=True)},
    "sgd": {"optimizer.lr": Range(1e-2, 10.0, log=True)},
    "muon": {"optimizer.lr": Range(3e-3, 0.3, log=True)},
}

# As many settings for AdamW as for Muon.
WIKI_SEARCH = {
    "adamw": {
        "optimizer.lr": Range(1e-4, 3e-3, log=True),
        "optimizer.head_lr": Range(5e-4, 5e-2, log=True),
    },
    "sgd": {"optimizer.lr": Range(0.01, 1.0, log=True)},
    "muon": {
        "optimizer.lr": Range(0.01, 0.1, log=True),
        "optimizer.head_lr": Range(5e-4, 5e-2, log=True),
    },
}

# Every method has a rate for the matrices and one for the embedding, whose rows are so seldom met
# that no rate is right for both.
SMALL_SEARCH = {
    "adamw": {
        "optimizer.lr": Range(5e-4, 3e-3, log=True),
        "optimizer.embedding_lr": Range(0.2, 1.0, log=True),
    },
    "sgd": {
        "optimizer.lr": Range(0.05, 1.0, log=True),
        "optimizer.embedding_lr": Range(100.0, 3000.0, log=True),
    },
    "muon": {
        "optimizer.lr": Range(0.01, 0.1, log=True),
        "optimizer.embedding_lr": Range(0.05, 2.0, log=True),
    },
}


@register(
    "nanogpt-toy",
    "nanogpt",
    "a 4-layer GPT on the characters of the shipped text; half a minute on one core",
    "nothing: the text is in the package",
    GPT_SEARCH,
)
def nanogpt_toy(method: Method) -> RunConfig:
    """A laptop-sized GPT over characters: 0.8M parameters, 164 thousand characters."""
    lr, momentum = {"adamw": (5e-3, 0.9), "sgd": (0.1, 0.9), "muon": (0.03, 0.95)}[method.algorithm]
    muon = method.algorithm == "muon"
    return RunConfig(
        recipe="nanogpt-toy",
        benchmark="nanogpt",
        method=method.name,
        seed=0,
        model=GPTConfig(vocab_size=65, width=128, layers=4, heads=4, context=128),
        data=TextData(
            train=("corpus:tinyshakespeare",),
            val=("corpus:tinyshakespeare",),
            stages=(Stage(steps=160, sequences=8, sequence_length=128),),
        ),
        optimizer=OptimizerConfig(
            lr=lr,
            momentum=momentum,
            polar=polar_of(method, rank=32, oversample=8, power=1),
            normalize_rows=method.normalize_rows,
            embedding_lr=1e-2 if muon else 0.0,
            head_lr=1e-2 if muon else 0.0,
        ),
        schedule=ScheduleConfig(cooldown=0.6, final=0.05),
        evaluation=EvaluationConfig(every=32, tokens=16_384, batch=32),
        runtime=RuntimeConfig(log_every=5),
    )


@register(
    "nanogpt-small",
    "nanogpt",
    "a 5-layer GPT with the paper's matrices on GPT-2 tokens; ten seconds on an H200",
    "token shards data/*_train_*.bin and data/*_val_*.bin (polarstep tokenize)",
    SMALL_SEARCH,
)
def nanogpt_small(method: Method) -> RunConfig:
    """The nanoGPT columns of Table 2 for 6.6 million tokens and one GPU.

    Matrices, polar map, routing and the shape of the schedule are the paper's; depth, batch and
    length of the run are cut. 35.4M parameters in hidden matrices, 77.3M in embedding and head.
    """
    lr, embedding_lr, momentum = {
        "adamw": (1e-3, EMBEDDING_LR["adamw"], 0.9),
        "sgd": (0.1, EMBEDDING_LR["sgd"], 0.9),
        "muon": (0.03, EMBEDDING_LR["muon"], 0.95),
    }[method.algorithm]
    muon = method.algorithm == "muon"
    return RunConfig(
        recipe="nanogpt-small",
        benchmark="nanogpt",
        method=method.name,
        seed=0,
        model=GPTConfig(vocab_size=PADDED_GPT2, width=768, layers=5, heads=6, context=1024),
        data=TextData(
            train=("data/*_train_*.bin",),
            val=("data/*_val_*.bin",),
            stages=(Stage(steps=400, sequences=16, sequence_length=1024),),
        ),
        optimizer=OptimizerConfig(
            lr=lr,
            momentum=momentum,
            polar=polar_of(method, rank=200, oversample=10, power=1),
            normalize_rows=method.normalize_rows,
            embedding_lr=embedding_lr,
            head_lr=HEAD_LR if muon else 0.0,
        ),
        schedule=ScheduleConfig(
            # Without a gentle start SGD is unstable: perplexity 709, 1393 and 18,536 on three seeds.
            warmup=40 if method.algorithm == "sgd" else 0,
            cooldown=0.6,
            final=0.05,
            momentum_start=0.85 if muon else None,
            momentum_warmup=0.2,
            momentum_cooldown=20,
        ),
        # As many sequences as in a training batch: one compiled shape serves both.
        evaluation=EvaluationConfig(every=80, tokens=163_840, batch=16),
        runtime=RuntimeConfig(micro_batch=16, compile=None),
    )


@register(
    "nanogpt",
    "nanogpt",
    "the paper's nanoGPT benchmark: 11 layers, 768 wide, 1490 steps in three stages",
    "FineWeb shards data/fineweb10B/fineweb_{train,val}_*.bin (or any, with --set data.train=…)",
    GPT_SEARCH | {"muon": GPT_SEARCH["muon"] | {"optimizer.momentum": Range(0.9, 0.99)}},
)
def nanogpt(method: Method) -> RunConfig:
    """The nanoGPT columns of Table 2.

    Learning rates and momentum are the paper's (Appendix, "Hyperparameters and parameter
    routing"). Its SGD rate of 1e-4 belongs to a loss summed over the 16,384 tokens of one of eight
    parts of the first stage's batch, as modded-nanogpt sums it; for the mean that is 1e-4 · 16,384.
    Stages, cool-down and momentum warm-up are those of the modded-nanogpt configuration it builds
    on. The batches have eight equal parts, one for each of the authors' GPUs: in the first stage 18
    sequences of 896 tokens, which is as many as fit into 16,384.
    """
    lr, momentum = {
        "adamw": (0.0018, 0.9),
        "sgd": (1e-4 * 16_384, 0.9),
        "muon": (0.032463575100400426, 0.9664542176931918),
    }[method.algorithm]
    third = 1450 // 3
    muon = method.algorithm == "muon"
    return RunConfig(
        recipe="nanogpt",
        benchmark="nanogpt",
        method=method.name,
        seed=0,
        model=GPTConfig(
            vocab_size=PADDED_GPT2,
            width=768,
            layers=11,
            heads=6,
            context=2048,
            attention_free=(6,),
            spare_mlps=1,
        ),
        data=TextData(
            train=("data/fineweb10B/fineweb_train_*.bin",),
            val=("data/fineweb10B/fineweb_val_*.bin",),
            stages=(
                Stage(steps=third, sequences=18 * 8, sequence_length=896, lr=1.0),
                Stage(steps=third, sequences=16 * 8, sequence_length=2048, lr=1.52),
                Stage(steps=1490 - 2 * third, sequences=24 * 8, sequence_length=2048, lr=1.73),
            ),
        ),
        optimizer=OptimizerConfig(
            lr=lr,
            momentum=momentum,
            polar=polar_of(method, rank=200, oversample=10, power=1),
            normalize_rows=method.normalize_rows,
            # The authors' SGD has one rate for everything. So has their AdamW, whose embedding has small
            # entries: for entries of size 1, the rate is this one.
            embedding_lr=0.0 if method.algorithm == "sgd" else EMBEDDING_LR[method.algorithm],
            head_lr=0.008 if muon else 0.0,
        ),
        schedule=ScheduleConfig(
            warmup=200 if method.algorithm == "sgd" else 0,  # as in the authors' training script
            cooldown=0.6,
            final=0.15,
            extension=40,
            momentum_start=0.85 if muon else None,
            momentum_warmup=0.2,
            momentum_cooldown=50,
        ),
        evaluation=EvaluationConfig(every=125, tokens=10_485_760, batch=16),
        runtime=RuntimeConfig(micro_batch=16, compile=None),
    )


@register(
    "nanogpt-wiki",
    "nanogpt",
    "the paper's matrices in a plain GPT, one pass over 73 million tokens; two minutes on an H200",
    "token shards data/*_train_*.bin and data/*_val_*.bin (polarstep tokenize)",
    WIKI_SEARCH,
)
def nanogpt_wiki(method: Method) -> RunConfig:
    """The ``nanogpt`` recipe at an eighth of its batch, and three quarters of its steps.

    The three stages keep their proportions (8 : 16 : 24) and learning-rate multipliers. All
    sequences are 2048 long, so that every pass, 16 of them, has one shape. Embedding and head have the
    rates of ``nanogpt-small``. AdamW as a baseline has a rate of its own for the head, as Muon has, and
    SGD has that recipe's rate for the matrices too, where the paper gives them one rate for everything.
    """
    config = nanogpt(method)
    assert isinstance(config.data, TextData)
    data = TextData(
        train=("data/*_train_*.bin",),
        val=("data/*_val_*.bin",),
        stages=tuple(
            Stage(steps=370, sequences=16 * (number + 1), sequence_length=2048, lr=stage.lr)
            for number, stage in enumerate(config.data.stages)
        ),
    )
    sgd = method.algorithm == "sgd"
    optimizer = replace(
        config.optimizer,
        lr=nanogpt_small(method).optimizer.lr if sgd else config.optimizer.lr,
        embedding_lr=EMBEDDING_LR[method.algorithm],
        head_lr=0.0 if sgd else HEAD_LR,
    )
    return replace(
        config,
        recipe="nanogpt-wiki",
        data=data,
        optimizer=optimizer,
        schedule=replace(
            config.schedule,
            warmup=config.schedule.warmup * 3 // 4,
            extension=30,
            momentum_cooldown=37,
        ),
        evaluation=EvaluationConfig(every=185, tokens=163_840, batch=16),
    )


@register(
    "nanogpt-25m",
    "nanogpt",
    "the paper's matrices in 5 layers, one pass over 24.6 million tokens; half a minute on an H200",
    "token shards data/*_train_*.bin and data/*_val_*.bin (polarstep tokenize)",
    SMALL_SEARCH,
)
def nanogpt_25m(method: Method) -> RunConfig:
    """The recipe of the studies of maps, lengths and widths: 1500 steps of 16 sequences of 1024 tokens.

    All windows are read once. Momentum rises from 0.85 to 0.95 over the first tenth; rates are constant
    and fall to 5% over the last 60%. Embedding, head and vectors have AdamW's rates of the search on
    ``nanogpt-small``, and Muon the best of 0.01, 0.014 and 0.02 for full space on one seed.
    """
    small = nanogpt_small(method)
    muon = method.algorithm == "muon"
    return replace(
        small,
        recipe="nanogpt-25m",
        data=TextData(
            train=("data/*_train_*.bin",),
            val=("data/*_val_*.bin",),
            stages=(Stage(steps=1500, sequences=16, sequence_length=1024),),
            draws="plain",
        ),
        optimizer=replace(
            small.optimizer,
            lr=0.014 if muon else small.optimizer.lr,
            embedding_lr=EMBEDDING_LR["muon"] if method.algorithm != "sgd" else EMBEDDING_LR["sgd"],
            head_lr=HEAD_LR,
            vector_lr=HEAD_LR,
        ),
        schedule=ScheduleConfig(
            warmup=150 if method.algorithm == "sgd" else 0,
            cooldown=0.6,
            final=0.05,
            momentum_start=0.85 if muon else None,
            momentum_warmup=0.1,
        ),
        evaluation=EvaluationConfig(every=100, tokens=163_840, batch=16),
    )
