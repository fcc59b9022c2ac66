"""How inexact is an applied update, in the precision in which the step is timed?

    python benchmarks/step_accuracy.py                 # on the GPU if there is one
    python benchmarks/step_accuracy.py --quick         # small matrices, to see that it works
    python benchmarks/step_accuracy.py --json accuracy.jsonl

Everything is read from the parameters before and after ``Muon.step()``: with X = 0, β = 0 and a rate of
one the step leaves X = −T(G). Of that T the benchmark prints γ and ν, for every map:

- on five spectra (flat, two power laws, sixteen spikes, half rank), with a zero and a rank-one matrix in
  the same batch, at the first step and at the third, which a GPU replays as a CUDA graph;
- on matrices of the five spectra a tenth of which is new at every step, for maps that carry something
  from step to step;
- on the momentum of a real GPT, recorded at every step from the first on, as these maps need it;
- on a GPU also on matrices of 2048 and 4096 rows, for the head of 512 columns that an 8B layer takes.

Δγ is γ minus that of Algorithm 1 in float64 with the same rank and one power iteration. It is negative
where the applied update is better.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import polarstep as ps
from polarstep import rng
from polarstep.bucket import Observed
from polarstep_lab.data.corpus import corpus_tokens
from polarstep_lab.models.gpt import GPT, GPTConfig
from step_optimizers import INNER
from timing import machine

SPECTRA: dict[str, Callable[[Tensor], Tensor]] = {
    "k^-0.5": lambda k: k**-0.5,
    "k^-1": lambda k: 1 / k,
    "flat": torch.ones_like,
    "sixteen spikes": lambda k: torch.where(k <= 16, 1.0, 1e-3),
    "half rank": lambda k: torch.where(k <= len(k) // 2, k**-0.5, 0.0),
}
WIDE, WIDE_RANK = (2048, 4096), 504
"""Sides of square matrices that are measured on a GPU only, and the rank of their sketch, ℓ = 512."""
ROWS = ", rows normalized"
"""How the names of maps end whose T has its rows normalized."""


def carrying(maps: dict[str, ps.PolarMap]) -> list[str]:
    """The names of the maps that carry something from step to step, as normalized rows do."""
    return [name for name, polar in maps.items() if polar.traits.carries or name.endswith(ROWS)]


def maps(rank: int, short: int) -> dict[str, ps.PolarMap]:
    """The maps under test on matrices with this short side; sketches have ℓ = rank + 8.

    "A sixth" is the map that ``auto`` takes, with ℓ = a sixth of the short side.
    """
    common: dict[str, Any] = {"inner": INNER, "always_sketch": True}
    warm, fresh = (
        ps.LowRank(rank, 8, sketch=sketch, **common) for sketch in (ps.Warm(), ps.Gaussian())
    )
    sampled = ps.LowRank(rank, 8, power=0.5, sketch=ps.Kaczmarz(), **common)
    none = ps.LowRank(rank, 8, power=0, **common)
    flat, full = ps.NewtonSchulz(1, "flat"), ps.NewtonSchulz(5, "polar-express")
    sixth = ps.LowRank(-(-short // 96) * 16 - 8, 8, sketch=ps.Warm(), **common)
    return {
        "full space, PolarExpress 5": full,
        f"full space, PolarExpress 5{ROWS}": full,
        "full space, quintic 7": ps.NewtonSchulz(7, "quintic"),
        "warm": warm,
        f"warm{ROWS}": warm,
        "Gaussian h=0": none,
        f"Gaussian h=0{ROWS}": none,
        "Gaussian h=½": ps.LowRank(rank, 8, power=0.5, **common),
        "Kaczmarz h=½": sampled,
        "the paper's": ps.LowRank(rank, 8, always_sketch=True),
        f"the paper's{ROWS}": ps.LowRank(rank, 8, always_sketch=True),
        "Deflated h=1, one step": ps.Deflated(fresh, flat),
        "Deflated h=1, two steps": ps.Deflated(fresh, ps.NewtonSchulz(2, "flat")),
        "Deflated h=1, two quintic steps": ps.Deflated(fresh, ps.NewtonSchulz(2, "quintic")),
        "Deflated h=1, two Jordan steps": ps.Deflated(fresh, ps.NewtonSchulz(2, "jordan")),
        "Deflated Kaczmarz h=½, one step": ps.Deflated(sampled, flat),
        "Deflated warm, one step": ps.Deflated(warm, flat),
        "Deflated warm, one step in 16 bits": ps.Deflated(warm, flat, float8=False),
        "Deflated warm, a sixth, one step": ps.Deflated(sixth, flat),
        f"Deflated warm, a sixth, one step{ROWS}": ps.Deflated(sixth, flat),
    }


def wide_maps() -> dict[str, ps.PolarMap]:
    """The maps under test on the matrices of :data:`WIDE`; ℓ is an eighth of 4096 rows."""
    head = ps.LowRank(WIDE_RANK, 8, sketch=ps.Warm(), inner=INNER, always_sketch=True)
    lifted = ps.Deflated(head, ps.NewtonSchulz(1, "flat"))
    sixteen_bits = ps.Deflated(head, ps.NewtonSchulz(1, "flat"), float8=False)
    name = "Deflated warm, ℓ = 512, one step"
    return {
        name: lifted,
        f"{name} in 16 bits": sixteen_bits,
        f"{name}{ROWS}": lifted,
    }


def of_spectrum(spectrum: Callable[[Tensor], Tensor], m: int, n: int, g: torch.Generator) -> Tensor:
    """A random m×n matrix, m ≤ n, with these singular values, float64."""
    k = torch.arange(1, m + 1, dtype=torch.float64)
    U, V = (torch.randn(side, m, generator=g, dtype=torch.float64) for side in (m, n))
    return (torch.linalg.qr(U).Q * spectrum(k)) @ torch.linalg.qr(V).Q.mT


def synthetic(m: int, n: int) -> dict[str, Tensor]:
    """A matrix of every spectrum, and what a batch may have beside them; float64."""
    g = rng.generator("accuracy", m, n)
    made = {name: of_spectrum(spectrum, m, n, g) for name, spectrum in SPECTRA.items()}
    made["rank one"] = of_spectrum(lambda k: (k == 1).double(), m, n, g)
    made["zero"] = torch.zeros(m, n, dtype=torch.float64)
    return made


def turning(m: int, n: int, steps: int) -> list[dict[str, Tensor]]:
    """For every step a matrix of each spectrum, a tenth of which is drawn anew; float64."""
    g = rng.generator("accuracy", "turning", m, n)
    bases = {name: of_spectrum(spectrum, m, n, g) for name, spectrum in SPECTRA.items()}
    return [
        {name: 0.9 * M + 0.1 * of_spectrum(SPECTRA[name], m, n, g) for name, M in bases.items()}
        for _ in range(steps)
    ]


def recorded(device: torch.device, steps: int, width: int) -> list[dict[str, Tensor]]:
    """Momentum of a GPT with zero-initialized projections: a dict for each step."""
    tokens, _, vocabulary = corpus_tokens()
    text = torch.from_numpy(tokens.astype("int64")).to(device)
    config = GPTConfig(vocab_size=len(vocabulary), width=width, layers=2, heads=4, context=128)
    model = GPT(config, rng.generator("accuracy", "init")).to(device)
    muon = ps.Muon(
        model.blocks.named_parameters(), lr=0.02, polar=ps.NewtonSchulz(5, "quintic"), fused=False
    )
    others = torch.optim.AdamW([*model.embedding.parameters(), *model.head.parameters()], lr=3e-3)
    history: list[dict[str, Tensor]] = []

    def keep(bucket: Observed) -> None:
        while len(history) <= bucket.step:
            history.append({})
        history[bucket.step] |= dict(zip(bucket.names, bucket.M.clone(), strict=True))

    muon.register_polar_hook(keep)
    where = rng.generator("accuracy", "batches")
    for _ in range(steps):
        starts = torch.randint(len(text) - config.context - 1, (16, 1), generator=where)
        window = text[(starts + torch.arange(config.context + 1)).to(device)]
        logits = model(window[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        for each in (muon, others):
            each.step()
            each.zero_grad()
    return history


def applied(
    name: str, polar: ps.PolarMap, matrices: Sequence[dict[str, Tensor]], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """T at each step of a map by its name, as the difference of the parameters before and after it."""
    transform = ps.NormalizedRows() if name.endswith(ROWS) else None
    X = {
        name: torch.nn.Parameter(torch.zeros_like(M, dtype=torch.float32, device=device))
        for name, M in matrices[0].items()
    }
    muon = ps.Muon(
        X.items(), lr=1.0, momentum=0.0, shape_scale="none", polar=polar, transform=transform
    )
    for gradients in matrices:
        for name, parameter in X.items():
            parameter.data.zero_()
            parameter.grad = gradients[name].to(device, torch.float32)
        muon.step()
        yield {name: -parameter.detach() for name, parameter in X.items()}


class Case:
    """A matrix, and γ of Algorithm 1 on it in float64."""

    def __init__(self, M: Tensor, rank: int, device: torch.device) -> None:
        # The matrix as the optimizer gets it, so that its rounding to float32 is not counted.
        self.M = M.to(device, torch.float32).double()
        self.nuclear = torch.linalg.svdvals(self.M).sum()
        self.reference = float(self._gamma(ps.LowRank(rank, 8, always_sketch=True)(self.M)))

    def _gamma(self, T: Tensor) -> Tensor:
        return 1 - (self.M * T).sum() / self.nuclear

    def measure(self, T: Tensor) -> tuple[float, float, float]:
        """γ, Δγ and ν of an update T."""
        assert bool(torch.isfinite(T).all()), "not finite"
        if not self.nuclear > 0:
            assert not T.any(), "T(0) is not 0"
            return 0.0, 0.0, 0.0
        T = T.double()
        gamma = float(self._gamma(T))
        gram = T @ T.mT if T.shape[0] <= T.shape[1] else T.mT @ T
        norm = float(torch.linalg.eigvalsh(gram)[-1].clamp_min(0).sqrt())
        return gamma, gamma - self.reference, max(norm - 1, 0.0)


Row = dict[str, Any]


def report(what: str, name: str, measured: Sequence[tuple[float, float, float]]) -> Row:
    """Print and return the median and the largest γ, the largest Δγ and the largest ν of one map."""
    gamma, delta, nu = zip(*measured, strict=True)
    result = {
        "gamma_median": statistics.median(gamma),
        "gamma_largest": max(gamma),
        "delta_gamma": max(delta),
        "nu": max(nu),
    }
    median, largest, apart, nu = result.values()
    told = f"γ {median:8.4f} {largest:8.4f}   Δγ {apart:8.4f}   ν {nu:.4f}"
    print(f"  {what:34} {name:50} {told}", flush=True)
    return {"variant": name, "config": {"matrices": what}, "result": result}


def report_synthetic(
    m: int, n: int, rank: int, tested: dict[str, ps.PolarMap], device: torch.device
) -> Iterator[Row]:
    """What maps do to matrices of every spectrum, at the first step and the third."""
    matrices = synthetic(m, n)
    cases = {name: Case(M, rank, device) for name, M in matrices.items()}
    for name, polar in tested.items():
        first, _, third = applied(name, polar, [matrices] * 3, device)
        for what, case in cases.items():
            found = [case.measure(T[what]) for T in (first, third)]
            yield report(f"{what}, {m}×{n}", name, found)


def main() -> None:
    """Print the table; an update that is not finite, or not zero for a zero gradient, is an error."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small matrices and few steps")
    parser.add_argument("--json", type=Path, help="append what was measured to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    print(machine(device))
    line: Row = {"kind": "accuracy", "study": "step-cost", "part": f"{device.type}-accuracy"}
    line["environment"] = {"machine": machine(device)}
    for row in rows(device, quick=options.quick):
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | row, ensure_ascii=False) + "\n")


