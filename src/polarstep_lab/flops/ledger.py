"""The ledger of an optimizer step: what each method of Table 2 spends, item by item, and what ours do.

A ledger maps items ("momentum", "lift QZ", …) to FLOPs per
step, summed over all parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch

import polarstep as ps
from polarstep import flops as formulas
from polarstep_lab import paper
from polarstep_lab.flops.workload import SGD_NESTEROV, Workload

__all__ = [
    "METHODS",
    "OURS",
    "TABLE_2",
    "gflops",
    "ledger",
    "markdown",
    "muon_ledger",
    "percent",
    "relative_difference",
]

Ledger = dict[str, float]
PolarCost = Callable[[Workload, int, int], dict[str, int]]
SketchCost = Callable[[int, int, int], int]

# Per parameter. C ← βC + G; Nesterov also forms M = βC + G. The update is X ← X − ηT.
_POLYAK, _NESTEROV, _UPDATE = 2, 4, 2


def _full_space(workload: Workload, m: int, n: int) -> dict[str, int]:
    """Newton–Schulz on M itself."""
    return {
        "normalization": formulas.normalization(m, n),
        "polynomial steps": formulas.newton_schulz(m, n, workload.steps),
    }


def _randomized(workload: Workload, m: int, n: int, *, sketch: SketchCost) -> dict[str, int]:
    """Algorithms 1 and 2: what is normalized is B, not M, and ℓ is not clipped to min(m, n)."""
    ell = workload.width
    k = min(m, ell)
    inner = formulas.newton_schulz(k, n, workload.steps)
    parts = formulas.low_rank_parts(
        m, n, ell, workload.power, inner, sketch_flops=sketch(m, n, ell)
    )
    return {"normalization": formulas.normalization(k, n), **parts}


def _deflated(workload: Workload, m: int, n: int) -> dict[str, int]:
    """:class:`polarstep.Deflated` with a Gaussian head: Algorithm 1 on the short side, and the rest.

    A sketch that is wider than all matrices is no sketch, and full space is charged.
    """
    if not workload.sketched:
        return _full_space(workload, m, n)
    d0, d1 = min(m, n), max(m, n)
    head = _randomized(workload, d0, d1, sketch=formulas.gaussian_sketch)
    # Degree 17 by three squarings, as NewtonSchulz(1, "flat").
    steps = formulas.newton_schulz(d0, d1, 1, 17, products=3)
    return head | formulas.deflation_parts(d0, d1, steps)


def _chosen_by_auto(workload: Workload, m: int, n: int) -> dict[str, int]:
    """The map that :class:`polarstep.Auto` takes on a GPU, by its own count; ℓ is not the workload's."""
    polar = ps.Auto().on(m, n, torch.device("cuda"))
    return {f"map of auto ({type(polar).__name__})": polar.flops(m, n)}


def _muon(workload: Workload, *, momentum: int, polar: PolarCost) -> Ledger:
    """The ledger of Muon on the matrices and of its companion on all other parameters."""
    items: Ledger = {"momentum": momentum * workload.muon_parameters}
    for (m, n), count in workload.matrices:
        for item, flops in polar(workload, m, n).items():
            items[item] = items.get(item, 0) + count * flops
    if workload.extra:
        items["extra"] = workload.extra * workload.muon_parameters
    items["update"] = _UPDATE * workload.muon_parameters
    companion = workload.companion.flops * workload.elementwise / workload.companion_every
    items["element-wise"] = companion
    return items


_SKETCHES: dict[str | None, PolarCost] = {
    None: _full_space,
    "gaussian": partial(_randomized, sketch=formulas.gaussian_sketch),
    "kaczmarz": partial(_randomized, sketch=formulas.kaczmarz_sketch),
}


def muon_ledger(
    workload: Workload,
    *,
    nesterov: bool,
    sketch: str | None = None,
    polar: PolarCost | None = None,
) -> Ledger:
    """Muon's ledger with either momentum, in full space (``None``) or with a sketch.

    A sketch wider than some matrices is charged for them as in Table 2; one wider than all of them
    is no sketch, and full space is charged. ``polar`` is the cost of a map that is neither.
    """
    polar = polar or _SKETCHES[sketch if workload.sketched else None]
    return _muon(workload, momentum=_NESTEROV if nesterov else _POLYAK, polar=polar)


OURS: dict[str, PolarCost] = {
    "Deflated Muon (one flat step)": _deflated,
    "Auto Muon, on a GPU": _chosen_by_auto,
}
"""Rows that are not in Table 2, with Nesterov momentum; the first has the workload's (s, p, h, q)."""

METHODS = tuple(method.name for method in paper.METHODS)
"""The rows of Table 2, in its order and by its names."""

TABLE_2: dict[str, dict[str, float]] = {
    benchmark: {name: row.gflops for name, row in rows.items() if row.gflops is not None}
    for benchmark, rows in paper.TABLE_2.items()
}
"""The paper's own GFLOPs per step, by workload and row."""


def ledger(workload: Workload, method: str) -> Ledger:
    """FLOPs per step of a method of Table 2 or of ours, by item."""
    if method in OURS:
        return _muon(workload, momentum=_NESTEROV, polar=OURS[method])
    row = next((row for row in paper.METHODS if row.name == method), None)
    if row is None:
        known = ", ".join(map(repr, (*METHODS, *OURS)))
        raise ValueError(f"method {method!r}: expected one of {known}")
    if row.algorithm == "muon":
        return muon_ledger(workload, nesterov=row.nesterov, sketch=row.sketch)
    rule = workload.adamw if row.algorithm == "adamw" else SGD_NESTEROV
    return {"element-wise": rule.flops * workload.parameters}


def gflops(workload: Workload, methods: Iterable[str] = METHODS) -> dict[str, float]:
    """GFLOPs (10⁹) per step of ``methods``, those of Table 2 unless given."""
    return {method: sum(ledger(workload, method).values()) / 1e9 for method in methods}


def relative_difference(workload: Workload, method: str) -> float | None:
    """Our figure against the paper's, ours/theirs − 1; ``None`` for a workload not in Table 2."""
    published = TABLE_2.get(workload.name, {}).get(method)
    return None if published is None else gflops(workload)[method] / published - 1


def percent(difference: float) -> str:
    """A relative difference to a millionth, without the sign of a negative zero."""
    return f"{round(difference, 6) + 0.0:+.4%}"


def markdown(workload: Workload) -> str:
    """The workload's rows beside the paper's, as a Markdown table."""
    lines = ["| method | GFLOPs per step | Table 2 | difference |", "|---|---:|---:|---:|"]
    for method, ours in gflops(workload).items():
        published = TABLE_2.get(workload.name, {}).get(method)
        difference = relative_difference(workload, method)
        theirs = "" if published is None else f"{published:.4f}"
        relative = "" if difference is None else percent(difference)
        lines.append(f"| {method} | {ours:.4f} | {theirs} | {relative} |")
    return "\n".join(lines)
