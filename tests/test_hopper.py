"""The kernels of the step that ``polar="auto"`` takes compile for a Hopper GPU."""

from __future__ import annotations

import os
import sys

import pytest
from tests.forking import fork
from tests.processes import PATIENCE

pytest.importorskip("triton")


@pytest.mark.skipif(sys.platform != "linux", reason="Triton compiles on Linux")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted")
def test_the_kernels_of_a_step_in_eight_bits_compile() -> None:
    process = fork("-m", "tests.hopper", "auto")
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    name, _, counts = out.partition(": ")
    launched = {each.partition(" × ")[2] for each in counts.strip().split(", ")}
    assert name == "auto"
    # The products in eight bits, the update that multiplies the last of them out, and the estimate of s.
    assert {"_flatten_kernel", "_symmetric_kernel", "_rows_kernel", "_scale_kernel"} <= launched
