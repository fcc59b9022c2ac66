"""The sets of matrices on which steps are timed, each with the size of the sketch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Workload(NamedTuple):
    """Matrices, and the rank and oversampling of the sketches that are timed on them."""

    shapes: list[tuple[int, int, int]]
    """How many matrices there are of each shape: (count, m, n)."""
    rank: int
    oversample: int

    @property
    def width(self) -> int:
        """ℓ, the number of columns of the sketch."""
        return self.rank + self.oversample


WORKLOADS = {
    "nanoGPT": Workload([(40, 768, 768), (24, 3072, 768)], 200, 8),
    "8B layer": Workload([(2, 4096, 4096), (3, 14336, 4096)], 248, 8),
    "CIFAR-10": Workload([(1, 64, 216), (1, 64, 576), (1, 256, 576), (3, 256, 2304)], 128, 10),
}
# The hidden matrices of GPTs of 12 layers between the widths of the table, where the estimate of
# "auto" goes from full space to a sketch. Measured where --workload names them.
BETWEEN = {
    f"width {width}": Workload([(48, width, width), (24, 4 * width, width)], width // 4 - 8, 8)
    for width in (384, 512, 576, 640, 704)
}
# Ten columns more than the rank, the default of LowRank(200).
ON_A_CPU = {
    "nanoGPT": Workload([(4, 768, 768), (2, 3072, 768)], 200, 10),
    "one of each": Workload([(1, 768, 768), (1, 3072, 768)], 200, 10),
    "768×768": Workload([(1, 768, 768)], 200, 10),
    "3072×768": Workload([(1, 3072, 768)], 200, 10),
    "CIFAR-10": WORKLOADS["CIFAR-10"],
}
QUICK = {"small": Workload([(3, 256, 256), (2, 384, 128)], 24, 8)}


def parameters(shapes: list[tuple[int, int, int]], device: torch.device) -> list[Tensor]:
    """Random parameters of the given (count, m, n), with random gradients."""
    params: list[Tensor] = []
    for count, m, n in shapes:
        for _ in range(count):
            p = torch.nn.Parameter(torch.randn(m, n, device=device) * 0.02)
            p.grad = torch.randn_like(p)
            params.append(p)
    return params
