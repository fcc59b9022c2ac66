"""What a function asks of torch: the FLOPs of its products, and how many operations it calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["Flops", "Operations"]

aten = torch.ops.aten
# Products that torch's registry knows under another name only.
IN_PLACE = {aten.baddbmm_: aten.baddbmm, aten.addmm_: aten.addmm}
# They move no data.
VIEWS = {"detach", "permute", "select", "split", "split_with_sizes", "t", "transpose"} | {
    "unbind",
    "unsqueeze",
    "view",
}


class Flops(TorchDispatchMode):
    """``total`` is the number of FLOPs of all products within the context.

    torch's own FlopCounterMode also asks of every operation where it comes from. That takes longer
    than the operation. Products in bfloat16 are taken in float32, as a CPU without bfloat16 takes a
    hundred times as long for them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = func.overloadpacket
        formula = flop_registry.get(IN_PLACE.get(product, product))
        if formula is None:
            return func(*args, **(kwargs or {}))
        if not kwargs and args[-1].dtype == torch.bfloat16:
            out = func(*(X.float() for X in args)).bfloat16()
        else:
            out = func(*args, **(kwargs or {}))
        self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations by name. On a GPU each that is no view is a launch, or more."""

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
