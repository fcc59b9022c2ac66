"""Perplexity over cost: polar maps and optimizers of other libraries, against full space.

Each at the best of its rates, chosen on seed 3 over all steps. A run takes half a minute on an H200::

    polarstep study src/polarstep_lab/studies/frontier.py --set data.train='data/wiki_train_*.bin' \\
        --set data.val='data/wiki_val_*.bin'
"""

from polarstep_lab.study import Rates, Study, Variant

RANK, POWER = "optimizer.polar.rank", "optimizer.polar.power"
WARM_UP = {"schedule.warmup": 150}
HEAD = {
    "optimizer.polar.solver": "polar-express-sketch",
    "optimizer.polar.steps": 4,
    "optimizer.polar.oversample": 8,
}
ADAMW = (0.00025, 0.0005, 0.001, 0.002)

study = Study(
    name="frontier",
    recipe="nanogpt-25m",
    against="AdamW, warm-up",
    variants=[
        Variant("full space", "muon-polar-express"),
        Variant("full space, normalized rows", "muon-polar-express-rows"),
        Variant("rank 200, h = 0", "rand-muon", {**HEAD, RANK: 200, POWER: 0}),
        Variant("rank 200, seven quintic steps (the paper's)", "rand-muon"),
        Variant("rank 120, rest lifted", "deflated", {RANK: 120}),
        Variant("rank 120, rest lifted, normalized rows", "deflated-rows", {RANK: 120}),
        Variant("auto", "auto"),
        Variant("muon_for (default)", "default", rates=(0.02,)),
        Variant("AdamW, warm-up", "adamw", WARM_UP, rates=ADAMW),
        Variant("torch.optim.Muon", "peer:torch-muon"),
        Variant("NorMuon of dion", "peer:dion-normuon"),
        Variant("SOAP", "peer:soap", WARM_UP, rates=ADAMW),
    ],
    rates=Rates((0.01, 0.014, 0.02), seed=3),
    seeds=(0, 1, 2),
)
