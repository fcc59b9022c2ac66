"""What an optimizer step costs: formulas, and the ledger of Table 2."""

from __future__ import annotations

from polarstep.flops.formulas import (
    gaussian_sketch,
    gram_newton_schulz,
    kaczmarz_sketch,
    low_rank,
    matmul,
    newton_schulz,
    normalization,
    power_products,
    qr,
)

__all__ = [
    "gaussian_sketch",
    "gram_newton_schulz",
    "kaczmarz_sketch",
    "low_rank",
    "matmul",
    "newton_schulz",
    "normalization",
    "power_products",
    "qr",
]
