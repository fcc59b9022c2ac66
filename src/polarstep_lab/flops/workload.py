"""What one optimizer step works on: the two benchmarks of the paper, and anyone's own shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from polarstep.flops import power_products

__all__ = [
    "ADAMW",
    "ADAMW_DECAY",
    "CIFAR10",
    "EIGHT_B",
    "NANOGPT",
    "SGD_NESTEROV",
    "ElementwiseRule",
    "Workload",
    "workload_named",
    "workload_names",
]


@dataclass(frozen=True)
class ElementwiseRule:
    """An optimizer that treats every parameter alike, and its FLOPs per parameter and step."""

    name: str
    flops: int


# C ← βC + g: 2; M = βC + g: 2; x ← x − ηM: 2.
SGD_NESTEROV = ElementwiseRule("SGD (Nesterov)", 6)
# m ← β₁m + (1 − β₁)g: 3; v ← β₂v + (1 − β₂)g²: 4; m/(√v + ε): 3; x ← x − η·: 2.
ADAMW = ElementwiseRule("AdamW", 12)
# The same with weight decay: 2.
ADAMW_DECAY = ElementwiseRule("AdamW with weight decay", 14)


@dataclass(frozen=True)
class Workload:
    """The parameters of a model as an optimizer step sees them, and the paper's settings (s, p, h, q).

    Args:
        name: how tables call it.
        matrices: ``((m, n), count)``: Muon's matrices by shape, as M ∈ ℝ^{m×n}; Algorithm 1 puts its
            basis on the side of m.
        elementwise: how many parameters are not Muon's; may be an average over training.
        rank: s, the target rank of the randomized methods.
        oversample: p; the sketch has ℓ = s + p columns.
        power: h, the number of power iterations.
        steps: q, the number of polynomial steps, in full space too.
        adamw: the rule of the row in which AdamW updates everything.
        companion: the rule that updates the element-wise parameters beside Muon.
        companion_every: on every how many steps it does so.
        extra: FLOPs that the Muon rows spend on each of Muon's parameters besides momentum,
            normalization, polar map and update.
    """

    name: str
    matrices: tuple[tuple[tuple[int, int], int], ...]
    elementwise: float
    rank: int
    oversample: int
    power: float
    steps: int
    adamw: ElementwiseRule = ADAMW
    companion: ElementwiseRule = SGD_NESTEROV
    companion_every: int = 1
    extra: int = 0

    def __post_init__(self) -> None:
        for (m, n), count in self.matrices:
            if min(m, n, count) < 1:
                raise ValueError(
                    f"matrices has {count} of {m}×{n}: expected positive sizes and counts; "
                    "leave out shapes the model does not have"
                )
        if self.rank < 1 or self.oversample < 0 or self.steps < 0:
            raise ValueError(
                f"rank={self.rank}, oversample={self.oversample}, steps={self.steps}: "
                "expected rank ≥ 1, oversample ≥ 0 and steps ≥ 0; the paper takes 200, 10 and 7"
            )
        if self.companion_every < 1:
            raise ValueError(
                f"companion_every={self.companion_every}: expected 1 (every step), 2 (every second "
                "step), …"
            )
        power_products(self.power)

    @classmethod
    def from_shapes(
        cls,
        name: str,
        shapes: Iterable[tuple[int, int]],
        *,
        elementwise: float,
        rank: int,
        oversample: int = 10,
        power: float = 1,
        steps: int = 7,
        adamw: ElementwiseRule = ADAMW,
        companion: ElementwiseRule = ADAMW,
        companion_every: int = 1,
    ) -> Workload:
        """The workload of a model, from one ``(m, n)`` for each of Muon's matrices.

        >>> Workload.from_shapes("mlp", [(8, 4), (2, 8), (8, 4)], elementwise=18, rank=2).matrices
        (((8, 4), 2), ((2, 8), 1))
        """
        return cls(
            name=name,
            matrices=tuple(Counter((int(m), int(n)) for m, n in shapes).items()),
            elementwise=elementwise,
            rank=rank,
            oversample=oversample,
            power=power,
            steps=steps,
            adamw=adamw,
            companion=companion,
            companion_every=companion_every,
        )

    @property
    def width(self) -> int:
        """ℓ = s + p."""
        return self.rank + self.oversample

    @property
    def sketched(self) -> bool:
        """Whether ℓ < min(m, n) for any matrix; where for none, Algorithm 1 is the inner map itself."""
        return any(self.width < min(m, n) for (m, n), _ in self.matrices)

    @property
    def muon_parameters(self) -> int:
        """How many parameters are Muon's."""
        return sum(m * n * count for (m, n), count in self.matrices)

    @property
    def parameters(self) -> float:
        """How many parameters there are."""
        return self.muon_parameters + self.elementwise


# The tables of the authors' nanoGPT (a modded-nanogpt of early 2026): 50,257 tokens padded to a
# multiple of 128; five value embeddings, a hashed bigram embedding of five times the vocabulary and
# the output head, and the token embedding, which is tied to the head until it is split off two thirds
# into the 1450 scheduled steps: it is a parameter of its own in the last 522 of all 1490.
_TABLE = 50_304 * 768
_TABLES = 5 + 5 + 1 + 522 / 1490
_GATES_AND_SCALARS = 1_198

NANOGPT = Workload(
    name="nanogpt",
    matrices=(((768, 768), 40), ((3072, 768), 24)),
    elementwise=_TABLES * _TABLE + _GATES_AND_SCALARS,
    rank=200,
    oversample=10,
    power=1,
    steps=7,
    adamw=ADAMW_DECAY,
    companion=ADAMW_DECAY,
    companion_every=2,
    extra=14,  # read off Table 2, see docs/flops.md
)

CIFAR10 = Workload(
    name="cifar10",
    matrices=(((64, 216), 1), ((64, 576), 1), ((256, 576), 1), ((256, 2304), 3)),
    elementwise=3_736,
    rank=128,
    oversample=10,
    power=2,
    steps=7,
)

# The shapes of an 8B model: 32 layers of width 4096 with 32 query and 8 key heads of 128, three MLP
# matrices of 14,336×4096, and untied tables of 128,256 tokens. Not in the paper.
EIGHT_B = Workload(
    name="8b",
    matrices=(((4096, 4096), 64), ((1024, 4096), 64), ((14336, 4096), 96)),
    elementwise=2 * 128_256 * 4096 + 65 * 4096,
    rank=200,
    oversample=8,
    power=0,
    steps=5,
    companion=ADAMW,
)

_BY_NAME = {workload.name: workload for workload in (NANOGPT, CIFAR10, EIGHT_B)}


def workload_names() -> tuple[str, ...]:
    """The names that :func:`workload_named` knows."""
    return tuple(_BY_NAME)


def workload_named(name: str) -> Workload:
    """The workload of a benchmark of the paper, or ``"8b"``, the shapes of an 8B model."""
    if name not in _BY_NAME:
        raise ValueError(
            f"workload {name!r}: expected one of {', '.join(workload_names())}; for a model of your own "
            "use polarstep_lab.flops.Workload.from_shapes"
        )
    return _BY_NAME[name]
