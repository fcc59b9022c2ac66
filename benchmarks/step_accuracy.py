"""How inexact is the fast step, in the precision in which it is timed?

    python benchmarks/step_accuracy.py                 # on the GPU if there is one
    python benchmarks/step_accuracy.py --quick         # small matrices, to see that it works

For every matrix: γ and ν of the map as it runs on this device, and γ of Algorithm 1 in float64 with
the same rank and one power iteration. The matrices have four spectra, or are a batch that mixes
zero, rank-one and full-rank matrices, or the momentum of a real GPT, recorded at every step from
the first on, as warm sketches and kept bases need it. Warm sketches are also followed on matrices
of the four spectra, a tenth of which is new at every step. Δγ is the γ of the fast map minus that
of Algorithm 1; it is negative where the fast map is better.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import polarstep as ps
from polarstep import rng
from polarstep.polar import Carry, Draw
from polarstep_lab.data.corpus import corpus_tokens
from polarstep_lab.models.gpt import GPT, GPTConfig
from step_cost import INNER
from timing import machine

SPECTRA = {
    "k^-0.5": lambda k: k**-0.5,
    "k^-1": lambda k: 1 / k,
    "flat": torch.ones_like,
    "low rank and noise": lambda k: torch.where(k <= 16, 1.0, 1e-3),
}


def maps(rank: int) -> dict[str, ps.LowRank | ps.Deflated]:
    """The maps under test, all with ℓ = rank + 8."""
    common = {"inner": INNER, "always_sketch": True}
    warm, fresh = (
        ps.LowRank(rank, 8, sketch=sketch, **common) for sketch in (ps.Warm(), ps.Gaussian())
    )
    return {
        "warm": warm,
        "Gaussian h=0": ps.LowRank(rank, 8, power=0, **common),
        "Gaussian h=0, kept 4 steps": ps.LowRank(rank, 8, power=0, keep=4, **common),
        "Gaussian h=½": ps.LowRank(rank, 8, power=0.5, **common),
        "Kaczmarz h=½": ps.LowRank(rank, 8, power=0.5, sketch=ps.Kaczmarz(), **common),
        "the paper's": ps.LowRank(rank, 8, always_sketch=True),
        "Deflated h=1, scaled": ps.Deflated(fresh),
        "Deflated h=1, one step": ps.Deflated(fresh, ps.NewtonSchulz(1, "flat")),
        "Deflated warm, one step": ps.Deflated(warm, ps.NewtonSchulz(1, "flat")),
    }


def synthetic(m: int, n: int) -> Iterator[tuple[str, Tensor]]:
    """Batches of matrices, float64."""
    g = rng.generator("accuracy", m, n)
    U = torch.linalg.qr(torch.randn(m, m, generator=g, dtype=torch.float64)).Q
    V = torch.linalg.qr(torch.randn(n, m, generator=g, dtype=torch.float64)).Q
    k = torch.arange(1, m + 1, dtype=torch.float64)
    made = {name: (U * spectrum(k)) @ V.mT for name, spectrum in SPECTRA.items()}
    for name, M in made.items():
        yield name, M[None]
    rank_one = U[:, :1] @ V[:, :1].mT
    yield "mixed batch", torch.stack([torch.zeros_like(rank_one), rank_one, made["k^-1"]])


def turning(m: int, n: int, steps: int) -> Iterator[tuple[str, list[Tensor]]]:
    """For each spectrum, a matrix at every step, a tenth of which each step draws anew; float64."""
    g = rng.generator("accuracy", "turning", m, n)
    k = torch.arange(1, m + 1, dtype=torch.float64)

    def drawn(spectrum: Callable[[Tensor], Tensor]) -> Tensor:
        U, V = (torch.randn(side, m, generator=g, dtype=torch.float64) for side in (m, n))
        return (torch.linalg.qr(U).Q * spectrum(k)) @ torch.linalg.qr(V).Q.mT

    for name, spectrum in SPECTRA.items():
        M = drawn(spectrum)
        yield name, [0.9 * M + 0.1 * drawn(spectrum) for _ in range(steps)]


def recorded(device: torch.device, steps: int) -> list[dict[str, Tensor]]:
    """Momentum of a 256-wide GPT with zero-initialized projections: a dict for each step."""
    tokens, _, vocabulary = corpus_tokens()
    text = torch.from_numpy(tokens.astype("int64")).to(device)
    config = GPTConfig(vocab_size=len(vocabulary), width=256, layers=3, heads=4, context=128)
    model = GPT(config, rng.generator("accuracy", "init")).to(device)
    muon = ps.Muon(model.blocks.named_parameters(), lr=0.02, polar=ps.NewtonSchulz(5), fused=False)
    others = torch.optim.AdamW([*model.embedding.parameters(), *model.head.parameters()], lr=3e-3)
    history: list[dict[str, Tensor]] = []

    def keep(bucket) -> None:
        while len(history) <= bucket.step:
            history.append({})
        history[bucket.step] |= dict(zip(bucket.names, bucket.M.clone(), strict=True))

    muon.register_polar_hook(keep)
    where = rng.generator("accuracy", "batches")
    for _ in range(steps):
        starts = torch.randint(len(text) - config.context - 1, (16, 1), generator=where)
        window = text[(starts + torch.arange(config.context + 1)).to(device)]
        logits = model(window[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()).backward()
        for each in (muon, others):
            each.step()
            each.zero_grad()
    return history


class Case:
    """A batch of matrices and γ of Algorithm 1 in float64 on each."""

    def __init__(self, M: Tensor, rank: int) -> None:
        self.M = M.double().cpu()
        self.alive = self.M.abs().amax((-2, -1)) > 0
        self.nuclear = torch.linalg.svdvals(self.M[self.alive]).sum(-1)
        self.gamma = self._gamma(ps.LowRank(rank, 8, always_sketch=True)(self.M))

    def _gamma(self, T: Tensor) -> Tensor:
        return 1 - (self.M * T)[self.alive].sum((-2, -1)) / self.nuclear

    def measure(self, T: Tensor) -> tuple[float, float]:
        """Δγ and ν, the worst of the batch."""
        T = T.double().cpu()
        assert bool(torch.isfinite(T).all()), "not finite"
        assert bool((T[~self.alive] == 0).all()), "T(0) is not 0"
        if not self.alive.any():
            return 0.0, 0.0
        norms = torch.linalg.matrix_norm(T[self.alive], 2)
        delta = (self._gamma(T) - self.gamma).max()
        return float(delta), float((norms - 1).clamp_min(0).max())


def stepped(
    polar: ps.LowRank | ps.Deflated, M: Tensor, carry: Carry, step: int, *key: int | str
) -> tuple[Tensor, Carry]:
    """T of M at an optimizer step that continues from ``carry``, and the next carry.

    The key of the random numbers is ``key`` followed by the map's ``numbers_at``.
    """
    drawn = polar.numbers_at(step, resumed=bool(carry))
    numbers = None
    if drawn is not None:
        g = rng.generator(*key, *drawn, device=M.device)
        numbers = polar.draw(*M.shape[-2:], g)
    made, carry = polar.step(M, carry, Draw(numbers))
    return made.dense, carry


def main() -> None:
    """Print the table, and fail if anything leaves its bounds."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small matrices and few steps")
    options = parser.parse_args()
    device = torch.device(options.device)
    short, rank, steps = (128, 32, 3) if options.quick else (512, 128, 40)
    print(machine(device))
    worst: dict[str, list[float]] = {}

    def report(what: str, name: str, delta: float, nu: float) -> None:
        print(f"  {what:34} {name:26} Δγ {delta:8.4f}   ν {nu:.4f}", flush=True)
        worst.setdefault(name, []).append(delta)
        worst.setdefault(f"{name} ν", []).append(nu)

    for m, n in ((short, short), (short, 4 * short)):
        for what, M in synthetic(m, n):
            case = Case(M, rank)
            for name, polar in maps(rank).items():
                if isinstance(polar, ps.LowRank) and polar.keep > 1:
                    continue  # its first step makes a basis of its own, as without keep
                T = polar(M.float().to(device), generator=rng.generator("a", device=device))
                report(f"{what}, {m}×{n}", name, *case.measure(T))
    for what, matrices in turning(short, 2 * short, steps=5):
        polar, carry, followed = maps(rank)["warm"], Carry(), []
        for step, M in enumerate(matrices):
            M = M[None]
            T, carry = stepped(polar, M.float().to(device), carry, step, "a")
            if step > 0:
                followed.append(Case(M, rank).measure(T))
        report(f"{what}, turning", "warm", *(max(each) for each in zip(*followed, strict=True)))
    history = recorded(device, steps)
    # These include steps with the oldest bases; a kept basis is made at every fourth step.
    measured = [step for step in range(len(history)) if step < 8 or step % 8 in (0, 7)]
    cases = {
        (step, key): Case(M[None], 64) for step in measured for key, M in history[step].items()
    }
    for name, polar in maps(64).items():
        delta, nu = [], []
        carries: dict[str, Carry] = {}  # the last step's carry for each parameter
        for step, matrices in enumerate(history):
            for key, M in matrices.items():
                known = carries.get(key, Carry())
                T, carries[key] = stepped(polar, M[None], known, step, "a", key)
                if (step, key) in cases:
                    one = cases[step, key].measure(T)
                    delta.append(one[0])
                    nu.append(one[1])
        report(f"recorded momentum, {len(delta)} matrices", name, max(delta), max(nu))
    print("worst:", {name: round(max(values), 4) for name, values in worst.items()})


if __name__ == "__main__":
    main()
