"""What does a certificate cost, and how tight is it?

    python benchmarks/certificate_cost.py            # nanoGPT shapes, on the device there is
    python benchmarks/certificate_cost.py --quick    # a few seconds on a laptop

For every map and shape: the time of the polar map, of the cheap certificate on top of it, their
ratio, and both certificates of the same T. The aim is a ratio below 5%.

Both times are of a second step on the same matrices, from what the first has left, as a step of a
running optimizer is. The certificate gets what the monitor of an optimizer hands it: the map that ran on
the shape, the factors of T, and what a deflated step captured.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import polarstep as ps
from polarstep import rng
from polarstep.certificate import certify, cheap_certificate
from polarstep.maps import Draw, MapState, Polar
from polarstep.maps.base import numbers_for, step_of

INNER = ps.NewtonSchulz(4, "polar-express-sketch")
MAPS: dict[str, ps.PolarMap] = {
    "LowRank(200+10, h=1)": ps.LowRank(200, 10, 1),
    "LowRank(200+10, h=½)": ps.LowRank(200, 10, 0.5),
    "LowRank(200+10, Kaczmarz)": ps.LowRank(200, 10, 1, ps.Kaczmarz()),
    "Deflated(200+8, h=1)": ps.Deflated(ps.LowRank(200, 8, inner=INNER)),
    "auto": ps.Auto(),
    "NewtonSchulz(5, quintic)": ps.NewtonSchulz(5, "quintic"),
    "NewtonSchulz(5, polar-express)": ps.NewtonSchulz(5, "polar-express"),
}
SHAPES = [(768, 768), (3072, 768), (768, 3072)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small shape, fewer repeats")
    parser.add_argument("--batch", type=int, default=2, help="matrices of each shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    shapes, repeats = (SHAPES[:1], 5) if options.quick else (SHAPES, 11)
    table = Table("map", "shape", "map [ms]", "certificate [ms]", "ratio", "γ ≤", "γ", "ν ≤", "ν")
    jobs = [(name, polar, shape) for name, polar in MAPS.items() for shape in shapes]
    for name, polar, (m, n) in track(jobs, "measuring", console=Console(stderr=True)):
        M = momentum_like(options.batch, m, n).to(options.device)
        taken = polar.on(m, n, M.device)
        run = second_step(taken, M)
        step = run(shown=True)
        T = step.dense.to(M.dtype)
        # On a GPU step.M, and with it B, is a multiple of M; the certificate is the same for both.
        certify_it = functools.partial(
            cheap_certificate, step.M, T, taken, step.factors, step.captured
        )
        # The two take turns, so that a machine that slows down slows both.
        make_it = functools.partial(multiplied_out, run)
        times = [(seconds(make_it, M), seconds(certify_it, M)) for _ in range(repeats)]
        maps, certificates = zip(*times, strict=True)
        ratios = [certificate / whole for whole, certificate in times]
        cheap, exact = certify_it(), certify(M.cpu(), T.cpu())
        table.add_row(
            name,
            f"{options.batch}·({m}×{n})",
            f"{1e3 * statistics.median(maps):.2f}",
            f"{1e3 * statistics.median(certificates):.2f}",
            f"{statistics.median(ratios):.1%}",
            *(f"{value:.3f}" for value in (cheap.worst[0], exact.worst[0])),
            *(f"{value:.1e}" for value in (cheap.worst[1], exact.worst[1])),
        )
    Console(width=140).print(table)


def second_step(polar: ps.PolarMap, M: torch.Tensor) -> Callable[..., Polar]:
    """A function that makes the second step of a map on ``M``, over and over again.

    ``shown`` asks for what a certificate reads, which no other step keeps.
    """
    numbers = None
    if polar.traits.draws != "never":
        numbers = numbers_for(polar, M, fresh(str(M.device)))
    _, carry = step_of(polar, M, MapState(), Draw(numbers))
    # Kernels may write what a step leaves over the carry it was given: the next one is a third step.
    return lambda shown: step_of(polar, M, carry, Draw(numbers, shown=shown))[0]


def multiplied_out(run: Callable[..., Polar]) -> torch.Tensor:
    """T of a step that nobody looks at."""
    return run(shown=False).multiplied_out()


def momentum_like(batch: int, m: int, n: int) -> torch.Tensor:
    """Matrices like momentum early in training: σ₁ = 1, then a decaying tail k^-0.7/4."""
    g = rng.generator("certificate-cost", m, n)
    k = min(m, n)
    sigma = torch.arange(1, k + 1) ** -0.7 / 4
    sigma[0] = 1.0
    U = torch.linalg.qr(torch.randn(m, k, generator=g)).Q
    V = torch.linalg.qr(torch.randn(n, k, generator=g)).Q
    return ((U * sigma) @ V.mT).repeat(batch, 1, 1)


def fresh(device: str) -> torch.Generator:
    return rng.generator("certificate-cost", device=device)


def seconds(run: Callable[[], object], M: torch.Tensor) -> float:
    if M.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if M.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
