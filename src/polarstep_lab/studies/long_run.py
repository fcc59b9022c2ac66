"""The paper's matrices in 11 layers over 72.7 million tokens: its methods, ours, and other libraries'.

Each at the best of its rates, chosen on seed 3 over all steps. A run takes 2.3 minutes on an H200.
"""

from polarstep_lab.study import Rates, Study, Variant

ADAMW, SOAP = (0.0003, 0.00055, 0.001), (0.0003, 0.00055, 0.001)
WARM_UP = {"schedule.warmup": 100}

study = Study(
    name="long-run",
    recipe="nanogpt-wiki",
    against="AdamW, warm-up",
    variants=[
        Variant("Muon, seven quintic steps (the paper's)", "muon"),
        Variant("Muon, Polyak (the paper's)", "muon-polyak"),
        Variant("randomized, Gaussian (the paper's)", "rand-muon"),
        Variant("randomized, Kaczmarz (the paper's)", "rand-muon-kaczmarz"),
        Variant("randomized, Polyak (the paper's)", "rand-muon-polyak"),
        Variant("SGD (the paper's)", "sgd", rates=(0.03, 0.1, 0.18)),
        Variant("AdamW", "adamw", rates=ADAMW),
        Variant("AdamW, warm-up", "adamw", WARM_UP, rates=ADAMW),
        Variant("full space", "muon-polar-express"),
        Variant("full space, normalized rows", "muon-polar-express-rows"),
        Variant("rank 120, rest lifted", "deflated", {"optimizer.polar.rank": 120}),
        Variant("auto, normalized rows", "auto-rows"),
        Variant("muon_for (default)", "default", rates=(0.02,)),
        Variant("torch.optim.Muon", "peer:torch-muon"),
        Variant("NorMuon of dion", "peer:dion-normuon"),
        Variant("SOAP", "peer:soap", {"optimizer.embedding_lr": 0.3, **WARM_UP}, rates=SOAP),
    ],
    rates=Rates((0.0097, 0.018, 0.032), seed=3),
    seeds=(0, 1, 2),
    overrides={"runtime.keep_checkpoint": False},
)
