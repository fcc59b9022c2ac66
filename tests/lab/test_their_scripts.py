"""The patches of docs/experiments.md for the authors' script and for modded-nanogpt's track 3."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import polarstep as ps
from polarstep_lab.flops import NANOGPT, muon_ledger

PAGE = (Path(__file__).parents[2] / "docs/experiments.md").read_text(encoding="utf-8")
AUTHORS, TRACK_3 = re.findall(r"```diff\n(.*?)```", PAGE, re.S)


def added(patch: str) -> str:
    """The lines that a patch puts into a script."""
    lines = [line[1:] for line in patch.splitlines() if line.startswith("+")]
    imports = [line for line in lines if not line.startswith(" ")]
    return "\n".join([*imports, textwrap.dedent("\n".join(x for x in lines if x.startswith(" ")))])


def test_the_patches_are_of_some_ten_lines():
    for patch in (AUTHORS, TRACK_3):
        assert sum(line.startswith("+") for line in patch.splitlines()) <= 10


def test_the_map_takes_the_authors_banks():
    """Banks as they hold them, in the shapes in which a rank steps them, at an eighth of the width."""
    attention = torch.randn(10, 4 * 96, 96, dtype=torch.float64).view(40, 96, 96)
    mlps = torch.randn(12, 2, 4 * 96, 96, dtype=torch.float64).view(24, 4 * 96, 96)
    namespace = {"M_bf16": None}
    for bank in (attention, mlps):
        namespace["M_bf16"] = bank
        exec(
            added(AUTHORS).replace("LowRank(200)", "LowRank(20, 4, always_sketch=True)"), namespace
        )
        T = namespace["v_chunk"]
        assert T.shape == bank.shape
        assert torch.linalg.matrix_norm(T, 2).max() < 1 + 1e-6
        rank = torch.linalg.matrix_rank(T[0], atol=1e-3)
        assert 20 <= rank <= 24


def test_its_flops_are_a_fraction_of_full_space_as_in_the_ledger():
    spent, full = (
        sum(count * polar.flops(m, n) for (m, n), count in NANOGPT.matrices)
        for polar in (ps.LowRank(200), ps.NewtonSchulz(7, "quintic"))
    )
    assert sum(count for _, count in NANOGPT.matrices) == 40 + 24
    theirs, all_of_it = (
        sum(muon_ledger(NANOGPT, nesterov=True, sketch=sketch).values())
        for sketch in ("gaussian", None)
    )
    assert theirs / 1e9 == pytest.approx(250.9665, abs=1e-3)  # Table 2
    assert spent / full < 0.2
    assert theirs / all_of_it < 0.2


class Linear(nn.Linear):
    def __init__(self, m: int, n: int) -> None:
        super().__init__(m, n, bias=True)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return nn.functional.rms_norm(x, (x.size(-1),), weight=self.gains)


class CausalSelfAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        q, k, v = (each(x)[:, None] for each in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y[:, 0])


class MLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc, self.proj = Linear(dim, 4 * dim), Linear(4 * dim, dim)

    def forward(self, x):
        return self.proj(self.fc(x).relu().square())


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attn, self.mlp = CausalSelfAttention(dim), MLP(dim)
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The modules and names of track 3, without its rotary embedding."""

    def __init__(self, vocab_size: int, num_layers: int, model_dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, model_dim)
        self.blocks = nn.ModuleList(Block(model_dim) for _ in range(num_layers))
        self.proj = Linear(model_dim, vocab_size)
        self.norm1, self.norm2 = RMSNorm(model_dim), RMSNorm(model_dim)

    def forward(self, inputs, targets):
        x = self.norm1(self.embed(inputs))
        for block in self.blocks:
            x = block(x)
        logits = self.proj(self.norm2(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten())


def optimizer_for(model: GPT) -> ps.Muon:
    namespace = {"model": model}
    exec(added(TRACK_3), namespace)
    (optimizer,) = namespace["optimizers"]
    return optimizer


def test_track_3_has_the_groups_that_it_had():
    with torch.device("meta"):
        model = GPT(50304, 12, 768)
    groups = optimizer_for(model).param_groups
    rates = {id(p): g["lr"] * g.get("lr_factor", 1.0) for g in groups for p in g["params"]}
    assert rates.keys() == {id(p) for p in model.parameters()}  # as the script asserts
    matrices = {id(p) for p in model.blocks.parameters() if p.ndim >= 2}
    muon = {id(p) for g in groups if g["algorithm"] == "muon" for p in g["params"]}
    assert muon == matrices
    assert len(matrices) == 12 * 6
    assert rates[id(model.embed.weight)] == pytest.approx(0.7)
    assert rates[id(model.proj.weight)] == pytest.approx(0.004)
    vectors = {rates[id(p)] for p in model.parameters() if p.ndim < 2}
    assert [*vectors] == [pytest.approx(0.015)]


def test_track_3_takes_a_step_and_follows_its_schedule():
    torch.manual_seed(0)
    model = GPT(64, 2, 32)
    optimizer = optimizer_for(model)
    for group in optimizer.param_groups:  # the lines of the script
        group["initial_lr"] = group["lr"]
    tokens = torch.randint(64, (4, 17))
    losses = []
    for step in range(20):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 20)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
