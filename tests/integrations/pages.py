"""Running the scripts of docs/integrations as a reader would: copied into a file, in an empty folder."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

PAGES = Path(__file__).resolve().parents[2] / "docs" / "integrations"


def needs(package: str) -> pytest.MarkDecorator:
    """Skip the tests of a file where ``package`` is not installed; nothing is imported to find out."""
    reason = f"{package} is not installed: make test installs it"
    return pytest.mark.skipif(find_spec(package) is None, reason=reason)


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order: the script first, resuming last."""
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL)


def run(source: str, namespace: dict[str, Any], page: str) -> dict[str, Any]:
    """Execute a block in a namespace, in the current folder, and return the namespace."""
    exec(compile(source, page, "exec"), namespace)
    return namespace


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of a model's weights, to compare with later ones."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )
