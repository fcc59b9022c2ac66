"""Kernels run compiled where there is a GPU, and through Triton's interpreter where there is none.

The interpreter must be asked for before Triton is imported, so it has a process of its own:
``TRITON_INTERPRET=1 pytest tests/kernels``, which ``make test`` runs after all the other tests.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU: run TRITON_INTERPRET=1 pytest tests/kernels")
    return torch.device("cpu")
