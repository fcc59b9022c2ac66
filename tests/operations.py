"""How many operations of torch a function calls: on a GPU each of them is a launch, or more."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Operations"]

# They move no data.
VIEWS = {"detach", "permute", "select", "split", "split_with_sizes", "t", "transpose"} | {
    "unbind",
    "unsqueeze",
    "view",
}


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    @property
    def launches(self) -> int:
        """The number of operations that are no views."""
        return sum(count for name, count in self.counts.items() if name not in VIEWS)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
