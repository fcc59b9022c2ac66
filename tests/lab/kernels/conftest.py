"""As in tests/kernels."""

from tests.kernels.conftest import builtins_are_looked_up_once, device

__all__ = ["builtins_are_looked_up_once", "device"]
