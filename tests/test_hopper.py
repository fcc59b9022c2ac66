"""Kernels of whole steps compile for a Hopper GPU, and for a desktop's Blackwell GPU."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
from tests.forking import fork
from tests.processes import PATIENCE

pytest.importorskip("triton")


def compiled(*words: str) -> str:
    """What ``python -m tests.hopper`` prints for these words, where kernels can be compiled."""
    if sys.platform != "linux":
        pytest.skip("Triton compiles on Linux")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted")
    process = fork("-m", "tests.hopper", *words)
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    return out


def test_the_kernels_of_a_full_space_step_fit_a_desktops_gpu() -> None:
    out = compiled("sm_120", "full")
    assert "_product_kernel" in out
    assert "_symmetric_kernel" not in out  # its tiles take more shared memory than there is


def test_the_kernels_of_a_step_in_eight_bits_compile() -> None:
    out = compiled("auto", "auto with rms")
    launched, with_rms = (
        {each.partition(" × ")[2] for each in line.partition(": ")[2].split(", ")}
        for line in out.splitlines()
    )
    assert with_rms - launched == {"_lifted_norm_kernel"}
    # The products in eight bits, the update that multiplies the last of them out, and the estimate of s.
    expected = {"_flatten_kernel", "_symmetric_kernel", "_update_from_rows_kernel", "_scale_kernel"}
    assert expected <= launched


def test_no_two_kernels_share_a_name() -> None:
    """Profiles, and the counts above, know a kernel by its name alone."""
    texts = [path.read_text() for path in Path("src").rglob("*.py")]
    names = [name for text in texts for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)]
    assert names
    assert len(names) == len(set(names))
