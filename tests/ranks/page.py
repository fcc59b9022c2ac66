"""Run the code of docs/distributed.md, blocks and lines within sentences; main returns what it left."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "distributed.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def is_call(code: str) -> bool:
    """Whether ``code`` is a whole call with arguments; ``step()`` alone is the name of a method."""
    try:
        tree = ast.parse(code, mode="eval").body
    except SyntaxError:
        return False
    given = [*tree.args, *tree.keywords] if isinstance(tree, ast.Call) else []
    return bool(given) and "..." not in code


INLINE = [
    code
    for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL))
    if is_call(code)
]


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
    return {
        "routes": routes,
        "weights": weights,
        "lines": _lines(page),
        **_one_more_step(page),
    }


def _lines(page: dict[str, Any]) -> list[str]:
    """What each line within a sentence makes of a new network."""
    made = []
    for code in INLINE:
        model = nn.parallel.DistributedDataParallel(page["network"]())
        names = {
            "model": model,
            "optimizer": page["saved"],
            "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
        }
        made.append(type(eval(code, page | names)).__name__)
    return made


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
