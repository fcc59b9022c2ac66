"""The one table of all solvers and sketches. A new one is a row here, and the shared tests run over it.

Solvers are sized for small matrices: ℓ = 6 in the sketched ones, so that 12×20 is really sketched.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from polarstep import (
    Auto,
    Deflated,
    Exact,
    Gaussian,
    Kaczmarz,
    LowRank,
    NewtonSchulz,
    PolarMap,
    Sketch,
)
from polarstep.maps import Draw, Finder, MapState, Polar, Warm, coefficients
from polarstep.maps.base import Factors, one_step


@dataclass(frozen=True)
class Divided(PolarMap):
    """T = M/‖M‖_F, an inner map without products."""

    def step(self, M: Tensor, carry: MapState, draw: Draw) -> tuple[Polar, MapState]:
        return Polar(M, M / torch.linalg.matrix_norm(M, keepdim=True)), carry

    def flops(self, m: int, n: int) -> int:
        return 0


@dataclass(frozen=True)
class Solver:
    """A polar map and which of the promises it makes."""

    name: str
    map: PolarMap
    bounded: bool = True  # ‖T‖_op ≤ 1, as the paper's polynomials promise
    scale_invariant: bool = True  # T(cM) = T(M)

    @property
    def random(self) -> bool:
        """Whether it draws a sketch."""
        return self.map.traits.draws != "never"


def _low_rank(power: float = 1, **options: object) -> LowRank:
    options = {"inner": NewtonSchulz(7, "quintic"), "always_sketch": True} | options
    return LowRank(4, 2, power, **options)  # type: ignore[arg-type]


def _deflated(steps: int, coefficients: Any, **options: Any) -> Deflated:
    rest = NewtonSchulz(steps, coefficients)
    return Deflated(_low_rank(**options), rest, full=NewtonSchulz(7, "quintic"))


HEADS: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "kaczmarz": {"sketch": Kaczmarz()},
    "warm": {"sketch": Warm()},
}
CUBIC_THEN_QUINTIC = ((1.5, -0.5), (1.875, -1.25, 0.375))
PAPER = ("cubic", "quintic")
OVERSHOOTING = tuple(name for name in coefficients.names() if name not in PAPER)

SKETCHES: dict[str, Sketch] = {
    "gaussian": Gaussian(),
    "kaczmarz": Kaczmarz(),
    "kaczmarz filled": Kaczmarz(fill=True),
}
FINDERS: dict[str, Finder] = {"warm": Warm()}

SOLVERS: list[Solver] = [
    Solver("exact", Exact()),
    *(
        Solver(f"newton-schulz {name} {form} {delta}", NewtonSchulz(7, name, delta, form=form))
        for name, form, delta in product(
            PAPER, ("plain", "gram"), ("frobenius", "spectral", "operator")
        )
    ),
    *(
        Solver(f"newton-schulz {name} {form}", NewtonSchulz(6, name, form=form), bounded=False)
        for name, form in product(OVERSHOOTING, ("plain", "gram"))
    ),
    Solver("newton-schulz custom", NewtonSchulz(9, ((1.875, -1.25, 0.375), (1.5, -0.5)))),
    Solver("newton-schulz number", NewtonSchulz(7, "quintic", delta=8.0), scale_invariant=False),
    *(
        Solver(f"low-rank {name} h={power:g}", _low_rank(power, sketch=sketch))
        for (name, sketch), power in product((SKETCHES | FINDERS).items(), (0, 0.5, 1, 2))
        if not (name == "warm" and power == 0.5)  # a warm start lies on the long side
    ),
    *(
        Solver(f"low-rank {orth} h={power:g}", _low_rank(power, orth=orth))
        for orth, power in product(("householder", "cholesky", "products"), (0.5, 1))
    ),
    Solver("low-rank of exact", _low_rank(inner=Exact())),
    Solver("low-rank of spectral", _low_rank(inner=NewtonSchulz(9, "cubic", "spectral"))),
    Solver(
        "low-rank kaczmarz of operator",
        _low_rank(sketch=Kaczmarz(), inner=NewtonSchulz(7, "quintic", delta="operator")),
    ),
    Solver("low-rank of plain form", _low_rank(inner=NewtonSchulz(7, "quintic", form="plain"))),
    Solver("low-rank of jordan", _low_rank(inner=NewtonSchulz(5, "jordan")), bounded=False),
    Solver("low-rank in full space", LowRank(200)),
    Solver(
        "low-rank of number",
        _low_rank(inner=NewtonSchulz(7, "quintic", delta=8.0)),
        scale_invariant=False,
    ),
    # A cubic brings singular values up to √3 to [0, 1], and deflated steps begin at 1.17 or below.
    # tests/maps/test_deflated.py has the bounds of the others.
    *(
        Solver(f"deflated cubic {name}", _deflated(2, CUBIC_THEN_QUINTIC, **options))
        for name, options in HEADS.items()
    ),
    Solver("deflated quintic gaussian", _deflated(2, "quintic")),
    *(
        Solver(f"deflated {rest} {name}", _deflated(*steps, **options), bounded=False)
        for rest, steps in {"flat": (1, "flat"), "jordan": (2, "jordan")}.items()
        for name, options in HEADS.items()
    ),
    *(
        Solver(f"auto {budget}", Auto(budget), bounded=False)
        for budget in ("full", "balanced", "cheap")
    ),
]


def over_solvers(**promises: bool) -> pytest.MarkDecorator:
    """Run a test for every solver, or for those that make the given promises."""
    rows = [
        s for s in SOLVERS if all(getattr(s, name) == is_made for name, is_made in promises.items())
    ]
    return pytest.mark.parametrize("solver", rows, ids=lambda s: s.name)


def over_sketches() -> pytest.MarkDecorator:
    """Run a test for every sketch."""
    return pytest.mark.parametrize("sketch", SKETCHES.values(), ids=SKETCHES.keys())


def factored(
    polar: PolarMap, M: Tensor, generator: torch.Generator | None = None
) -> tuple[Tensor, Factors]:
    """T(M) and the factors of a sketched map."""
    step = one_step(polar, M, generator)
    assert step is not None
    assert step.factors is not None
    return step.dense.to(M.dtype).reshape(M.shape), step.factors
