"""The code that runs while a CUDA graph is captured, on a machine that cannot capture any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from polarstep import Muon


@contextmanager
def as_if_captured() -> Iterator[None]:
    capturing = patch.object(torch.cuda, "is_current_stream_capturing", return_value=True)
    gpu = patch.object(Muon, "_first_gpu", return_value=torch.device("cpu"))
    with patch.object(torch.cuda, "is_initialized", return_value=True), capturing, gpu:
        yield
