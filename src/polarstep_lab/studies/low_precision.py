"""Parameters in bfloat16 and momentum in fewer bits, against float32; rates fall to zero."""

from polarstep_lab.study import Study, Variant

BFLOAT16 = {"runtime.parameters": "bfloat16"}
COMPENSATED = {**BFLOAT16, "optimizer.rounding": "compensated"}

study = Study(
    name="low-precision",
    recipe="nanogpt-25m",
    against="float32",
    variants=[
        Variant("float32", "muon-polar-express"),
        Variant("bfloat16", "muon-polar-express", BFLOAT16),
        Variant("bfloat16, compensated", "muon-polar-express", COMPENSATED),
        Variant(
            "momentum in bfloat16",
            "muon-polar-express",
            {"optimizer.momentum_dtype": "bfloat16"},
        ),
        Variant("momentum in 8 bits", "muon-polar-express", {"optimizer.momentum_dtype": "int8"}),
        Variant(
            "bfloat16, compensated, momentum in 8 bits",
            "muon-polar-express",
            {**COMPENSATED, "optimizer.momentum_dtype": "int8"},
        ),
    ],
    seeds=(0, 1, 2),
    overrides={"schedule.final": 0.0},
)
