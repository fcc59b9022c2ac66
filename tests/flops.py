"""Count the FLOPs of matrix products with the formulas of ``torch.utils.flop_counter``."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["Flops"]


aten = torch.ops.aten
# Products that torch's registry knows under another name only.
IN_PLACE = {aten.baddbmm_: aten.baddbmm, aten.addmm_: aten.addmm}


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
