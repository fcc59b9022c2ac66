"""What does a certificate cost, and how far is it above the exact γ and ν?

    python benchmarks/certificates.py cost            # nanoGPT's shapes, on the device there is
    python benchmarks/certificates.py cost --quick    # a few seconds on a laptop
    python benchmarks/certificates.py tightness --json tightness.jsonl

``cost`` prints for every map and shape the time of the map, of the cheap certificate on top of it, their
ratio, and both certificates of the same T. The aim is a ratio below 5%. Both times are of a second step
on the same matrices, as a step of a running optimizer is.

``tightness`` trains a 3-layer, 256-wide GPT on the shipped text for 30 steps. Every map is then applied
to the momentum of seven of these steps, and both certificates of its T are printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

import polarstep as ps
from polarstep import rng
from polarstep.bucket import Observed
from polarstep.certificate import certified, certify, cheap_certificate
from polarstep.maps import Draw, MapState, Polar
from polarstep.maps.base import numbers_for, step_of
from polarstep_lab.data.corpus import corpus_text
from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.records.environment import describe_environment
from timing import clock

INNER = ps.NewtonSchulz(4, "polar-express-sketch")
LARGE: dict[str, ps.PolarMap] = {
    "LowRank(200+10, h=1)": ps.LowRank(200, 10, 1),
    "LowRank(200+10, h=½)": ps.LowRank(200, 10, 0.5),
    "LowRank(200+10, Kaczmarz)": ps.LowRank(200, 10, 1, ps.Kaczmarz()),
    "Deflated(200+8, h=1)": ps.Deflated(ps.LowRank(200, 8, inner=INNER)),
    "auto": ps.Auto(),
    "NewtonSchulz(5, quintic)": ps.NewtonSchulz(5, "quintic"),
    "NewtonSchulz(5, polar-express)": ps.NewtonSchulz(5, "polar-express"),
}
SHAPES = ((768, 768), (3072, 768), (768, 3072))
SMALL: dict[str, ps.PolarMap] = {
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
        ps.LowRank(40, 8, inner=INNER, always_sketch=True), ps.NewtonSchulz(1, "flat")
    ),
}
STEPS = (0, 1, 2, 5, 10, 20, 29)


def main() -> None:
    """The two commands."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["cost", "tightness"])
    parser.add_argument("--quick", action="store_true", help="of cost: one shape, fewer repeats")
    parser.add_argument("--batch", type=int, default=2, help="of cost: matrices of each shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="of tightness: append lines to this file")
    options = parser.parse_args()
    if options.what == "cost":
        shapes, repeats = (SHAPES[:1], 5) if options.quick else (SHAPES, 11)
        Console(width=140).print(cost(shapes, repeats, options.batch, torch.device(options.device)))
    else:
        Console(width=120).print(tightness(options.json))


# --- cost ---------------------------------------------------------------------------------------


def cost(
    shapes: tuple[tuple[int, int], ...], repeats: int, batch: int, device: torch.device
) -> Table:
    """Times of maps and certificates on matrices like momentum."""
    table = Table("map", "shape", "map [ms]", "certificate [ms]", "ratio", "γ ≤", "γ", "ν ≤", "ν")
    jobs = [(name, polar, shape) for name, polar in LARGE.items() for shape in shapes]
    for name, polar, (m, n) in track(jobs, "measuring", console=Console(stderr=True)):
        M = momentum_like(batch, m, n).to(device)
        taken = polar.on(m, n, M.device)
        run = second_step(taken, M)
        step = run(shown=True)
        T = step.dense.to(M.dtype)
        # On a GPU step.M, and with it B, is a multiple of M; the certificate is the same for both.
        certify_it = functools.partial(
            cheap_certificate, step.M, T, taken, step.factors, step.captured
        )
        # The two take turns, so that a machine that slows down slows both.
        make_it = functools.partial(_multiplied_out, run)
        times = [(_milliseconds(make_it, M), _milliseconds(certify_it, M)) for _ in range(repeats)]
        maps, certificates = (statistics.median(each) for each in zip(*times, strict=True))
        ratio = statistics.median(certificate / whole for whole, certificate in times)
        cheap, exact = certify_it(), certify(M.cpu(), T.cpu())
        table.add_row(
            name,
            f"{batch}·({m}×{n})",
            f"{maps:.2f}",
            f"{certificates:.2f}",
            f"{ratio:.1%}",
            *(f"{value:.3f}" for value in (cheap.worst[0], exact.worst[0])),
            *(f"{value:.1e}" for value in (cheap.worst[1], exact.worst[1])),
        )
    return table


def second_step(polar: ps.PolarMap, M: torch.Tensor) -> Callable[..., Polar]:
    """A function that makes the second step of a map on ``M``, over and over again.

    ``shown`` asks for what a certificate reads, which no other step keeps.
    """
    numbers = None
    if polar.traits.draws != "never":
        numbers = numbers_for(polar, M, rng.generator("certificates", device=str(M.device)))
    _, carry = step_of(polar, M, MapState(), Draw(numbers))
    # Kernels may write what a step leaves over the carry it was given: the next one is a third step.
    return lambda shown: step_of(polar, M, carry, Draw(numbers, shown=shown))[0]


def _multiplied_out(run: Callable[..., Polar]) -> torch.Tensor:
    """T of a step that nobody looks at."""
    return run(shown=False).multiplied_out()


def momentum_like(batch: int, m: int, n: int) -> torch.Tensor:
    """Matrices like momentum early in training: σ₁ = 1, then a decaying tail k^-0.7/4."""
    g = rng.generator("certificates", m, n)
    k = min(m, n)
    sigma = torch.arange(1, k + 1) ** -0.7 / 4
    sigma[0] = 1.0
    U = torch.linalg.qr(torch.randn(m, k, generator=g)).Q
    V = torch.linalg.qr(torch.randn(n, k, generator=g)).Q
    return ((U * sigma) @ V.mT).repeat(batch, 1, 1)


def _milliseconds(run: Callable[[], object], M: torch.Tensor) -> float:
    def whole() -> None:
        run()
        if M.is_cuda:
            torch.cuda.synchronize()

    if M.is_cuda:
        torch.cuda.synchronize()
    return clock(whole)


# --- tightness ----------------------------------------------------------------------------------


def tightness(path: Path | None) -> Table:
    """Exact γ and ν beside their bounds; with a path also lines of records."""
    recorded = momentum()
    matrices = sum(len(M) for M in recorded)
    table = Table("map", "γ median", "largest", "γ ≤ median", "largest", "ν largest", "ν ≤ largest")
    for name, polar in track(SMALL.items(), "certifying", console=Console(stderr=True)):
        exact, cheap = [], []
        for M in recorded:
            T, bound = certified(polar, M, generator=rng.generator("tightness"))
            exact.append(certify(M, T))
            cheap.append(bound)
        gamma, limit = (torch.cat([each.gamma for each in found]) for found in (exact, cheap))
        nu, most = (torch.cat([each.nu for each in found]) for found in (exact, cheap))
        assert (limit >= gamma).all(), name
        assert (most >= nu).all(), name
        result = {
            "gamma_median": float(gamma.median()),
            "gamma_largest": float(gamma.max()),
            "bound_median": float(limit.median()),
            "bound_largest": float(limit.max()),
            "nu_largest": float(nu.max()),
            "nu_bound_largest": float(most.max()),
        }
        table.add_row(name, *(f"{value:.3f}" for value in result.values()))
        if path:
            line: dict[str, Any] = {
                "kind": "certificate",
                "study": "certificates",
                "part": "tightness",
            }
            line |= {"variant": name, "config": {"matrices": matrices, "steps": STEPS}}
            line |= {"environment": describe_environment(torch.device("cpu")), "result": result}
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    return table


def momentum() -> list[torch.Tensor]:
    """M of a GPT's hidden matrices at :data:`STEPS`, without those that are zero."""
    tokens = torch.tensor(list(corpus_text()[:200_000].encode()))
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
