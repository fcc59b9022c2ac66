"""As in tests/kernels."""

from tests.kernels.conftest import device

__all__ = ["device"]
