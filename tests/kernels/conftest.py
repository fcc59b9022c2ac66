"""Kernels run compiled where there is a GPU, and through Triton's interpreter where there is none.

The interpreter must be asked for before Triton is imported, so it has a process of its own:
``TRITON_INTERPRET=1 pytest tests/kernels``, which ``make test`` runs beside all the other tests.
"""

from __future__ import annotations

import os

import pytest
import torch
from tests.kernels.interpreter import compute_in_bfloat16, hasten, refuse_odd_numbers_of_warps

pytest.importorskip("triton")


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    """Make Triton's interpreter faster, stricter and exact in bfloat16, where it is asked for."""
    hasten()
    compute_in_bfloat16()
    refuse_odd_numbers_of_warps()


@pytest.fixture(autouse=True)
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU: run TRITON_INTERPRET=1 pytest tests/kernels")
    return torch.device("cpu")
