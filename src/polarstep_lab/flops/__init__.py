"""What an optimizer step costs: formulas for one matrix, and the ledger of Table 2.

Conventions and the comparison with the paper's figures are in docs/flops.md.
"""

from __future__ import annotations

from polarstep.flops import (
    gaussian_sketch,
    gram_newton_schulz,
    kaczmarz_sketch,
    low_rank,
    low_rank_parts,
    matmul,
    newton_schulz,
    normalization,
    power_products,
    qr,
)
from polarstep_lab.flops.ledger import (
    METHODS,
    TABLE_2,
    gflops,
    ledger,
    markdown,
    muon_ledger,
    relative_difference,
)
from polarstep_lab.flops.workload import (
    ADAMW,
    ADAMW_DECAY,
    CIFAR10,
    EIGHT_B,
    NANOGPT,
    SGD_NESTEROV,
    ElementwiseRule,
    Workload,
)

__all__ = [
    "ADAMW",
    "ADAMW_DECAY",
    "CIFAR10",
    "EIGHT_B",
    "METHODS",
    "NANOGPT",
    "SGD_NESTEROV",
    "TABLE_2",
    "ElementwiseRule",
    "Workload",
    "gaussian_sketch",
    "gflops",
    "gram_newton_schulz",
    "kaczmarz_sketch",
    "ledger",
    "low_rank",
    "low_rank_parts",
    "markdown",
    "matmul",
    "muon_ledger",
    "newton_schulz",
    "normalization",
    "power_products",
    "qr",
    "relative_difference",
]
