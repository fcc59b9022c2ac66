"""The study of ``polarstep demo``: what people use, and what this package has in its place."""

from __future__ import annotations

from polarstep_lab.methods import METHODS
from polarstep_lab.study import Study, Variant

__all__ = ["DEFAULT", "DEMO"]

DEFAULT = "polarstep (default)"

DEMO = Study(
    name="demo",
    recipe="nanogpt-toy",
    variants=(
        Variant("AdamW", "adamw"),
        Variant("torch.optim.Muon", "peer:torch-muon"),
        Variant(METHODS[5].name, "rand-muon"),
        Variant(DEFAULT, "default"),
    ),
    against="AdamW",
    seeds=(1, 2),  # the rates of the first three were chosen on seed 0
    overrides={"runtime.monitor_every": 20},  # γ and ν of every twentieth step
)
