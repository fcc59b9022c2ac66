"""Run directories made up for the tests of the report: no training, the real record format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from polarstep_lab.paper import TABLE_2
from polarstep_lab.records.record import Ablation, MetricRow, Result, RunSpec
from polarstep_lab.report import blocks_of
from polarstep_lab.report.page import markdown_page

DEVICE = "Synthetic CPU"


def markdown(sections, notices) -> str:
    """The Markdown of sections, as ``summary.md`` has it."""
    return markdown_page({section: blocks_of(section) for section in sections}, notices)


def write_run(
    folder: Path,
    *,
    method: str = "AdamW",
    seed: int = 0,
    recipe: str = "gpt-small",
    benchmark: str = "nanogpt",
    status: str | None = "finished",
    final: float = 30.0,
    gflops: float = 1.0,
    optimizer_ms: float = 2.0,
    ablation: Ablation | None = None,
    overrides: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    device: str = DEVICE,
    gamma: bool = False,
    steps: int = 200,
    metric: str | None = None,
) -> Path:
    """One run whose validation falls to ``final``; ``status=None`` leaves it without a result.

    Its config is that of its ablation and overrides, or ``settings``.
    """
    folder.mkdir(parents=True)
    config = {"method": method, "seed": seed}
    if settings is None:
        settings = {**({ablation.axis: ablation.value} if ablation else {}), **(overrides or {})}
    config |= settings
    RunSpec(
        recipe=recipe,
        benchmark=benchmark,  # type: ignore[arg-type]
        method=method,
        seed=seed,
        config=config,
        overrides=overrides or {},
        ablation=ablation,
        command=f"polarstep run {recipe} --method '{method}' --seed {seed}",
    ).save(folder)
    environment = {
        "packages": {"polarstep": "0.1.0", "torch": "2.13.0"},
        "python": "3.11.2",
        "device": "cpu",
        "device_name": device,
        "threads": 2,
        "git_commit": None,
        "started": "2026-11-15T01:00:00Z",
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    noise = np.random.default_rng(seed + 17 * len(method))
    end = steps if status == "finished" else steps // 3
    lines = []
    for step in range(0, end + 1, steps // 20):
        share = step / steps
        loss = math.log(final) + 2.5 * (1 - share) ** 3 + 0.01 * (1 - share) * noise.normal()
        if benchmark == "cifar10":
            loss = 0.9 + 1.2 * (1 - share) ** 2 - final + 0.93
        if status == "diverged" and step > end // 2:
            loss = math.nan if step == end else loss + 5.0
        row = MetricRow(
            step, "val", loss, 0.01, step * 0.05, 50.0, optimizer_ms, tokens=step * 1024,
            perplexity=math.exp(loss) if benchmark == "nanogpt" else None,
            accuracy=final * share if benchmark == "cifar10" else None,
        )  # fmt: skip
        lines.append(json.dumps({k: v if v == v else None for k, v in row.to_dict().items()}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if gamma:
        rows = [
            {
                "step": step,
                "parameter": f"blocks.{layer}.{part}",
                "gamma": 0.05 + 0.02 * layer + 0.1 * math.exp(-step / 60),
                "nu": 0.001 * layer,
            }
            for step in range(0, steps + 1, 10)
            for layer in range(4)
            for part in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
        ]
        (folder / "gamma.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if status:
        good = status == "finished"
        Result(
            metric=metric or ("test_accuracy" if benchmark == "cifar10" else "val_perplexity"),
            value=final if good else math.nan,
            status=status,  # type: ignore[arg-type]
            steps=end,
            optimizer_gflops_per_step=gflops,
            optimizer_ms_per_step=optimizer_ms,
            step_ms=50.0 + optimizer_ms,
            message="" if good else f"the loss was not finite at step {end}",
        ).save(folder)
    return folder


def write_comparison(root: Path, recipe: str, benchmark: str, seeds: int = 3) -> None:
    """All seven methods around the paper's own figures, seed by seed."""
    times = {"AdamW": 0.8, "SGD (Nesterov)": 0.4}
    for index, (method, paper) in enumerate(TABLE_2[benchmark].items()):
        for seed in range(seeds):
            shift = paper.std * (seed - (seeds - 1) / 2)
            write_run(
                root / f"{index}-{seed}",
                method=method,
                seed=seed,
                recipe=recipe,
                benchmark=benchmark,
                final=paper.mean + shift,
                gflops=paper.gflops,
                optimizer_ms=times.get(method, 2.7 if "Rand" in method else 4.1) + 0.01 * seed,
                gamma="Gaussian" in method,
            )
