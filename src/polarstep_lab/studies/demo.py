"""The study of ``polarstep demo``: what people use, and what this package has in its place."""

from polarstep_lab.methods import DEFAULT
from polarstep_lab.study import Study, Variant

study = Study(
    name="demo",
    recipe="nanogpt-toy",
    variants=(
        Variant("AdamW", "adamw"),
        Variant("torch.optim.Muon", "peer:torch-muon"),
        Variant("Rand Muon (Nes.-Gaussian)", "rand-muon"),
        Variant(DEFAULT.name, "default"),
    ),
    against="AdamW",
    seeds=(1, 2),  # the rates of the first three were chosen on seed 0
    overrides={"runtime.monitor_every": 20},  # γ and ν of every twentieth step
)
