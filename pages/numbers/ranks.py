"""What a step on many ranks sends and computes: nothing is measured, the formulas of plans say it.

tests/ranks counts the bytes and products of real steps against the same formulas.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import polarstep as ps
from pages.numbers.number import Number, plain
from polarstep.ranks import plans
from polarstep.transforms import followed

SOURCE = "polarstep.ranks.plans"
MIB = 2**20
RANKS, LAYERS, D = 8, 16, 2048
GPT = ((4 * LAYERS, D, D), (LAYERS, 4 * D, D), (LAYERS, D, 4 * D))
"""(count, m, n) of the hidden matrices of a GPT: with embedding and head it has a billion parameters."""


def of_gpt(polar: ps.PolarMap, transform: ps.Transform | None = None) -> float:
    """MiB that a rank receives for :data:`GPT` in a step by the plan of owners."""
    cuda = torch.device("cuda")
    return sum(
        plans.bytes_received(
            "owner",
            plans.SharedMatrices(m, n, count, RANKS),
            followed(polar.on(m, n, cuda), transform),
        )
        / MIB
        for count, m, n in GPT
    )


def numbers() -> Iterator[tuple[str, Number]]:
    """All numbers of this file."""
    hidden = sum(count * m * n for count, m, n in GPT)
    yield "ranks.weights", plain((RANKS - 1) / RANKS * hidden * 2 / MIB, SOURCE, " MiB", 0)
    narrow = ps.LowRank(120, power=0)
    yield "ranks.low-rank-120", plain(of_gpt(narrow), SOURCE, " MiB", 0)
    with_rows = of_gpt(narrow, ps.NormalizedRows())
    yield "ranks.low-rank-120-rows", plain(with_rows, SOURCE, " MiB", 0)
