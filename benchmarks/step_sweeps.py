"""How the time of a step grows with the width of the matrices and with the rank of the sketch."""

from __future__ import annotations

import math

import torch

import polarstep as ps
from step_optimizers import INNER
from step_workloads import parameters
from timing import milliseconds

REPEATS = 12


def sweeps(device: torch.device) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of a step on four square matrices, against their width and against ℓ.

    A row has ``x``, the width or ℓ, and a time for each optimizer.
    """
    on_gpu = device.type == "cuda"
    widths = [256, 512, 1024, 2048, 4096, 8192] if on_gpu else [256, 512, 1024, 2048]
    return {"width": _widths(widths, device), "rank": _ranks(4096 if on_gpu else 1024, device)}


def _widths(widths: list[int], device: torch.device) -> list[dict[str, float]]:
    """LowRank with ℓ = width/4, sketched even where full space is cheaper, full space and AdamW."""
    rows = []
    for width in widths:
        params = parameters([(4, width, width)], device)
        row: dict[str, float] = {"x": width}
        for label, polar in (
            ("LowRank, warm", _warm(width // 4)),
            ("full space, PolarExpress 5", ps.NewtonSchulz(5, "polar-express")),
        ):
            muon = ps.Muon(params, lr=1e-5, polar=polar)
            row[label] = milliseconds(muon.step, device, REPEATS)
        adamw = torch.optim.AdamW(params, lr=1e-5, fused=True)
        row["AdamW, fused"] = milliseconds(adamw.step, device, REPEATS)
        rows.append(row)
        print("  width", {k: round(v, 3) for k, v in row.items()}, flush=True)
    return rows


def _ranks(width: int, device: torch.device) -> list[dict[str, float]]:
    """LowRank with ℓ from 1/64 to 1/2 of one width, sketched even where full space is cheaper."""
    params = parameters([(4, width, width)], device)
    rows = []
    for ell in (width // part for part in (64, 32, 16, 8, 4, 2)):
        ms = milliseconds(ps.Muon(params, lr=1e-5, polar=_warm(ell)).step, device, REPEATS)
        rows.append({"x": ell, "LowRank, warm": ms})
        print("  rank", ell, round(ms, 3), flush=True)
    return rows


def _warm(ell: int) -> ps.LowRank:
    """A warm sketch with ℓ columns, of every shape."""
    return ps.LowRank(ell - 8, 8, sketch=ps.Warm(), inner=INNER, always_sketch=True)


def exponent(rows: list[dict[str, float]], label: str) -> float:
    """Slope of log time against log x over the larger half of the sweep."""
    rows = rows[len(rows) // 2 - 1 :]
    return math.log(rows[-1][label] / rows[0][label]) / math.log(rows[-1]["x"] / rows[0]["x"])
