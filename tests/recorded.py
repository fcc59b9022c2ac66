"""Momentum of a real network from its first step on: harsher than any smooth spectrum.

A small GPT with zero-initialized output projections learns the shipped text; its momentum matrices
are recorded as they enter the polar map. At step one whole matrices are exactly zero, beside
nonzero ones of the same shape; after that one direction towers over a long flat tail.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polarstep import Muon, NewtonSchulz, rng
from polarstep_lab.data.corpus import corpus_tokens
from polarstep_lab.models.gpt import GPT, GPTConfig

STEPS = 50
KEPT = (0, 1, 2, 3, 5, 10, 20, 35, 49)  # the first steps are the hard ones


def record_momentum(steps: int = STEPS, kept: tuple[int, ...] = KEPT) -> dict[str, Tensor]:
    """Batches (count, m, n) of momentum matrices by shape, float32, from the ``kept`` steps."""
    tokens, _, vocabulary = corpus_tokens()
    text = torch.from_numpy(tokens.astype("int64"))
    config = GPTConfig(vocab_size=len(vocabulary), width=64, layers=2, heads=4, context=32)
    model = GPT(config, rng.generator("record", "init"))
    optimizer = Muon(model.blocks.parameters(), lr=0.02, polar=NewtonSchulz(5, "quintic"))
    others = torch.optim.AdamW([*model.embedding.parameters(), *model.head.parameters()], lr=3e-3)
    seen: dict[str, list[Tensor]] = {}

    def keep(bucket):
        if bucket.step in kept:
            m, n = bucket.M.shape[-2:]
            seen.setdefault(f"{m}x{n}", []).append(bucket.M.clone())

    optimizer.register_polar_hook(keep)
    where = rng.generator("record", "batches")
    for _ in range(steps):
        starts = torch.randint(len(text) - config.context - 1, (8, 1), generator=where)
        window = text[starts + torch.arange(config.context + 1)]
        logits = model(window[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        for each in (optimizer, others):
            each.step()
            each.zero_grad()
    return {shape: torch.cat(matrices) for shape, matrices in seen.items()}
