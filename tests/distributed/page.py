"""Run the code of docs/distributed.md; main returns the names that it leaves."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def main(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    page: dict[str, Any] = {"__name__": __name__}
    routes, weights = [], []
    for block in BLOCKS:
        page.pop("optimizer", None)
        exec(compile(block, str(PAGE), "exec"), page)
        if "optimizer" in page:
            page["saved"] = page["optimizer"]
            routes.append(str(page["optimizer"].routes))
            first = next(page["model"].parameters())
            weights.append(getattr(first, "full_tensor", lambda first=first: first)().detach())
    return {"routes": routes, "weights": weights, **_one_more_step(page)}


def _one_more_step(page: dict[str, Any]) -> dict[str, Any]:
    """The weights after one more step of the optimizer that was saved, and of the loaded one."""
    model, found = page["model"], {}
    before = [p.detach().clone() for p in model.parameters()]
    for name, optimizer in (("went on", page["saved"]), ("resumed", page["resumed"])):
        with torch.no_grad():
            for p, start in zip(model.parameters(), before, strict=True):
                p.copy_(start)
        page["train"](model, optimizer, 1)
        found[name] = [p.full_tensor().detach() for p in model.parameters()]
    return found
