"""As in tests/kernels."""

from tests.kernels.conftest import device, interpreter

__all__ = ["device", "interpreter"]