def rows(device: torch.device, *, quick: bool) -> Iterator[Row]:
    """What every map does to all matrices, printed as it is measured."""
    short, rank, steps, width = (128, 32, 3, 256) if quick else (768, 200, 40, 512)
    for m, n in ((short, short), (short, 4 * short)):
        yield from report_synthetic(m, n, rank, maps(rank, short), device)
    if device.type == "cuda" and not quick:
        for side in WIDE:
            yield from report_synthetic(side, side, WIDE_RANK, wide_maps(), device)
    followed = turning(short, 2 * short, steps=6)
    turned = [{name: Case(M, rank, device) for name, M in each.items()} for each in followed]
    made = maps(rank, short)
    for name in carrying(made):
        updates = list(applied(name, made[name], followed, device))
        for what in SPECTRA:
            measured = [
                case[what].measure(T[what]) for case, T in zip(turned, updates, strict=True)
            ]
            yield report(f"{what}, turning", name, measured[1:])
    # Steps in eight bits begin at 512 rows.
    history = recorded(device, steps, width)
    looked_at = [step for step in range(len(history)) if step < 8 or step % 8 in (0, 7)]
    momentum = {
        step: {name: Case(M, width // 4, device) for name, M in history[step].items()}
        for step in looked_at
    }
    for name, polar in maps(width // 4, width).items():
        found = [
            case.measure(T[key])
            for step, T in enumerate(applied(name, polar, history, device))
            for key, case in momentum.get(step, {}).items()
        ]
        yield report(f"recorded momentum, {len(found)} matrices", name, found)


if __name__ == "__main__":
    main()
