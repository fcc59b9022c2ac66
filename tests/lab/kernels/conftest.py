"""As in tests/kernels."""

from tests.kernels.conftest import (
    builtins_are_looked_up_once,
    device,
    overflows_are_not_looked_for,
    types_are_looked_up_once,
)

__all__ = [
    "builtins_are_looked_up_once",
    "device",
    "overflows_are_not_looked_for",
    "types_are_looked_up_once",
]
