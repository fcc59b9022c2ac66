"""How far above the exact γ and ν is the cheap certificate, on the momentum of a real training run?

    python benchmarks/certificate_tightness.py       # half a minute on a laptop
    python benchmarks/certificate_tightness.py --json results/certificates/tightness.json

Trains a 3-layer, 256-wide GPT on the shipped text for 30 steps. Every map is then applied to the
momentum matrices of seven of these steps, and both certificates of its T are printed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

import polarstep as ps
from polarstep import rng
from polarstep.bucket import Observed
from polarstep.certificate import certified, certify
from polarstep_lab.data.corpus import corpus_text
from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.storage import write_json

MAPS = {
    "Exact": ps.Exact(),
    "LowRank(64+8, h=1)": ps.LowRank(64, 8, 1),
    "LowRank(64+8, h=½)": ps.LowRank(64, 8, 0.5),
    "LowRank(64+8, Kaczmarz)": ps.LowRank(64, 8, 1, ps.Kaczmarz()),
    "LowRank(64+8, basis by products)": ps.LowRank(64, 8, 1, orth="products"),
    "LowRank(16+8, h=1)": ps.LowRank(16, 8, 1),
    "NewtonSchulz(9, quintic)": ps.NewtonSchulz(9, "quintic"),
    "NewtonSchulz(5, quintic)": ps.NewtonSchulz(5, "quintic"),
    "NewtonSchulz(5, polar-express)": ps.NewtonSchulz(5, "polar-express"),
    "Deflated(40+8, one step)": ps.Deflated(
        ps.LowRank(40, 8, inner=ps.NewtonSchulz(4, "polar-express-sketch"), always_sketch=True),
        ps.NewtonSchulz(1, "flat"),
    ),
}
STEPS = (0, 1, 2, 5, 10, 20, 29)
COLUMNS = (
    "gamma_median",
    "gamma_largest",
    "bound_median",
    "bound_largest",
    "nu_largest",
    "nu_bound_largest",
)
"""The numbers of a map in the file of ``--json``, in the order of the printed table."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    options = parser.parse_args()
    recorded = momentum()
    rows = []
    table = Table("map", "γ median", "largest", "γ ≤ median", "largest", "ν largest", "ν ≤ largest")
    for name, polar in track(MAPS.items(), "certifying", console=Console(stderr=True)):
        exact, cheap = [], []
        for M in recorded:
            T, bound = certified(polar, M, generator=rng.generator("tightness"))
            exact.append(certify(M, T))
            cheap.append(bound)
        value, limit = (torch.cat([each.gamma for each in found]) for found in (exact, cheap))
        nu, most = (torch.cat([each.nu for each in found]) for found in (exact, cheap))
        assert (limit >= value).all(), name
        assert (most >= nu).all(), name
        of_gamma = (value.median(), value.max(), limit.median(), limit.max())
        columns = [float(v) for v in (*of_gamma, nu.max(), most.max())]
        rows.append({"map": name, **dict(zip(COLUMNS, columns, strict=True))})
        table.add_row(name, *(f"{v:.3f}" for v in columns))
    console = Console(width=120)
    console.print(table)
    matrices = sum(len(M) for M in recorded)
    console.print(f"{matrices} matrices, {len(STEPS)} steps")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.json, {"matrices": matrices, "steps": STEPS, "maps": rows})


def momentum() -> list[torch.Tensor]:
    text = corpus_text()[:200_000].encode()
    tokens = torch.tensor(list(text))
    model = GPT(GPTConfig(128, width=256, layers=3, heads=4, context=64), rng.generator("model"))
    optimizer = ps.muon_for(
        model, lr=0.02, polar=None, weight_decay=0.0, shape_scale="spectral", transform=None
    )
    kept: list[torch.Tensor] = []

    def keep(bucket: Observed) -> None:
        if bucket.step in STEPS:
            kept.append(bucket.M[bucket.M.flatten(1).norm(dim=1) > 0].clone())

    optimizer.register_polar_hook(keep)
    g = rng.generator("batches")
    for _ in track(range(30), "training", console=Console(stderr=True)):
        start = torch.randint(0, len(tokens) - 65, (16,), generator=g)
        batch = torch.stack([tokens[i : i + 65] for i in start])
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [M for M in kept if len(M)]


if __name__ == "__main__":
    main()
