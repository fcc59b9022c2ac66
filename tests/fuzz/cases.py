"""What a case of the fuzzer is: everything random in it follows from the seed and its number."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import torch

from polarstep import rng

__all__ = ["Choices", "Outcome", "Violation"]


class Choices:
    """The random choices of one case."""

    def __init__(self, *key: int | str) -> None:
        self.key = key
        self.random = random.Random(rng.key_to_seed("fuzz", *key))
        self.torch = rng.generator("fuzz", *key)

    def one_of(self, *options):
        """One of the options, each as likely as the others."""
        return self.random.choice(options)

    def whether(self, probability: float) -> bool:
        """True with this probability."""
        return self.random.random() < probability

    def normal(self, *shape: int) -> torch.Tensor:
        """Independent normal numbers, float64."""
        return torch.randn(*shape, generator=self.torch, dtype=torch.float64)


@dataclass(frozen=True)
class Violation:
    """A promise that was not kept, and a program of a few lines that shows it."""

    promise: str
    found: str
    program: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.found}\n\n{self.program.strip()}\n"


@dataclass
class Outcome:
    """What a case tried, by name, and what it found."""

    tried: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
