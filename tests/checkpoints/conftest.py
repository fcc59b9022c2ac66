from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def same_models() -> None:
    """Models are the same in every run: one draw in 150 of a small one has layers without a gradient."""
    torch.manual_seed(0)
